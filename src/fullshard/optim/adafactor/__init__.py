"""Adafactor for sharded models."""
