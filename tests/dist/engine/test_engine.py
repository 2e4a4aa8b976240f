"""The engine on two real gloo processes; all cases share one pair, because starting it is what takes time."""

from pathlib import Path

import pytest

from support.processes import run_processes

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def ranks():
    return run_processes(2, Path(__file__).with_name("rank_main.py"))


@pytest.mark.parity
@pytest.mark.parametrize("case", ["parity", "torchs_collectives"])
def test_sharded_runs_equal_unsharded_runs(ranks, case):
    assert [rank[case] for rank in ranks] == [True] * 2


def test_peak_memory_is_shards_two_units_and_one_units_gradients(ranks):
    for rank in ranks:
        figures = rank["memory"]
        assert figures["gathered_peak"] == 2 * figures["unit"]
        assert figures["gradients_peak"] == figures["unit"]
        # above the parameters' shards: the gradients' shards, two units, one unit's gradients, and small activations
        bound = figures["shards"] + 3 * figures["unit"]
        assert figures["above_start"] <= bound + figures["largest_parameter"] // 10, figures


def test_sharding_a_model_without_memory_never_holds_more_than_one_unit_above_the_shards(ranks):
    for rank in ranks:
        figures = rank["building"]
        assert figures["initialised"]
        assert figures["above_start"] <= figures["shards"] + figures["unit"] + 4096, figures


def test_exchanged_parts_arrive(ranks):
    for rank in ranks:
        assert rank["exchange"] == {"right": True}


def test_ranks_with_gpus_add_up_flags_in_host_memory(ranks):
    for rank in ranks:
        assert rank["host_sum"] == {"flags": [2, 0, 1]}


def test_a_profile_has_a_label_for_each_units_collectives_and_computation(ranks):
    for rank in ranks:
        figures = rank["labels"]
        assert figures["units"] == ["(root)", "blocks.0", "blocks.1", "blocks.2"]
        expected = {"fullshard::optimizer_step (AdamW)": 1}
        expected |= {f"fullshard::{kind} (root)": 1 for kind in ("forward", "backward")}  # it has no parameters itself
        for unit in figures["units"][1:]:
            once = dict.fromkeys(("forward", "backward", "reduce_scatter", "reduce_scatter_wait"), 1)
            twice = {"all_gather": 2, "all_gather_wait": 4}  # the gather, and before its memory is freed
            expected |= {f"fullshard::{kind} ({unit})": count for kind, count in (once | twice).items()}
        assert figures["labels"] == expected


def test_without_a_profiler_a_step_makes_no_label_but_torchs_own(ranks):
    for rank in ranks:
        assert rank["labels"]["without"] == ["Optimizer.step#AdamW.step", "Optimizer.zero_grad#AdamW.zero_grad"]
