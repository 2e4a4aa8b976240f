"""FSDP1's wrapper on rank threads: steps, and the dtypes they compute and reduce in."""

import functools

import pytest
import torch
from torch import nn

from fullshard.compat.torch_fsdp import (
    FullyShardedDataParallel as FSDP,
    MixedPrecision,
    ModuleWrapPolicy,
    apply_activation_checkpointing,
)
from fullshard.core.testing import run_ranks
from fullshard.errors import MismatchError, ShardingError
from support.models import Block, TinyLM, batches, lm_loss
from support.parity import replicas

BLOCKS = ModuleWrapPolicy({Block})


def test_no_sync_accumulates_as_a_larger_batch():
    reference, models = replicas(TinyLM, 2)
    (tokens,) = batches(1, 8)
    (sum(lm_loss(reference, part) for part in tokens.chunk(4)) / 2).backward()
    norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), float("inf")).item()

    def work(comm):
        model = FSDP(models[comm.rank], comm, auto_wrap_policy=BLOCKS)
        first, second = tokens.chunk(4)[2 * comm.rank : 2 * comm.rank + 2]
        with model.no_sync():
            lm_loss(model, first).backward()
        assert all(param.grad is None for param in model.parameters())
        lm_loss(model, second).backward()
        with (
            pytest.raises(ShardingError, match="no_sync\\(\\) should only be called on the root FSDP instance"),
            model.blocks[0].no_sync(),
        ):
            pass
        with pytest.raises(RuntimeError, match="clip_grad_norm_"):
            model.blocks[0].clip_grad_norm_(1.0)
        return model.clip_grad_norm_(float("inf")).item(), model.clip_grad_norm_(0.5, "inf").item()

    expected = max(p.grad.abs().max().item() for p in reference.parameters() if p.grad is not None)
    for found, largest in run_ranks(2, work):
        assert found == pytest.approx(norm, rel=1e-5)
        assert largest == pytest.approx(expected, rel=1e-5)


def test_apply_is_refused_while_full_parameters_are_shown():
    def work(comm):
        model = FSDP(TinyLM(), comm)
        with FSDP.summon_full_params(model), pytest.raises(ValueError, match="expected to be in states IDLE") as caught:
            model.apply(print)
        assert isinstance(caught.value, ShardingError)

    run_ranks(1, work)


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.branches, self.chosen = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]), 0

    def forward(self, x):
        return self.branches[self.chosen](x)


