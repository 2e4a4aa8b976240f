"""Uses of FSDP1's wrapper that torch's own tests and scripts have: attributes, odd groups, views, later modules."""

import copy
import warnings

import pytest
import torch
from torch import nn

from fullshard.compat.torch_fsdp import (
    BackwardPrefetch,
    CPUOffload,
    CustomPolicy,
    FullyShardedDataParallel as FSDP,
    MixedPrecision,
    ModuleWrapPolicy,
    ShardingStrategy,
)
from fullshard.core.testing import run_ranks
from fullshard.errors import ProcessGroupError
from support.models import Block, TinyLM, batches, lm_loss
from support.parity import ROWS_PER_RANK, assert_same_run, replicas, train_sharded, train_unsharded

SIZE = 2


def on_ranks(work, make=TinyLM, size=SIZE):
    """Run ``work(comm, model, plain)`` on each rank, with equal models."""
    _, models = replicas(make, 2 * size)
    return run_ranks(size, lambda comm: work(comm, models[comm.rank], models[size + comm.rank]))


def sgd_steps(model, loss_of, data):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for one in data:
        loss_of(model, one).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def test_every_wrapper_has_the_arguments_as_attributes():
    half = MixedPrecision(param_dtype=torch.bfloat16)

    def policy(module):
        return {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP} if isinstance(module, Block) else False

    def work(comm, model, _plain):
        root, *blocks = FSDP.fsdp_modules(
            FSDP(
                model,
                comm,
                auto_wrap_policy=CustomPolicy(policy),
                mixed_precision=half,
                cpu_offload=CPUOffload(offload_params=True),
                backward_prefetch=BackwardPrefetch.BACKWARD_POST,
                forward_prefetch=True,
                limit_all_gathers=False,
            )
        )
        assert len(blocks) == 4
        assert root.sharding_strategy is ShardingStrategy.FULL_SHARD
        assert {one.sharding_strategy for one in blocks} == {ShardingStrategy.SHARD_GRAD_OP}
        for one in (root, *blocks):
            assert one.mixed_precision == half
            assert one.cpu_offload == CPUOffload(offload_params=True)
            assert one.backward_prefetch is BackwardPrefetch.BACKWARD_POST
            assert (one.forward_prefetch, one.limit_all_gathers) == (True, False)
            assert one.compute_device == torch.device("cpu")
            assert (one.process_group, one.rank, one.world_size) == (comm, comm.rank, SIZE)

    on_ranks(work)


def test_training_state_says_what_the_model_does():
    def work(comm, model, _plain):
        wrapped = FSDP(model, comm, auto_wrap_policy=ModuleWrapPolicy({Block}))
        seen = []
        model.blocks[0].module.register_forward_hook(lambda *_: seen.append(wrapped.training_state.name))
        loss = lm_loss(wrapped, batches(1, 2)[0])
        loss.register_hook(lambda _: seen.append(wrapped.training_state.name))
        assert wrapped.training_state.name == "IDLE"
        loss.backward()
        assert seen == ["FORWARD_BACKWARD"] * 2
        with FSDP.summon_full_params(wrapped):
            assert wrapped.training_state.name == "SUMMON_FULL_PARAMS"
        assert wrapped.training_state.name == "IDLE"

    on_ranks(work)


class Group:
    """What torch's tests of wrapping pass as a process group."""

    def __init__(self, rank, size):
        self._rank, self._size = rank, size

    def rank(self):
        return self._rank

    def size(self):
        return self._size


def test_a_group_with_only_rank_and_size_wraps_and_runs_if_it_is_one_rank():
    _, (model, plain) = replicas(TinyLM, 2)
    wrapped = FSDP(model, Group(1, 4), auto_wrap_policy=ModuleWrapPolicy({Block}))
    assert (len(FSDP.fsdp_modules(wrapped)), wrapped.rank, wrapped.world_size) == (5, 1, 4)
    with pytest.raises(ProcessGroupError, match=r"only has rank\(\) and size\(\)"):
        lm_loss(wrapped, batches(1, 2)[0])
    alone, plain = FSDP(copy.deepcopy(plain), Group(0, 1)), plain
    ours, theirs = (sgd_steps(one, lm_loss, batches(2, 2)) for one in (alone, plain))
    torch.testing.assert_close(dict(ours), dict(theirs), atol=1e-6, rtol=1e-6)
    with pytest.raises(ProcessGroupError, match="a ProcessGroup"):
        FSDP(nn.Linear(2, 2), "world")


