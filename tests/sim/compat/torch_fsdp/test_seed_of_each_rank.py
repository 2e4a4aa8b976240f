"""Ranks that start with values of their own train from rank 0's, as under DDP, and rank 0 warns once."""

import copy
import warnings

import pytest
import torch
from torch import nn

from fullshard import fully_shard as native
from fullshard.compat.torch_fsdp import FullyShardedDataParallel as FSDP, ModuleWrapPolicy
from fullshard.compat.torch_fsdp.fsdp2 import fully_shard
from fullshard.core.testing import ThreadComm, run_ranks
from fullshard.errors import MismatchError
from support.models import Block, TinyLM, batches, lm_loss
from support.parity import ROWS_PER_RANK, assert_same_run, steps_for, train_sharded, train_unsharded

BLOCKS = ModuleWrapPolicy({Block})


class Noised(TinyLM):
    """A model with a buffer that is drawn."""

    def __init__(self):
        super().__init__()
        self.register_buffer("noise", torch.randn(3))


def drawn_by_each(size, make=Noised, seed=7):
    """One model for each rank, with the seed ``seed + rank``."""
    models = []
    for rank in range(size):
        with torch.random.fork_rng():
            torch.manual_seed(seed + rank)
            models.append(make())
    return models


def fsdp1(model, comm):
    return FSDP(model, comm, auto_wrap_policy=BLOCKS)


def fsdp2(model, comm):
    for block in model.blocks:
        fully_shard(block, mesh=comm)
    return fully_shard(model, mesh=comm)


@pytest.mark.parametrize("shard", [fsdp1, fsdp2])
@pytest.mark.parametrize("size", [2, 3])
def test_they_train_as_the_unsharded_run_from_rank_0s_values(shard, size):
    models = drawn_by_each(size)
    plain, noise = copy.deepcopy(models[0]), models[0].noise.clone()
    data = batches(steps_for(size), size * ROWS_PER_RANK)

    def work(comm):
        model = models[comm.rank]
        shard(model, comm)
        assert torch.equal(model.noise, noise)
        return train_sharded(model, comm, lm_loss, data, sharded=True)

    with pytest.warns(UserWarning, match="different values, first in") as told:
        runs = run_ranks(size, work)
    assert len(told) == 1
    for run in runs:
        assert_same_run(run, train_unsharded(copy.deepcopy(plain), lm_loss, data))


def test_the_warning_names_the_first_parameter_that_differs_and_only_its_unit_is_sent(monkeypatch):
    sent = []
    original = ThreadComm.broadcast
    monkeypatch.setattr(
        ThreadComm, "broadcast", lambda comm, tensor, source=0: sent.append(comm.announced) or original(comm, tensor)
    )
    models = [model.requires_grad_() for model in [*drawn_by_each(1), *drawn_by_each(1)]]
    with torch.no_grad():
        models[1].blocks[2].down.weight += 1

    with pytest.warns(UserWarning, match=r"first in blocks\.2\.down\.weight") as told:
        run_ranks(2, lambda comm: fsdp1(models[comm.rank], comm))
    assert len(told) == 1
    assert set(sent) == {"first values of unit blocks.2 from rank 0"}


@pytest.mark.parametrize("shard", [fsdp1, fsdp2])
def test_nothing_is_sent_where_ranks_agree(monkeypatch, shard):
    def broadcast(*_):
        raise AssertionError

    monkeypatch.setattr(ThreadComm, "broadcast", broadcast)
    models = [*drawn_by_each(1), *drawn_by_each(1)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_ranks(2, lambda comm: shard(models[comm.rank], comm))


def test_a_second_model_of_the_same_ranks_is_repaired_without_another_warning():
    first, second = drawn_by_each(2), drawn_by_each(2, seed=20)
    expected = second[0].head.weight.detach().clone()

    def work(comm):
        fsdp1(first[comm.rank], comm)
        return fsdp1(second[comm.rank], comm).state_dict()["head.weight"].clone()

    with pytest.warns(UserWarning, match="different values") as told:
        assert all(torch.equal(found, expected) for found in run_ranks(2, work))
    assert len(told) == 1


def test_a_model_on_the_meta_device_takes_rank_0s_seed_wherever_other_ranks_have_values():
    def build(rank):
        with torch.device("meta" if rank != 1 else "cpu"):
            return TinyLM(layers=2)

    models = [build(rank) for rank in range(3)]

    def work(comm):
        model = FSDP(models[comm.rank], comm, auto_wrap_policy=BLOCKS)
        return {name: value.clone() for name, value in model.state_dict().items()}

    with pytest.warns(UserWarning, match="different values"):
        states = run_ranks(3, work)
    for state in states[1:]:
        torch.testing.assert_close(state, states[0], atol=0, rtol=0)
    assert states[0]["blocks.0.up.weight"].std() > 0.1


def test_buffers_alone_are_sent_too_but_not_those_of_ignored_modules():
    class Parts(nn.Module):
        def __init__(self, rank):
            super().__init__()
            self.first, self.apart = nn.Linear(3, 3), nn.Linear(3, 3)
            self.first.register_buffer("table", torch.tensor(float(rank)))
            self.apart.register_buffer("table", torch.full((rank + 1,), float(rank)))

        def forward(self, x):
            return self.apart(self.first(x))

    def build(rank):
        torch.manual_seed(0)
        return Parts(rank)

    models = [build(rank) for rank in range(2)]

    def work(comm):
        model = models[comm.rank]
        for param in model.apart.parameters():
            param.requires_grad_(False)
        FSDP(model, comm, ignored_modules=[model.apart])
        return model.first.table.item(), model.apart.table.tolist()

    with pytest.warns(UserWarning, match=r"first in first\.table"):
        assert run_ranks(2, work) == [(0.0, [0.0]), (0.0, [1.0, 1.0])]


def test_the_native_door_refuses_and_names_the_parameter_and_the_remedy():
    models = drawn_by_each(2)
    with pytest.raises(MismatchError, match=r"first in embed\.weight .* first_values=.*from_rank0=True"):
        run_ranks(2, lambda comm: native(models[comm.rank], comm))
