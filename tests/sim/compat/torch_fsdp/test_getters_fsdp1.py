"""``torch.distributed.checkpoint.state_dict`` on FSDP1's wrapper, on rank threads."""

import copy
import functools
import io

import pytest
import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

from fullshard.compat.torch_fsdp import FullyShardedDataParallel as FSDP, StateDictType
from fullshard.compat.torch_fsdp.wrap import transformer_auto_wrap_policy
from fullshard.core.testing import run_ranks
from fullshard.errors import ShardingError
from fullshard.state.saving.shard_tensor import ShardTensor
from support.fsdp2 import SIZE, rows_of
from support.models import Block, TinyLM, batches, lm_loss
from support.parity import ROWS_PER_RANK

POLICY = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})
FULL = StateDictOptions(full_state_dict=True)


def build(seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = TinyLM()
    model.unused.requires_grad_(False)  # torch refuses to load no state for what could be trained
    return model


def wrapped(model, comm):
    return FSDP(model, process_group=comm, auto_wrap_policy=POLICY)


def step(model, optimizer, tokens):
    optimizer.zero_grad()
    lm_loss(model, tokens).backward()
    optimizer.step()


@pytest.fixture(scope="module")
def reference():
    """The unsharded run: its states after one step, and its weights after two."""
    model = build()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    data = batches(2, SIZE * ROWS_PER_RANK)
    step(model, optimizer, data[0])
    states = get_state_dict(model, optimizer, options=FULL)
    states = torch.load(io.BytesIO(saved(states)), weights_only=False)
    step(model, optimizer, data[1])
    return *states, {name: value.clone() for name, value in model.state_dict().items()}


def saved(value):
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def on_ranks(work, seed=0, size=SIZE):
    models = [build(seed) for _ in range(size)]

    def rank(comm):
        model = wrapped(models[comm.rank], comm)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        return work(comm, model, optimizer)

    return run_ranks(size, rank)


@pytest.mark.parametrize("cpu_offload", [False, True])
def test_full_states_are_those_of_the_unsharded_run(reference, cpu_offload):
    options = StateDictOptions(full_state_dict=True, cpu_offload=cpu_offload)

    def work(comm, model, optimizer):
        step(model, optimizer, rows_of(comm, 2)[0])
        both = get_state_dict(model, optimizer, options=options)
        torch.testing.assert_close(get_model_state_dict(model, options=options), both[0], atol=0, rtol=0)
        alone = get_optimizer_state_dict(model, optimizer, options=options)
        torch.testing.assert_close(alone["state"], both[1]["state"], atol=0, rtol=0)
        saved(both)
        return both

    for model, optim in on_ranks(work):
        assert list(model) == list(reference[0])
        torch.testing.assert_close(model, reference[0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(optim["state"], reference[1]["state"], atol=1e-5, rtol=1e-5)
        assert [group["params"] for group in optim["param_groups"]] == [
            group["params"] for group in reference[1]["param_groups"]
        ]


def test_states_are_this_ranks_parts_whatever_type_was_set(reference):
    def work(comm, model, optimizer):
        step(model, optimizer, rows_of(comm, 2)[0])
        for kind in StateDictType:
            FSDP.set_state_dict_type(model, kind)
            state, optim = get_state_dict(model, optimizer)
            assert isinstance(state["embed.weight"], ShardTensor)
            assert isinstance(optim["state"]["embed.weight"]["exp_avg"], ShardTensor)
        FSDP.set_state_dict_type(model, StateDictType.FULL_STATE_DICT)
        assert type(model.state_dict()["embed.weight"]) is torch.Tensor
        own = optimizer.state_dict()["state"]
        assert not any(isinstance(value, ShardTensor) for values in own.values() for value in values.values())
        found = {name: value.full_tensor() for name, value in state.items()}
        moments = {name: values["exp_avg"].full_tensor() for name, values in sorted(optim["state"].items())}
        return found, moments

    for found, moments in on_ranks(work):
        torch.testing.assert_close(found, dict(reference[0]), atol=1e-5, rtol=1e-5)
        expected = {name: values["exp_avg"] for name, values in sorted(reference[1]["state"].items())}
        torch.testing.assert_close(moments, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("how", ["full", "one by one", "parts", "inside"])
def test_a_run_goes_on_from_states_that_the_setters_load(reference, how):
    """In a model with other values, on the ranks that saved parts, or from the unsharded run."""
    parts = {}
    if how == "parts":

        def first(comm, model, optimizer):
            step(model, optimizer, rows_of(comm, 2)[0])
            parts[comm.rank] = get_state_dict(model, optimizer)

        on_ranks(first)

    def work(comm, model, optimizer):
        state, optim = parts.get(comm.rank) or copy.deepcopy(reference[:2])  # torch writes into them
        if how == "inside":
            set_model_state_dict(model.module, state, options=FULL)
        elif how == "one by one":
            set_model_state_dict(model, state, options=FULL)
        if how in ("inside", "one by one"):
            set_optimizer_state_dict(model, optimizer, optim, options=FULL)
        else:
            options = StateDictOptions(full_state_dict=how == "full")
            set_state_dict(model, optimizer, model_state_dict=state, optim_state_dict=optim, options=options)
        step(model, optimizer, rows_of(comm, 2)[1])
        return get_model_state_dict(model, options=FULL)

    for found in on_ranks(work, seed=1):
        torch.testing.assert_close(dict(found), reference[2], atol=1e-5, rtol=1e-5)


def test_strict_is_torchs(reference):
    state = {name: value for name, value in reference[0].items() if name != "blocks.1.up.weight"}

    def work(comm, model, optimizer):
        with pytest.raises(ShardingError, match=r"missing: blocks\.1\.up\.weight"):
            set_model_state_dict(model, dict(state), options=FULL)
        options = StateDictOptions(full_state_dict=True, strict=False)
        found = set_model_state_dict(model, state | {"other": torch.ones(1)}, options=options)
        assert (found.missing_keys, found.unexpected_keys) == (["blocks.1.up.weight"], ["other"])
        ignoring = StateDictOptions(full_state_dict=True, ignore_frozen_params=True)
        assert "unused.weight" not in get_model_state_dict(model, options=ignoring)
        flat = StateDictOptions(flatten_optimizer_state_dict=True)
        assert "state.embed.weight.exp_avg" in get_optimizer_state_dict(model, optimizer, options=flat)

    on_ranks(work, seed=1)
