"""Tests that hold for some releases of a library only."""

from importlib.metadata import version

import pytest


def installed(package):
    return tuple(map(int, version(package).split(".")[:2]))


ACCELERATE_1_15 = installed("accelerate") >= (1, 15)

as_accelerate_1_15 = pytest.mark.skipif(not ACCELERATE_1_15, reason="names and arguments are those of Accelerate 1.15")

opt_reads_nothing = pytest.mark.skipif(
    installed("transformers") < (5, 23), reason="OPT of transformers 5.17 reads a random number, on the CPU, each layer"
)