@pytest.mark.parametrize("policy", [None, ModuleWrapPolicy({Block})])
def test_a_wrapper_around_a_wrapper_trains_as_one(policy):
    reference, models = replicas(TinyLM, SIZE)
    data = batches(4, SIZE * ROWS_PER_RANK)

    def work(comm):
        model = models[comm.rank]
        outer = FSDP(FSDP(model, comm), comm, auto_wrap_policy=policy)
        assert outer.check_is_root()
        assert not outer.module.check_is_root()
        assert list(outer.state_dict()) == list(reference.state_dict())
        # The outer wrapper's module is the root of the engine.
        run = train_sharded(outer.module, comm, lm_loss, data, sharded=True)
        return run[0], run[1], {name.removeprefix("_fsdp_wrapped_module."): value for name, value in run[2].items()}

    for run in run_ranks(SIZE, work):
        assert_same_run(run, train_unsharded(copy.deepcopy(reference), lm_loss, data))


class Viewed(nn.Module):
    """Returns its parameter, a view of it, and in a dict, next to what it computes."""

    def __init__(self):
        super().__init__()
        self.linear, self.table = nn.Linear(4, 4), nn.Parameter(torch.randn(6, 4))

    def forward(self, x):
        return {"y": self.linear(x), "rows": self.table[1:3], "all": (self.table, self.table.view(-1))}


class Around(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.head = Viewed(), nn.Linear(4, 2)

    def forward(self, x):
        found = self.inner(x)
        return self.head(found["y"]) @ torch.ones(2, 1), found["rows"], *found["all"]


def square_of_all(model, x):
    return sum(one.square().sum() for one in model(x))


@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD])
def test_a_view_of_a_parameter_is_returned_with_its_gradient(strategy):
    data = [torch.full((2, 4), 0.1 * step) for step in range(3)]

    def work(comm, model, plain):
        wrapped = FSDP(model, comm, auto_wrap_policy=ModuleWrapPolicy({Viewed}), sharding_strategy=strategy)
        with torch.no_grad():
            found, expected = wrapped(data[1]), tuple(one.clone() for one in plain(data[1]))
        torch.testing.assert_close(found, expected)
        ours, theirs = (sgd_steps(one, square_of_all, data) for one in (wrapped, plain))
        torch.testing.assert_close(dict(ours), dict(theirs), atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(found, expected)  # copies: the steps did not change them

    on_ranks(work, Around)


class Experts(nn.Module):
    """A shared layer, and experts of which each rank has its own number and shapes."""

    def __init__(self, rank):
        super().__init__()
        torch.manual_seed(0)
        self.shared = nn.Linear(4, 4)
        self.experts = nn.ModuleList(nn.Linear(4, 3 + rank) for _ in range(rank + 1))

    def forward(self, x):
        return sum(expert(self.shared(x)).square().sum() for expert in self.experts)


def test_ignored_modules_may_differ_between_ranks():
    models = [Experts(rank) for rank in range(SIZE)]
    plain = [copy.deepcopy(model) for model in models]
    x = torch.ones(2, 4)

    def work(comm):
        model = models[comm.rank]
        wrapped = FSDP(model, comm, ignored_modules=[model.experts])
        wrapped(x).backward()
        assert torch.equal(model.experts[0].weight.grad, own[comm.rank].experts[0].weight.grad)
        gradient = model.shared.weight.grad.full_tensor()
        return len(wrapped.state_dict()), gradient

    own = [copy.deepcopy(model) for model in plain]
    for model in own:
        model(x).backward()
    mean = sum(model.shared.weight.grad for model in own) / SIZE
    with pytest.warns(UserWarning, match="of ignored_params are trainable"):
        results = run_ranks(SIZE, work)
    assert [count for count, _ in results] == [4, 6]
    for _, gradient in results:
        torch.testing.assert_close(gradient, mean)


def test_modules_added_after_wrapping_stay_on_each_rank_with_a_warning():
    data = batches(3, 2)

    def loss_of(model, tokens):
        inner = model.module if isinstance(model, FSDP) else model
        return lm_loss(model, tokens) + inner.extra(torch.ones(3)).square().sum()

    def work(comm, model, plain):
        wrapped = FSDP(model, comm, auto_wrap_policy=ModuleWrapPolicy({Block}))
        lm_loss(wrapped, data[0]).backward()
        wrapped.zero_grad()
        for one in (model, plain):
            one.extra = nn.Linear(3, 3)
            nn.init.constant_(one.extra.weight, 1 + comm.rank)
            nn.init.constant_(one.extra.bias, 1.0)
        ours, theirs = (sgd_steps(one, loss_of, data) for one in (wrapped, plain))
        torch.testing.assert_close(dict(ours), dict(theirs), atol=1e-6, rtol=1e-6)
        assert not hasattr(model.extra.weight, "shard_meta")

    with pytest.warns(UserWarning, match=r"extra\.weight and 1 other parameters were added after") as told:
        on_ranks(work)
    assert len(told) == SIZE  # one a rank, not one a step


def test_a_wrapped_model_to_which_nothing_was_added_warns_of_nothing():
    def work(comm, model, _plain):
        wrapped = FSDP(nn.Sequential(FSDP(model, comm)), comm)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            wrapped(batches(1, 2)[0])

    on_ranks(work, size=1)
