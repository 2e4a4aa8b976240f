"""Checkpointing wrappers: names, both implementations, before and after sharding; the same losses, less memory."""

import functools
from contextlib import nullcontext

import pytest
import torch
import torch.distributed.algorithms._checkpoint.checkpoint_wrapper as theirs
from torch import nn
from torch.distributed.fsdp import wrap as torch_wrap

from fullshard import TransformerBlocks, fully_shard as native_fully_shard
from fullshard.compat.torch_fsdp import checkpointing as ours
from fullshard.compat.torch_fsdp.checkpointing import (
    CheckpointImpl,
    CheckpointWrapper,
    OffloadWrapper,
    apply_activation_checkpointing,
    apply_activation_checkpointing_wrapper,
    checkpoint_wrapper,
    offload_wrapper,
)
from fullshard.compat.torch_fsdp.fsdp2 import fully_shard
from fullshard.compat.torch_fsdp.fully_sharded_data_parallel import FullyShardedDataParallel
from fullshard.compat.torch_fsdp.wrap import CustomPolicy, ModuleWrapPolicy
from fullshard.core.comm import MemoryMeter
from fullshard.core.engine import plain_name
from fullshard.core.testing import run_ranks
from fullshard.errors import ConfigError
from support.models import Block, TinyLM, batches, lm_loss
from support.parity import ROWS_PER_RANK, assert_same_run, replicas, train_sharded, train_unsharded

SIZE = 2
IMPLS = ["REENTRANT", "NO_REENTRANT"]


def is_block(module):
    return isinstance(module, Block)


def checkpointed(model, source=ours, impl="NO_REENTRANT"):
    wrapper = functools.partial(source.checkpoint_wrapper, checkpoint_impl=source.CheckpointImpl[impl])
    source.apply_activation_checkpointing(model, checkpoint_wrapper_fn=wrapper, check_fn=is_block)
    return model


def wrapped_by_fsdp(model, comm):
    policy = functools.partial(torch_wrap.transformer_auto_wrap_policy, transformer_layer_cls={Block})
    return FullyShardedDataParallel(model, comm, auto_wrap_policy=policy)


def sharded_by_fsdp2(model, comm):
    for block in model.blocks:
        fully_shard(block, mesh=comm)
    return fully_shard(model, mesh=comm)


def sharded_natively(model, comm):
    return native_fully_shard(model, comm, wrap=TransformerBlocks({Block}))


SHARD = {"FSDP1": wrapped_by_fsdp, "FSDP2": sharded_by_fsdp2, "native": sharded_natively}


@pytest.mark.parametrize(
    ("source", "impl"),
    [(ours, "REENTRANT"), (ours, "NO_REENTRANT"), (theirs, "NO_REENTRANT")],
    ids=["ours_reentrant", "ours", "torchs"],
)
@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("door", SHARD)
def test_checkpointed_and_sharded_gives_the_plain_run(door, order, source, impl):
    reference, models = replicas(functools.partial(TinyLM, layers=2), SIZE)
    data = batches(2, SIZE * ROWS_PER_RANK)
    plain = train_unsharded(reference, lm_loss, data)

    def work(comm):
        model = models[comm.rank]
        if order == "before":
            checkpointed(model, source, impl)
        sharded = SHARD[door](model, comm)
        if order == "after":
            checkpointed(sharded, source, impl)
        wrappers = [module for module in sharded.modules() if isinstance(module, source.CheckpointWrapper)]
        assert len(wrappers) == 2
        inner = sharded.module if door == "FSDP1" else sharded
        losses, norms, weights = train_sharded(inner, comm, lm_loss, data, sharded=True)
        return losses, norms, {plain_name(name): value for name, value in weights.items()}

    for run in run_ranks(SIZE, work):
        assert_same_run(run, plain)


@pytest.mark.parametrize("impl", IMPLS)
def test_inputs_by_name_get_their_gradients(impl):
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(2.0))

        def forward(self, x, *, y, power=1):
            return self.scale * x + y**power

    module = checkpoint_wrapper(Sum(), CheckpointImpl[impl])
    x, y = torch.ones(2, requires_grad=True), torch.full((2,), 3.0, requires_grad=True)
    module(x, y=y, power=2).sum().backward()
    assert x.grad.tolist() == [2.0, 2.0]
    assert y.grad.tolist() == [6.0, 6.0]
    assert module.scale.grad.item() == 2.0


def test_a_script_that_replaces_torchs_save_on_cpu_changes_the_offload_wrapper(monkeypatch):
    seen = []
    monkeypatch.setattr(theirs, "save_on_cpu", lambda **options: seen.append(options) or nullcontext())
    offload_wrapper(nn.Linear(2, 2))(torch.ones(1, 2))
    assert len(seen) == 1


def test_a_plain_module_loads_into_wrappers_of_checkpointed_modules():
    torch.manual_seed(0)
    saved = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2))).state_dict()

    def work(comm):
        model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2)))
        model[0] = FullyShardedDataParallel(checkpoint_wrapper(model[0]), comm, sync_module_states=True)
        model[1][0] = checkpoint_wrapper(model[1][0])
        model[1] = FullyShardedDataParallel(model[1], comm, sync_module_states=True)
        missing, unexpected = model.load_state_dict(saved)
        assert (missing, unexpected) == ([], [])
        return model.state_dict()

    for state in run_ranks(2, work):
        torch.testing.assert_close(dict(state), dict(saved), rtol=0, atol=0)


