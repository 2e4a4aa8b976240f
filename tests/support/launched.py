"""Launches modules of this folder as ranks, as ``fullshard train`` launches its own."""

import os
import sys

import pytest

from fullshard.program.launch import launch
from support.processes import SOURCE, TESTS


def launch_support(name, arguments, **more):
    """Two ranks of a module of this folder, which they find by ``PYTHONPATH``; returns how they ended."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(SOURCE), str(TESTS)]))
        return launch([sys.executable, "-m", f"support.{name}", *arguments], nproc=2, **more)
