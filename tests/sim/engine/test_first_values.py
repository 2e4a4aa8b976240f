"""First values: from a function that initialises modules, or from rank 0, one unit at a time."""

import pytest
import torch
from torch import nn

from fullshard import MixedPrecision, ShardingStrategy, TransformerBlocks, full_state_dict, fully_shard
from fullshard.core.engine import FirstValues
from fullshard.core.shards import rows_of
from fullshard.core.testing import RecordingComm, run_ranks
from fullshard.errors import ConfigError, FullshardError, MismatchError, WrapError
from support.models import Block, TinyLM, batches, lm_loss
from support.parity import alone, mesh_for, size_for

BLOCKS = TransformerBlocks({Block})
FULL = ShardingStrategy.FULL_SHARD
FROM_RANK0 = FirstValues(from_rank0=True)


class Odd(nn.Module):
    """Parameters of two dtypes, a scalar, one that is not contiguous, buffers of several kinds."""

    def __init__(self):
        super().__init__()
        self.wide = nn.Linear(6, 5)
        self.narrow = nn.Parameter(torch.randn(7, 3, dtype=torch.bfloat16))
        self.turned = nn.Parameter(torch.randn(4, 6).t())
        self.scalar = nn.Parameter(torch.randn(()))
        self.register_buffer("counts", torch.randint(9, (5,)))
        self.register_buffer("mask", torch.rand(4) > 0.5)
        self.register_buffer("hidden", torch.randn(2, 2).t(), persistent=False)
        self.register_buffer("nothing", None)


def build(make, seed, *, meta=False):
    with torch.random.fork_rng(), torch.device("meta" if meta else "cpu"):
        torch.manual_seed(seed)
        return make()


def values(model):
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    state = full_state_dict(model)
    return None if state is None else dict(state) | buffers


@pytest.mark.parametrize(("strategy", "make"), [*((one, Odd) for one in ShardingStrategy), (FULL, TinyLM)])
def test_every_rank_takes_rank_0s_values_whatever_it_holds(strategy, make):
    size = size_for(strategy, 3)
    models = [build(make, rank, meta=rank == size - 1) for rank in range(size)]
    expected = {name: one.detach().clone() for name, one in [*models[0].named_parameters(), *models[0].named_buffers()]}

    def work(comm):
        mesh = mesh_for(strategy, comm)
        model = fully_shard(models[comm.rank], mesh, wrap=None, strategy=strategy, first_values=FROM_RANK0)
        rows = {p.shard_meta.name: (p.shard_meta.element_range, rows_of(p).reshape(-1)) for p in model.parameters()}
        return rows, dict(model.named_buffers())

    for rows, buffers in run_ranks(size, work):
        for name, ((start, stop), shard) in rows.items():
            torch.testing.assert_close(shard, expected[name].reshape(-1)[start:stop], atol=0, rtol=0)
        for name, buffer in buffers.items():
            torch.testing.assert_close(buffer, expected[name], atol=0, rtol=0)


def test_rank_0_may_be_on_the_meta_device_too():
    def work(comm):
        model = build(lambda: TinyLM(layers=2), 0, meta=True)
        fully_shard(model, comm, wrap=BLOCKS, first_values=FROM_RANK0)
        return values(model)

    one = run_ranks(2, work)[0]
    assert one["blocks.0.up.weight"].std() > 0.1


def test_each_unit_is_sent_before_the_next_one_is_made():
    whole = []
    models = [build(TinyLM, 0), build(TinyLM, 1, meta=True)]
    largest = max(sum(p.numel() for p in block.parameters()) for block in models[0].blocks)

    class Watched(RecordingComm):
        def broadcast(self, tensor, source=0):
            held = [p for block in models[1].blocks for p in block.parameters() if not p.is_meta]
            whole.append(sum(p.numel() for p in held if not hasattr(p, "shard_meta")))
            return super().broadcast(tensor, source)

    def work(comm):
        comm = Watched(comm) if comm.rank else comm
        fully_shard(models[comm.rank], comm, wrap=BLOCKS, first_values=FROM_RANK0)

    run_ranks(2, work)
    assert 0 < max(whole) <= largest


def test_a_rank_that_cannot_initialise_is_told_on_every_rank():
    def initialize(module):
        raise ValueError("no values here")

    def work(comm):
        model = build(lambda: nn.Linear(2, 2), 0, meta=comm.rank == 1)
        with pytest.raises((FullshardError, ValueError), match="no values here"):
            fully_shard(model, comm, wrap=None, first_values=FirstValues(initialize, from_rank0=True))

    run_ranks(2, work)


def test_tied_parameters_stay_tied_and_are_initialised_once():
    calls = []

    def initialize(module):
        calls.append(module)
        module.to_empty(device="cpu", recurse=False)
        with torch.no_grad():
            for param in module.parameters(recurse=False):
                param.fill_(len(calls))

    model = build(TinyLM, 0, meta=True)
    model.head.bias = nn.Parameter(torch.empty(50, device="meta"))  # a unit around a part of what is tied
    units = {model.head, *model.blocks}
    alone(model, wrap=units.__contains__, first_values=FirstValues(initialize))
    assert model.head.weight is model.embed.weight
    lm_loss(model, batches(1, 2)[0]).backward()
    assert len(set(calls)) == len(calls)


def test_what_the_function_leaves_out_is_refused():
    cases = (
        (lambda module: None, "left weight as"),
        (lambda module: module.to_empty(device="cpu").to(torch.float64), "torch.float64"),
    )

    def work(comm, function):
        fully_shard(build(lambda: nn.Linear(2, 2), 0, meta=True), comm, wrap=None, first_values=FirstValues(function))

    for function, text in cases:
        with pytest.raises(WrapError, match=text):
            run_ranks(1, lambda comm, function=function: work(comm, function))


def test_ranks_that_disagree_on_it_are_told():
    def work(comm):
        first = FROM_RANK0 if comm.rank else None
        fully_shard(build(lambda: nn.Linear(2, 2), 0), comm, wrap=None, first_values=first)

    with pytest.raises(MismatchError, match="different models or policies"):
        run_ranks(2, work)


def test_weights_and_first_values_contradict_each_other():
    with pytest.raises(ConfigError, match="pass one of them"):
        run_ranks(1, lambda comm: fully_shard(nn.Linear(2, 2), comm, weights=object(), first_values=FROM_RANK0))


def test_modules_kept_in_float32_reduce_in_it_and_keep_their_buffers():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    policy = MixedPrecision(param="bf16", reduce="bf16", buffer="bf16", keep_fp32=nn.BatchNorm1d)
    alone(model, wrap=None, mp_policy=policy)
    lanes = {p.meta.name: p.lane.dtypes.reduce for _, p in model._fullshard_runtime.all_params()}
    assert lanes["1.weight"] == torch.float32
    assert lanes["0.weight"] == torch.bfloat16
    assert model[1].running_mean.dtype == torch.float32
    model(torch.ones(3, 4)).sum().backward()
