"""A part that looks like the whole never gives out elements that it has not."""

import copy
import io

import pytest
import torch
from torch import nn

from fullshard.core.testing import run_ranks
from fullshard.errors import ShardingError
from fullshard.state.saving.shard_tensor import ShardTensor, part_or_full


def part():
    return ShardTensor.of((8, 4), 4, torch.arange(12.0))


@pytest.mark.parametrize(
    "use",
    [
        lambda shard: shard.norm(),
        lambda shard: shard.sum(),
        lambda shard: shard * 2,
        lambda shard: shard.add_(1),
        lambda shard: shard.data,
        lambda shard: shard[0],
        lambda shard: shard.numpy(),
        lambda shard: shard.tolist(),
        lambda shard: torch.equal(shard, torch.ones(8, 4)),
        lambda shard: torch.empty(8, 4).copy_(shard),
    ],
    ids=lambda use: None,
)
def test_what_reads_elements_is_refused(use):
    with pytest.raises(ShardingError, match=r"one rank.s part of a tensor|pickling"):
        use(part())


def test_a_plain_model_does_not_load_parts():
    with pytest.raises(RuntimeError, match="one rank's part of a tensor"):
        nn.Linear(4, 8, bias=False).load_state_dict({"weight": part()})


def test_a_deep_copy_of_a_state_dict_copies_parts():
    state = {"one": part()}
    state["tied"] = state["one"]
    kept = copy.deepcopy(state)
    state["one"].zero_()
    assert kept["one"] is kept["tied"]
    assert torch.equal(kept["one"].flat, torch.arange(12.0))
    assert (kept["one"].shape, kept["one"].start, kept["one"].written) == ((8, 4), 4, (4, 16))


def test_a_part_moves_and_is_cast_as_a_part():
    moved = part().to("cpu", torch.float64).cpu()
    assert (moved.shape, moved.dtype, moved.start, moved.written) == ((8, 4), torch.float64, 4, (4, 16))
    assert torch.equal(moved.flat, torch.arange(12.0).double())


def test_the_whole_of_runs_that_overlap_lie_anywhere_and_have_any_dtype():
    whole = torch.arange(24, dtype=torch.bfloat16).view(6, 4)
    held = [(9, 20), (0, 0), (0, 12), (20, 24)]  # 9 to 12 twice

    def work(comm):
        start, stop = held[comm.rank]
        return part_or_full((6, 4), start, whole.reshape(-1)[start:stop].clone(), comm=comm).full_tensor()

    for found in run_ranks(4, work):
        assert torch.equal(found, whole)


def test_a_rank_that_holds_all_has_a_plain_tensor_that_others_may_ask_for():
    whole = torch.arange(6.0).view(2, 3)

    def work(comm):
        value = part_or_full((2, 3), 0, whole.reshape(-1)[: 0 if comm.rank else 6].clone(), comm=comm)
        assert torch.equal(value.full_tensor(), whole)
        if comm.rank == 0:
            assert type(value * 2) is torch.Tensor
            assert type(copy.deepcopy(value)) is torch.Tensor
            file = io.BytesIO()
            torch.save({"value": value}, file)
            file.seek(0)
            assert torch.equal(torch.load(file, weights_only=True)["value"], whole)

    run_ranks(2, work)


def test_a_part_that_does_not_know_the_others_says_so():
    with pytest.raises(ShardingError, match="was loaded or copied and cannot reach the other ranks"):
        part().full_tensor()


def test_another_ranks_part_is_refused():
    with pytest.raises(ShardingError, match=r"w has elements 4 to 16, but this rank holds 0 to 12"):
        part().elements("w", (0, 12))
    with pytest.raises(ShardingError, match="holds 0 to 0"):
        part().elements("w", (0, 0))
    assert part().elements("w", (4, 16)).numel() == 12


def test_what_it_is_may_be_asked():
    shard = part()
    assert (shard.shape, shard.dtype, shard.device, shard.numel()) == ((8, 4), torch.float32, torch.device("cpu"), 32)
    assert "elements 4 to 16 of (8, 4)" in repr(shard)
