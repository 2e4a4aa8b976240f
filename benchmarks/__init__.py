"""Measurements of fullshard next to other engines; ``python benchmarks/NAME.py``, or ``python -m benchmarks.gpu``."""
