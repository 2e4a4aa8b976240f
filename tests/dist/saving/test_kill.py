"""Nothing is lost: a save killed at any file operation, on any rank, leaves a whole checkpoint to go on from."""

from pathlib import Path

import pytest

from support.processes import run_processes


@pytest.mark.dist
@pytest.mark.timeout(300)
def test_a_kill_at_every_file_operation_leaves_a_whole_checkpoint(tmp_path):
    points = run_processes(1, Path(__file__).with_name("kill_main.py"), "--directory", str(tmp_path), timeout_s=280)
    assert points["checkpoints"] >= 200
    assert points["full"] >= 20