def test_names_attributes_and_items_are_those_of_the_module():
    plain = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model = nn.Sequential(checkpoint_wrapper(offload_wrapper(plain)), nn.Linear(2, 2))
    assert [name for name, _ in model[0].named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert list(model.state_dict()) == [f"0.{name}" for name in plain.state_dict()] + ["1.weight", "1.bias"]
    assert model[0][1] is plain[1]
    plain.nickname = "both"
    assert model[0].nickname == "both"
    with pytest.raises(AttributeError):
        model[0].missing  # noqa: B018
    other = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Linear(2, 2))
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    model.load_state_dict(other.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_state_dicts_fit_torchs_wrappers():
    mine, its = checkpoint_wrapper(nn.Linear(2, 2)), theirs.checkpoint_wrapper(nn.Linear(2, 2))
    its.load_state_dict(mine.state_dict())
    mine.load_state_dict(its.state_dict())
    assert list(mine.state_dict()) == list(its.state_dict())


def choices():
    by_class = functools.partial(torch_wrap.transformer_auto_wrap_policy, transformer_layer_cls={Block})
    return {
        "check_fn": {"check_fn": is_block},
        "every module": {},
        "function": {"auto_wrap_policy": by_class},
        "ModuleWrapPolicy": {"auto_wrap_policy": ModuleWrapPolicy({Block})},
        "CustomPolicy": {"auto_wrap_policy": CustomPolicy(is_block)},
        "torch's CustomPolicy": {"auto_wrap_policy": torch_wrap.CustomPolicy(is_block)},
    }


@pytest.mark.parametrize("choice", choices())
def test_the_same_modules_are_wrapped_as_by_torch(choice):
    options = choices()[choice]
    mine, its = TinyLM(), TinyLM()
    apply_activation_checkpointing(mine, **options)
    if type(options.get("auto_wrap_policy")) in (ModuleWrapPolicy, CustomPolicy):
        options = {"check_fn": is_block}
    theirs.apply_activation_checkpointing(its, **options)
    assert [name for name, _ in mine.named_modules()] == [name for name, _ in its.named_modules()]
    assert type(mine) is TinyLM


def test_a_module_at_two_places_gets_one_wrapper():
    block = Block(4, 4)
    model = nn.ModuleDict({"a": nn.Sequential(block), "b": nn.Sequential(block)})
    apply_activation_checkpointing(model, check_fn=is_block)
    assert model["a"][0] is model["b"][0]
    assert isinstance(model["a"][0], CheckpointWrapper)


def test_the_tutorials_old_name_works_and_names_the_new_one():
    model = TinyLM()
    with pytest.warns(FutureWarning, match="renamed to apply_activation_checkpointing"):
        apply_activation_checkpointing_wrapper(model, checkpoint_wrapper_fn=checkpoint_wrapper, check_fn=is_block)
    assert all(isinstance(block, CheckpointWrapper) for block in model.blocks)


@pytest.mark.parametrize("offload", [True, False])
def test_the_old_offload_to_cpu_works_and_names_the_new_spelling(offload):
    with pytest.warns(FutureWarning, match="offload_wrapper"):
        made = checkpoint_wrapper(nn.Linear(2, 2), offload_to_cpu=offload, checkpoint_impl=CheckpointImpl.NO_REENTRANT)
    assert type(made) is (OffloadWrapper if offload else CheckpointWrapper)
    made(torch.ones(1, 2, requires_grad=True)).sum().backward()


def test_a_checkpoint_fn_takes_the_place_of_torchs_with_its_arguments():
    seen = []

    def run(module, *args, note, **kwargs):
        seen.append(note)
        return module(*args, **kwargs)

    checkpoint_wrapper(nn.Linear(2, 2), checkpoint_fn=run, note="mine")(torch.ones(1, 2))
    assert seen == ["mine"]
    checkpoint_wrapper(nn.Linear(2, 2), preserve_rng_state=False)(torch.ones(1, 2)).sum().backward()


def test_wrong_implementations_and_policies_are_refused():
    assert checkpoint_wrapper(nn.Linear(1, 1), theirs.CheckpointImpl.REENTRANT).checkpoint_impl is (
        CheckpointImpl.REENTRANT
    )
    with pytest.raises(ConfigError, match="checkpoint_impl"):
        checkpoint_wrapper(nn.Linear(1, 1), "reentrant")
    with pytest.raises(ConfigError, match="auto_wrap_policy"):
        apply_activation_checkpointing(TinyLM(), auto_wrap_policy="blocks")


@pytest.mark.parametrize("wrapper", [checkpoint_wrapper, offload_wrapper])
def test_wrapped_gradients_are_the_plain_ones(wrapper):
    reference, (model,) = replicas(TinyLM, 1)
    tokens = batches(1, 2)[0]
    apply_activation_checkpointing(model, checkpoint_wrapper_fn=wrapper, check_fn=is_block)
    for one in (reference, model):
        lm_loss(one, tokens).backward()
    for mine, its in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, its.grad)


@pytest.mark.parametrize(("order", "impl"), [("before", "REENTRANT"), ("after", "NO_REENTRANT")])
def test_the_peak_of_a_sharded_step_is_lower(order, impl):
    tokens = batches(1, 16, length=64)[0]

    def peak(wrapped):
        def work(comm):
            torch.manual_seed(0)
            model = TinyLM()
            if wrapped and order == "before":
                checkpointed(model, impl=impl)
            model = wrapped_by_fsdp(model, comm)
            if wrapped and order == "after":
                checkpointed(model, impl=impl)
            with MemoryMeter(torch.device("cpu")) as meter:
                lm_loss(model, tokens).backward()
            return meter.peak_bytes - meter.start_bytes

        return run_ranks(1, work)[0]

    assert peak(True) < 0.6 * peak(False)
