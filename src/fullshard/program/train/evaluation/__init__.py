"""Evaluation of a model on held-out rows, and prediction for new rows."""
