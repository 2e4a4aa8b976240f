"""Elementwise optimizers that step whole lanes."""
