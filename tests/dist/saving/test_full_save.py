"""What a full save takes on two real gloo processes: memory on rank 0, and patience of the others."""

from pathlib import Path

import pytest

from support.processes import run_processes

pytestmark = pytest.mark.dist

LIMIT = 64_000_000


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    script = Path(__file__).with_name("full_save_main.py")
    return run_processes(2, script, "--directory", str(tmp_path_factory.mktemp("full")))


def test_rank_0_holds_its_shards_and_64_mb(ranks):
    writer, other = (rank["memory"] for rank in ranks)
    assert writer["model"] > 240_000_000
    assert 0.49 * writer["model"] < writer["file"] < 0.51 * writer["model"]  # saved last in bfloat16
    assert 0 < writer["save_above_start"] <= LIMIT, writer
    assert other["save_above_start"] < 1_000_000, other


@pytest.mark.parametrize("measure", ["resident_growth", "resident_growth_with_casts"])
def test_the_process_grows_by_less_than_one_unit_and_64_mb(ranks, measure):
    for rank in ranks:
        assert rank["memory"]["largest_unit"] > LIMIT
        assert rank["memory"][measure] <= 1.25 * LIMIT, rank["memory"]  # some for what is no tensor


def test_the_state_dict_takes_the_model_and_64_mb_on_rank_0_and_nothing_elsewhere(ranks):
    writer, other = (rank["memory"] for rank in ranks)
    assert writer["model"] <= writer["state_above_start"] <= writer["model"] + LIMIT, writer
    assert writer["names"] == 134
    assert (other["names"], other["state_above_start"] < 1_000_000) == (0, True), other


def test_a_disk_slower_than_the_groups_timeout_trips_nothing(ranks):
    for rank in ranks:
        assert rank["slow_disk"]["met"] > 8
        assert rank["slow_disk"]["saved"]
