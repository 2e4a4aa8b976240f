"""Full states of an FSDP2 model and its optimizer, written and read by hand as torch's example does, or by getters.

Each function takes the names of ``torch.distributed.tensor``, torch's or ours: nothing else differs.
"""

import io

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    _init_optim_state,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from support.tiny_lm import lm_loss


def adamw(model):
    """One of all parameters that have a gradient: torch refuses to load no state for what could be trained."""
    return torch.optim.AdamW([param for name, param in model.named_parameters() if name != "unused"], lr=1e-2)


def steps(model, optimizer, data):
    losses = []
    for tokens in data:
        loss = lm_loss(model, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def resumed(tensors, make, mesh, data, way):
    """Train, write full states, and train on from them in a model with other weights; return all that was seen."""
    model = make(0)
    for param in model.parameters():
        assert isinstance(param, tensors.DTensor)
        assert param.placements == (tensors.Shard(0),)
        assert param.device_mesh is mesh
    optimizer = adamw(model)
    losses = steps(model, optimizer, data[:2])
    everyones = [way.write(tensors, model, optimizer)]
    assert dist.get_rank() == 0 or way is ByHand or everyones == [({}, {})]
    file = io.BytesIO()
    torch.save(everyones[0], file)
    everyones = [file.getvalue()]
    dist.broadcast_object_list(everyones)  # rank 0's file
    full, full_state = torch.load(io.BytesIO(everyones[0]))
    other = make(7)
    way.read_model(tensors, other, dict(full))  # torch's setter puts DTensors into it
    its = adamw(other)
    way.read_optimizer(tensors, other, its, full_state)
    losses += steps(other, its, data[2:])
    states = {f"saved {name}": value for name, value in full.items()}
    return states | {f"loss {number}": loss for number, loss in enumerate(losses)}, other


class ByHand:
    @staticmethod
    def write(tensors, model, optimizer):
        full = {name: shard.full_tensor().cpu() for name, shard in model.state_dict().items()}
        state = optimizer.state_dict()
        gathered = {
            number: {
                key: value.full_tensor().cpu() if isinstance(value, tensors.DTensor) else value
                for key, value in values.items()
            }
            for number, values in state["state"].items()
        }
        return full, {"param_groups": state["param_groups"], "state": gathered}

    @staticmethod
    def read_model(tensors, model, full):
        mine = model.state_dict()
        parts = {name: torch.nn.Parameter(like(tensors, mine[name], value)) for name, value in full.items()}
        model.load_state_dict(parts, strict=False, assign=True)

    @staticmethod
    def read_optimizer(tensors, _model, optimizer, full):
        _init_optim_state(optimizer)
        state = optimizer.state_dict()
        for number, values in full["state"].items():
            held = state["state"][number]
            for key, value in values.items():
                held[key] = like(tensors, held[key], value) if isinstance(held[key], tensors.DTensor) else value
        optimizer.load_state_dict(state)


def like(tensors, mine, value):
    return tensors.distribute_tensor(value, mine.device_mesh, mine.placements)


class ByGetters:
    @staticmethod
    def write(_tensors, model, optimizer):
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        model_state = get_model_state_dict(model, options=options)
        return model_state, get_optimizer_state_dict(model, optimizer, options=options)

    @staticmethod
    def read_model(_tensors, model, full):
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(model, full, options=options)

    @staticmethod
    def read_optimizer(_tensors, model, optimizer, full):
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_optimizer_state_dict(model, optimizer, full, options=options)
