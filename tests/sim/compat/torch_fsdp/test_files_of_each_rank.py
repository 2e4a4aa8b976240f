"""``torch.save`` by every rank of a sharded state dict, and loading on the same ranks or on others."""

import io
import re

import pytest
import torch
from torch import nn

from fullshard.compat.torch_fsdp import FullyShardedDataParallel as FSDP, ModuleWrapPolicy, StateDictType
from fullshard.core.testing import run_ranks
from fullshard.errors import ShardingError
from fullshard.state.saving.shard_tensor import ShardTensor, part_or_full
from support.fsdp2 import rows_of, shard
from support.models import Block, TinyLM, lm_loss
from support.parity import replicas

SIZE = 2
IGNORED = pytest.mark.filterwarnings("ignore:A state dict with ShardTensors is pickled")


def fsdp2(model, comm):
    return shard(model, comm)


def fsdp1(kind):
    def wrapped(model, comm):
        model = FSDP(model, comm, auto_wrap_policy=ModuleWrapPolicy({Block}))
        FSDP.set_state_dict_type(model, kind)
        return model

    return wrapped


KINDS = {
    "fsdp2": fsdp2,
    "sharded": fsdp1(StateDictType.SHARDED_STATE_DICT),
    "local": fsdp1(StateDictType.LOCAL_STATE_DICT),
}


def run(kind, size, work, make=TinyLM):
    _, models = replicas(make, size)
    return run_ranks(size, lambda comm: work(comm, KINDS[kind](models[comm.rank], comm)))


def train(model, optimizer, data):
    for tokens in data:
        lm_loss(model, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def written(value):
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def values_of(model):
    with FSDP.summon_full_params(model, writeback=False):
        return {name: param.detach().clone() for name, param in model.named_parameters()}


def save_after_two_steps(kind, size):
    """The file of each rank, and the weights after two steps more."""

    def work(comm, model):
        optimizer, data = adam(model), rows_of(comm, 4)
        train(model, optimizer, data[:2])
        file = written({"model": model.state_dict(), "optim": optimizer.state_dict()})
        train(model, optimizer, data[2:])
        return file, values_of(model)

    return run(kind, size, work)


@IGNORED
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_goes_on_from_the_file_of_each_rank(kind):
    saved = save_after_two_steps(kind, SIZE)

    def work(comm, model):
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(0)
        optimizer = adam(model)
        file, expected = saved[comm.rank]
        state = torch.load(io.BytesIO(file), weights_only=True)
        model.load_state_dict(state["model"])
        train(model, optimizer, rows_of(comm, 1))  # its state dict has places after a first step
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optim"])
        train(model, optimizer, rows_of(comm, 4)[2:])
        torch.testing.assert_close(values_of(model), expected, atol=0, rtol=0)

    run(kind, SIZE, work)


@IGNORED
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("size", "file_of", "told"),
    [
        (2, lambda rank: 1 - rank, r"\(rank 1 of 2\), but this rank.*\(rank 0 of 2\)"),
        (3, lambda rank: rank % 2, r"\(rank 0 of 2\), but this rank.*\(rank 0 of 3\)"),
    ],
    ids=["other rank", "other number of ranks"],
)
def test_another_layout_is_refused_before_anything_changes(kind, size, file_of, told):
    saved = save_after_two_steps(kind, SIZE)

    def work(comm, model):
        before = values_of(model)
        state = torch.load(io.BytesIO(saved[file_of(comm.rank)][0]), weights_only=True)
        with pytest.raises(ShardingError) as caught:
            model.load_state_dict(state["model"])
        torch.testing.assert_close(values_of(model), before, atol=0, rtol=0)
        return str(caught.value)

    messages = run(kind, size, work)
    assert len(set(messages)) == 1  # all ranks raise the first one's
    assert re.search(told, messages[0]), messages[0]


def test_rank_0_says_that_the_file_is_a_part_and_others_do_not():
    def saving(rank):
        return lambda comm, model: torch.save(model.state_dict(), io.BytesIO()) if comm.rank == rank else None

    run("fsdp2", SIZE, saving(1))  # warnings are errors
    with pytest.warns(UserWarning, match="this rank's part only"):
        run("fsdp2", SIZE, saving(0))


@IGNORED
def test_a_loaded_part_knows_its_place_but_no_ranks_and_is_no_plain_models():
    def work(comm):
        part = part_or_full((6, 4), 4 * comm.rank, torch.arange(64.0)[:12], comm=comm)
        file = written(part)
        assert len(file) < 2000
        return torch.load(io.BytesIO(file), weights_only=True)

    part = run_ranks(2, work)[1]
    assert (type(part), part.place, part.start, part.written, part.flat.numel()) == (
        ShardTensor,
        (1, 2),
        4,
        (4, 16),
        12,
    )
    assert part.to(torch.float64).place == (1, 2)
    with pytest.raises(ShardingError, match="was loaded or copied and cannot reach the other ranks"):
        part.full_tensor()
    with pytest.raises(RuntimeError, match="one rank's part of a tensor"):
        nn.Linear(4, 6, bias=False).load_state_dict({"weight": part})


def test_one_parameter_is_refused():
    def work(comm, model):
        with pytest.raises(ShardingError, match="pickling"):
            torch.save(model.head.weight, io.BytesIO())

    run("fsdp2", SIZE, work)
