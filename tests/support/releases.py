"""Tests that hold for some releases of a library only."""

from importlib.metadata import version

import pytest

ACCELERATE_1_15 = tuple(map(int, version("accelerate").split(".")[:2])) >= (1, 15)

as_accelerate_1_15 = pytest.mark.skipif(not ACCELERATE_1_15, reason="names and arguments are those of Accelerate 1.15")
