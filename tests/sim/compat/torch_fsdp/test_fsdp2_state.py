"""State of FSDP2 modules on rank threads: state dicts, ``full_tensor``, optimizer states, torch's getters."""

import io

import pytest
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict

from fullshard import unsharded
from fullshard.compat.torch_fsdp.api import StateDictType, set_state_dict_type
from fullshard.core.testing import run_ranks
from fullshard.errors import MismatchError
from support.fsdp2 import SIZE, rows_of, shard, with_models
from support.models import TinyLM, batches, lm_loss
from support.parity import ROWS_PER_RANK, optimizer_for, replicas


def test_state_dicts_of_root_and_blocks_are_this_ranks_part_and_come_back():
    def work(comm, model):
        model = shard(model, comm)
        whole, part = model.state_dict(), model.blocks[0].state_dict()
        assert set(part) == {name.removeprefix("blocks.0.") for name in whole if name.startswith("blocks.0.")}
        assert whole["embed.weight"].shape == (50, 24)  # the whole tensor's, as a DTensor has it
        before = [p.detach().clone() for p in model.parameters()]
        whole, part = ({name: value.detach().clone() for name, value in one.items()} for one in (whole, part))
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        model.load_state_dict(whole)
        assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
        model.blocks[0].load_state_dict(part)
        with unsharded(model):
            assert model.state_dict()["embed.weight"].shape == (50, 24)

    with_models(SIZE, work)


def test_values_of_a_state_dict_are_the_parameters_memory_until_they_are_cloned():
    """As a module's: torch's checkpoints load into them in place, without ``load_state_dict``."""

    def work(comm, model):
        model = shard(model, comm)
        state = model.state_dict()
        kept = {name: value.clone() for name, value in state.items()}
        params = dict(model.named_parameters(remove_duplicate=False))
        held = {name: param.to_local().clone() for name, param in params.items()}
        for value in state.values():
            value.fill_(3.0)
        assert all((param.to_local() == 3.0).all() for param in params.values())
        for name, value in kept.items():
            assert value.placements == state[name].placements
            assert torch.equal(value.to_local(), held[name])
            assert value.full_tensor().shape == params[name].global_shape
        model.load_state_dict(kept)
        assert all(torch.equal(param.to_local(), held[name]) for name, param in params.items())

    with_models(3, work)


def test_a_full_state_dict_is_saved_as_plain_tensors():
    def work(comm, model):
        model = shard(model, comm)
        set_state_dict_type(model, StateDictType.FULL_STATE_DICT)
        torch.save(get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)), io.BytesIO())
        return {name: tuple(value.shape) for name, value in get_model_state_dict(model).items()}

    expected = {name: tuple(value.shape) for name, value in TinyLM().state_dict().items()}
    assert with_models(SIZE, work) == [expected] * SIZE


@pytest.mark.parametrize("size", [1, 3])
def test_full_tensor_gives_whole_parameters_gradients_and_states_whoever_holds_them(size):
    reference, models = replicas(TinyLM, size)
    data = batches(2, size * ROWS_PER_RANK)
    optimizer = optimizer_for(reference)
    lm_loss(reference, data[0]).backward()
    optimizer.step()
    optimizer.zero_grad()
    lm_loss(reference, data[1]).backward()
    expected = dict(reference.state_dict())
    expected |= {f"gradient of {n}": p.grad for n, p in reference.named_parameters() if p.grad is not None}
    params = dict(reference.named_parameters())
    expected |= {f"moment of {n}": optimizer.state[p]["exp_avg"] for n, p in params.items() if p in optimizer.state}

    def work(comm):
        model = shard(models[comm.rank], comm)
        mine = optimizer_for(model)
        lm_loss(model, rows_of(comm, 2)[0]).backward()
        mine.step()
        mine.zero_grad()
        lm_loss(model, rows_of(comm, 2)[1]).backward()
        found = {name: p.full_tensor() for name, p in model.named_parameters(remove_duplicate=False)}
        found |= {f"gradient of {n}": p.grad.full_tensor() for n, p in model.named_parameters() if p.grad is not None}
        names = [name for name, _ in model.named_parameters()]
        for number, values in mine.state_dict()["state"].items():
            found[f"moment of {names[number]}"] = values["exp_avg"].full_tensor()
        for name, value in model.state_dict().items():
            assert torch.equal(value.full_tensor(), found[name])
            assert torch.equal(value.to(torch.float64).cpu().full_tensor(), found[name].double())
        doubled = next(p.grad for p in model.parameters() if p.grad is not None).double()
        assert doubled.full_tensor().dtype == torch.float64
        return found

    for found in run_ranks(size, work):
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


def test_full_tensor_of_another_parameter_on_each_rank_is_told():
    def work(comm, model):
        model = shard(model, comm)
        (model.head if comm.rank else model.unused).weight.full_tensor()

    with pytest.raises(MismatchError, match=r"full_tensor\(\) of shape"):
        with_models(SIZE, work)


@pytest.mark.parametrize("cpu_offload", [False, True])
def test_torchs_getters_give_whole_states_that_may_be_saved(cpu_offload):
    options = StateDictOptions(full_state_dict=True, cpu_offload=cpu_offload)

    def states(model, optimizer, tokens):
        lm_loss(model, tokens).backward()
        optimizer.step()
        state, optim = get_state_dict(model, optimizer, options=options)
        return state, optim["state"], [group["params"] for group in optim["param_groups"]]

    reference, models = replicas(TinyLM, SIZE)
    expected = states(reference, optimizer_for(reference), batches(1, SIZE * ROWS_PER_RANK)[0])

    def work(comm):
        model = shard(models[comm.rank], comm)
        found = states(model, optimizer_for(model), rows_of(comm, 1)[0])
        torch.save(found, io.BytesIO())
        # Whoever else asks still gets parts.
        assert model.state_dict()["embed.weight"].flat.numel() < found[0]["embed.weight"].numel()
        parts = get_model_state_dict(model, options=StateDictOptions(cpu_offload=cpu_offload))
        assert all(torch.equal(value.full_tensor(), found[0][name]) for name, value in parts.items())
        return found

    for found in run_ranks(SIZE, work):
        torch.testing.assert_close(found[:2], expected[:2], atol=1e-6, rtol=1e-5)
        assert found[2] == expected[2]


def test_optimizer_states_know_their_place_after_a_step():
    def work(comm, model):
        model = shard(model, comm)
        optimizer = optimizer_for(model)
        lm_loss(model, rows_of(comm, 1)[0]).backward()
        optimizer.step()
        state = optimizer.state_dict()
        state["state"] = {number: dict(values) for number, values in state["state"].items()}
        params = list(model.parameters())
        shapes = {params[number].shard_meta.name: values["exp_avg"].shape for number, values in state["state"].items()}
        assert all(optimizer.state[p]["exp_avg"].shape == p.shape for p in params if p in optimizer.state)
        kept = {p: values["exp_avg"] for p, values in optimizer.state.items()}
        for values in optimizer.state.values():
            values["exp_avg"] = torch.zeros_like(values["exp_avg"])
        optimizer.load_state_dict(state)
        assert all(torch.equal(optimizer.state[p]["exp_avg"], value) for p, value in kept.items())
        return shapes

    for shapes in with_models(SIZE, work):
        assert shapes["blocks.0.up.weight"] == (40, 24)
