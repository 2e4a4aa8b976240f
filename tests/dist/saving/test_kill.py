"""Nothing is lost: a save killed at any file operation, on any rank, leaves a whole checkpoint to go on from."""

from pathlib import Path

import pytest

from support.processes import run_processes

pytestmark = pytest.mark.dist


def points(case, directory, timeout_s=110, script="kill_main.py"):
    """How many kills the saves of ``case`` survived."""
    script = Path(__file__).with_name(script)
    return run_processes(1, script, "--only", case, "--directory", str(directory), timeout_s=timeout_s)[case]


@pytest.mark.slow
def test_a_kill_between_any_two_states_of_the_disk_leaves_a_whole_checkpoint(tmp_path):
    assert points("checkpoints", tmp_path) >= 100


def test_a_kill_at_every_file_operation_leaves_a_whole_model(tmp_path):
    assert points("full", tmp_path) >= 20


@pytest.mark.slow
@pytest.mark.timeout(540)
def test_a_kill_at_every_file_operation_leaves_a_whole_checkpoint(tmp_path):
    assert points("every_point", tmp_path, timeout_s=520) >= 200


@pytest.mark.slow
def test_a_kill_at_every_operation_on_an_object_store_leaves_a_complete_checkpoint(tmp_path):
    assert points("objects", tmp_path, script="kill_objects_main.py") >= 100
