"""Two gloo processes that share rows, as one axis of a device mesh."""

from pathlib import Path

import pytest

from support.processes import run_processes

pytestmark = [pytest.mark.dist, pytest.mark.parity]


def test_two_processes_share_rows_also_with_compiled_blocks():
    differences, graphs = run_processes(2, Path(__file__).with_name("sequence_main.py"))
    assert max(differences) <= 1e-5
    assert graphs == 2 * 2  # a stack's blocks share one for each shape of rows
