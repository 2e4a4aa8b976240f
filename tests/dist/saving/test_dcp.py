"""torch's distributed-checkpoint format on gloo processes: a torch ``fully_shard`` run reads ours, and ours theirs."""

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from fullshard.core.testing import run_ranks
from fullshard.state.saving.dcp import load_dcp, save_dcp
from support.odd import Odd, adagrad, odd
from support.processes import run_processes
from support.states import assert_same_bits, rank_runs, whole

pytestmark = [pytest.mark.dist]

SCRIPT = Path(__file__).with_name("dcp_main.py")


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("dcp")


@pytest.fixture(scope="module")
def on_two(directory):
    return run_processes(2, SCRIPT, "--directory", str(directory), timeout_s=110)


@pytest.fixture(scope="module")
def on_three(directory, on_two):
    return run_processes(3, SCRIPT.with_name("dcp_three_main.py"), str(directory), timeout_s=110)


def test_every_case_of_two_ranks(on_two):
    assert {case: text for case, text in on_two.items() if text} == {}


def test_three_ranks_that_split_rows_read_what_two_wrote(on_three):
    assert on_three["split"] == ["wide"]


def test_gradients_of_three_ranks_are_added_in_their_order_for_each_of_them(on_three):
    assert on_three["sums"] == [[True] * 4] * 3


@pytest.mark.parametrize(("name", "written_by"), [("odd", "odd"), ("copies", "copies"), ("odd_of_three", "copies")])
@pytest.mark.usefixtures("on_three")
def test_one_rank_needs_no_process_group(directory, name, written_by, tmp_path):
    def work(comm):
        model = odd(7, comm)
        optimizer = adagrad(model, lr=0.5)
        load_dcp(model, optimizer, directory / name)
        save_dcp(model, optimizer, tmp_path)
        return whole([rank_runs(model, optimizer)])

    (state,) = run_ranks(1, work)
    assert_same_bits(state, torch.load(directory / f"{written_by}.pt"))
    plain = Odd()
    weights = plain.state_dict()
    with pytest.warns(UserWarning, match="single process"):
        dcp.load({"model": weights}, checkpoint_id=tmp_path, no_dist=True)
    for key, tensor in weights.items():
        first = key.replace("kept_too", "kept")
        assert torch.equal(tensor.reshape(-1), state[f"model/{first}"])