def test_ranks_that_take_other_branches_get_a_runtime_error():
    _, models = replicas(Branches, 2)

    def work(comm):
        model = FSDP(models[comm.rank], comm, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
        model.module.chosen = comm.rank
        with pytest.raises(RuntimeError, match=r"^Forward order differs across ranks\. .*branches\.1") as caught:
            model(torch.ones(2, 4))
        assert isinstance(caught.value, MismatchError)

    run_ranks(2, work)


def test_ranks_in_forward_and_elsewhere_raise_the_same_error():
    _, models = replicas(Branches, 2)

    def work(comm):
        model = FSDP(models[comm.rank], comm)
        model(torch.ones(2, 4)).sum().backward()
        with pytest.raises(MismatchError, match=r"^Ranks are in different collectives: ") as caught:
            model(torch.ones(2, 4)) if comm.rank == 0 else model.clip_grad_norm_(1.0)
        return str(caught.value)

    first, second = run_ranks(2, work)
    assert first == second


def test_the_norm_has_the_gradients_dtype_and_without_gradients_there_is_a_warning():
    half = MixedPrecision(torch.bfloat16, torch.bfloat16, keep_low_precision_grads=True)
    _, models = replicas(TinyLM, 2)

    def work(comm):
        narrow, wide = FSDP(models[0], comm, mixed_precision=half), FSDP(models[1], comm)
        with pytest.warns(UserWarning, match="on rank 0 with no gradients"):
            nothing = wide.clip_grad_norm_(1.0)
        assert (nothing.item(), nothing.dtype) == (0, torch.float32)
        for model in (narrow, wide):
            lm_loss(model, batches(1, 2)[0]).backward()
        narrow, wide = narrow.clip_grad_norm_(1.0), wide.clip_grad_norm_(1.0)
        assert (narrow.dtype, wide.dtype) == (torch.bfloat16, torch.float32)
        torch.testing.assert_close(narrow.float(), wide, rtol=0.02, atol=0)

    run_ranks(1, work)


def test_apply_sees_full_parameters_inner_modules_first():
    _, models = replicas(TinyLM, 2)
    seen = [[], []]

    def work(comm):
        model = FSDP(models[comm.rank], comm, auto_wrap_policy=BLOCKS)

        def fill(module):
            seen[comm.rank].append(type(module).__name__)
            if isinstance(module, nn.Linear):
                assert module.weight.shape == (module.out_features, module.in_features)
                with torch.no_grad():
                    module.weight.fill_(0.5)

        assert model.apply(fill) is model
        return {p.shard_meta.name for p in model.parameters() if bool((p == 0.5).all())}

    changed = set.intersection(*run_ranks(2, work))
    assert {f"blocks.{i}.{name}.weight" for i in range(4) for name in ("up", "down", "side")} <= changed
    for names in seen:
        assert names[0] == "Embedding"
        assert names.index("Block") == names.index("FullyShardedDataParallel") - 1
        assert names[-2:] == ["TinyLM", "FullyShardedDataParallel"]


class Seen(nn.Module):
    """Notes the dtypes that its parts see."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
        self.register_buffer("scale", torch.ones(4))
        self.seen = []

    def forward(self, x):
        self.seen.append(("root", x.dtype, self.scale.dtype))
        return self.inner(x.float())

    def watch(self):
        for module in self.inner:
            module.forward = functools.partial(self.note, module, module.forward)
        return self

    def note(self, module, forward, x):
        self.seen.append((type(module).__name__, x.dtype, module.weight.dtype))
        return forward(x)


@pytest.mark.parametrize(
    ("changes", "root", "linear"),
    [
        ({}, torch.bfloat16, None),
        ({"cast_forward_inputs": True}, torch.bfloat16, torch.bfloat16),
        ({"cast_forward_inputs": True, "cast_root_forward_inputs": False}, torch.float32, torch.bfloat16),
    ],
    ids=["root", "all", "inner"],
)
@pytest.mark.filterwarnings("ignore:mixed_precision leaves out modules of the classes BatchNorm1d")
def test_inputs_are_cast_where_torch_says(changes, root, linear):
    _, models = replicas(Seen, 2)
    mixed = MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16, **changes)

    def work(comm):
        model = FSDP(
            models[comm.rank].watch(), comm, mixed_precision=mixed, auto_wrap_policy=ModuleWrapPolicy({nn.Sequential})
        )
        wrapped = {type(one.module).__name__ for one in FSDP.fsdp_modules(model)}
        assert wrapped == {"Seen", "Sequential", "BatchNorm1d"}
        if linear is None:
            with pytest.raises(RuntimeError, match="dtype"):
                model(torch.ones(4, 4))
        else:
            model(torch.ones(4, 4)).float().sum().backward()
            assert all(p.grad.dtype == torch.float32 for p in model.parameters() if p.grad is not None)
        return model.seen

    for seen in run_ranks(2, work):
        assert seen[0] == ("root", root, torch.bfloat16)
        assert seen[1] == ("Linear", linear or torch.float32, torch.bfloat16)
        if linear is not None:
            assert ("BatchNorm1d", torch.float32, torch.float32) in seen


def test_without_a_wrap_policy_batch_norm_computes_in_the_low_dtype_as_in_torch():
    def work(comm):
        model = FSDP(Seen().watch(), comm, mixed_precision=MixedPrecision(torch.bfloat16, buffer_dtype=torch.bfloat16))
        model.module.forward = lambda x: model.module.inner(x)
        model(torch.ones(4, 4))
        return model.seen

    assert ("BatchNorm1d", torch.bfloat16, torch.bfloat16) in run_ranks(1, work)[0]


def test_low_precision_gradients_are_kept_where_that_is_asked_for():
    _, models = replicas(TinyLM, 2)

    def work(comm):
        mixed = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, keep_low_precision_grads=True)
        model = FSDP(models[comm.rank], comm, mixed_precision=mixed, auto_wrap_policy=BLOCKS)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            lm_loss(model, batches(1, 2)[0]).backward()
        grads = [param.grad for param in model.parameters() if param.grad is not None]
        assert {grad.dtype for grad in grads} == {torch.bfloat16}
        assert model.clip_grad_norm_(1.0).isfinite()
        before = [param.detach().clone() for param in model.parameters()]
        optimizer.step()
        assert all(param.dtype == torch.float32 for param in model.parameters())
        return sum(bool((a != b).any()) for a, b in zip(before, model.parameters(), strict=True))

    assert min(run_ranks(2, work)) > 5


def test_no_sync_knows_a_root_whose_module_got_a_checkpoint_wrapper_afterwards():
    _, models = replicas(TinyLM, 2)

    def work(comm):
        model = FSDP(models[comm.rank], comm)
        apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, TinyLM))
        with model.no_sync():
            lm_loss(model, batches(1, 2)[0]).backward()
        return all(param.grad is None for param in model.parameters())

    assert run_ranks(2, work) == [True, True]
