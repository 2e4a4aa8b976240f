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
    StateDictType,
)
from fullshard.core.testing import run_ranks
from fullshard.errors import MismatchError, ProcessGroupError, ShardingError, WrapError
from support.fsdp1 import same
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


def test_a_wrapper_around_a_wrapper_trains_as_one_without_a_policy():
    reference, models = replicas(TinyLM, SIZE)
    data = batches(4, SIZE * ROWS_PER_RANK)

    def work(comm):
        model = models[comm.rank]
        outer = FSDP(FSDP(model, comm), comm)
        assert outer.check_is_root()
        assert not outer.module.check_is_root()
        assert list(outer.state_dict()) == list(reference.state_dict())
        # The outer wrapper's module is the root of the engine.
        run = train_sharded(outer.module, comm, lm_loss, data, sharded=True)
        return run[0], run[1], {name.removeprefix("_fsdp_wrapped_module."): value for name, value in run[2].items()}

    for run in run_ranks(SIZE, work):
        assert_same_run(run, train_unsharded(copy.deepcopy(reference), lm_loss, data))


def test_a_policy_is_refused_where_modules_are_wrapped_already():
    def work(comm):
        model = TinyLM()
        model.blocks[1] = FSDP(model.blocks[1], comm)
        with pytest.raises(WrapError, match=r"found blocks\.1 in TinyLM") as caught:
            FSDP(model, comm, auto_wrap_policy=ModuleWrapPolicy({Block}))
        assert isinstance(caught.value, ValueError)

    run_ranks(1, work)


def test_other_settings_of_a_module_that_is_wrapped_again_are_named():
    _, models = replicas(TinyLM, 2)

    def work(comm):
        model, alone = models[comm.rank], comm.split([[0], [1]])
        FSDP(model, comm)
        for arguments, name in (
            ({"process_group": alone}, "process_group or device_mesh"),
            ({"ignored_modules": [model.blocks[0]]}, "ignored_modules or ignored_states"),
            ({"ignored_states": list(model.parameters())}, "ignored_modules or ignored_states"),
            ({"auto_wrap_policy": ModuleWrapPolicy({Block})}, "auto_wrap_policy"),
            ({"forward_prefetch": True}, "backward_prefetch or forward_prefetch"),
            ({"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}, "sharding_strategy"),
            ({"device_id": torch.device("meta")}, "device_id"),
        ):
            with pytest.raises(ShardingError, match=rf"TinyLM is sharded already, with other {name}\. Wrap it once"):
                FSDP(model, **{"process_group": comm, **arguments})
        assert not any(isinstance(module, FSDP) for module in model.modules())

    run_ranks(2, work)


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


def test_a_module_may_be_wrapped_again_with_equal_settings():
    def work(comm, model, plain):
        first = FSDP(model, comm, mixed_precision=(half := MixedPrecision(torch.bfloat16)))
        sgd_steps(first, lm_loss, batches(1, 2))
        with pytest.raises(ShardingError, match="TinyLM is sharded already"):
            FSDP(model, comm)
        second, tokens = FSDP(model, comm, mixed_precision=half), batches(1, 2)[0]
        assert second.check_is_root()
        before = lm_loss(second, tokens).item()
        assert lm_loss(first, tokens).item() == before
        sgd_steps(second, lm_loss, batches(2, 2))
        assert lm_loss(first, tokens).item() == lm_loss(second, tokens).item() != before

    on_ranks(work)


def test_ignored_modules_of_one_model_that_differ_by_rank_are_told_on_every_rank():
    def work(comm, model, _plain):
        with pytest.raises(MismatchError, match=r"rank 0 has blocks\.1: .*rank 1 has blocks\.0: "):
            FSDP(model, comm, auto_wrap_policy=ModuleWrapPolicy({Block}), ignored_modules=[model.blocks[comm.rank]])

    on_ranks(work)


class WithSkipped(nn.Module):
    """As torch's test of modules that are put back after the model was wrapped."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(10, 10)
        self.nested = nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 10))
        self.skipped = nn.Sequential(nn.Linear(10, 10, bias=False))


@pytest.mark.parametrize("kind", StateDictType)
def test_a_module_put_back_after_wrapping_is_in_the_state_dict_and_comes_back(kind):
    torch.manual_seed(0)
    plain = WithSkipped()

    def wrapped(comm, factor):
        model = copy.deepcopy(plain)
        skipped = model.skipped
        del model.skipped
        model.nested = FSDP(model.nested, comm)
        model = FSDP(model, comm)
        model.skipped = skipped
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(factor)
        return model

    def work(comm):
        model, other = wrapped(comm, 1), wrapped(comm, 0)
        with FSDP.state_dict_type(model, kind), FSDP.state_dict_type(other, kind):
            state = copy.deepcopy(model.state_dict())
            assert list(state) == list(plain.state_dict())
            other.load_state_dict(state, strict=True)
        with FSDP.summon_full_params(other):
            same(other.module.state_dict(), plain.state_dict())

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "skipped.0.weight and 0 other parameters were added")
        run_ranks(SIZE, work)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("keeps", [False, True])
def test_gradients_keep_their_dtype_when_they_are_clipped(dtype, keeps):
    precision = MixedPrecision(param_dtype=dtype, reduce_dtype=dtype, keep_low_precision_grads=keeps)
    tokens = batches(1, 2)[0]

    def work(comm, model, plain):
        wrapped = FSDP(model, comm, auto_wrap_policy=ModuleWrapPolicy({Block}), mixed_precision=precision)
        for one in (wrapped, plain):
            lm_loss(one, tokens).backward()
        norm = wrapped.clip_grad_norm_(0.01)
        gradients = [param.grad for param in wrapped.parameters() if param.grad is not None]
        assert {gradient.dtype for gradient in gradients} == {dtype if keeps else torch.float32}
        assert norm.dtype is (dtype if keeps else torch.float32)
        torch.testing.assert_close(
            norm.float(), torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.01), rtol=2e-2, atol=0
        )
        clipped = torch.stack([gradient.float().norm() for gradient in gradients]).norm()
        assert clipped.item() == pytest.approx(0.01, rel=1e-2)

    on_ranks(work)


def test_parts_do_not_load_into_a_plain_module():
    def work(comm, model, plain):
        wrapped = FSDP(model, comm, auto_wrap_policy=ModuleWrapPolicy({Block}))
        for kind, words in {
            StateDictType.SHARDED_STATE_DICT: r"one rank's part of a tensor.* use get_model_state_dict with full_state",
            StateDictType.LOCAL_STATE_DICT: "size mismatch for embed.weight",
        }.items():
            with FSDP.state_dict_type(wrapped, kind):
                state = wrapped.state_dict()
            for assign in (False, True):
                with pytest.raises(RuntimeError, match=words):
                    plain.load_state_dict(state, assign=assign)

    on_ranks(work)
