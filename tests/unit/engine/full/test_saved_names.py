"""What wrappers are around a module does not show in the names of its parameters."""

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from fullshard import fully_shard, units
from fullshard.core.comm import SoloComm
from fullshard.core.engine import full_state_dict, on_state_dict, plain_name, saved_tensors, wanted_tensors
from support.models import TinyLM

CPU = SoloComm(torch.device("cpu"))


class Wrapped(nn.Module):
    """As FSDP's wrapper."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self._fsdp_wrapped_module = module

    def forward(self, *args):
        return self._fsdp_wrapped_module(*args)


def wrapped_lm():
    torch.manual_seed(0)
    model = TinyLM()
    model.register_buffer("scale", torch.ones(1))
    for number, block in enumerate(model.blocks):
        model.blocks[number] = checkpoint_wrapper(Wrapped(block))
    model.embed = Wrapped(model.embed)
    return Wrapped(model)


def test_a_wrapper_is_no_part_of_a_name():
    assert plain_name("_orig_mod.a._fsdp_wrapped_module.b._checkpoint_wrapped_module.weight") == "a.b.weight"
    assert plain_name("_fsdp_wrapped_module") == ""
    assert plain_name("a.weight") == "a.weight"


def test_every_list_of_names_is_that_of_the_plain_model():
    torch.manual_seed(0)
    plain = TinyLM()
    plain.register_buffer("scale", torch.ones(1))
    model = wrapped_lm()
    assert {name for one in wanted_tensors(model) for name in one.names} == set(plain.state_dict())
    assert {name for one in saved_tensors(fully_shard(model, CPU)) for name in one.names} == set(plain.state_dict())
    assert [row.unit for row in units(model).rows] == [row.unit for row in units(fully_shard(plain, CPU)).rows]
    full = full_state_dict(model)
    assert all(torch.equal(full[name], value) for name, value in full_state_dict(plain).items())


def test_blocks_in_wrappers_are_taken_in_by_their_plain_names():
    model = wrapped_lm()
    for block in model._fsdp_wrapped_module.blocks:
        fully_shard(block, CPU, wrap=None)
    fully_shard(model, CPU)
    assert {param.shard_meta.name for param in model.parameters()} == {name for name, _ in TinyLM().named_parameters()}
    assert "blocks.0" in {row.unit for row in units(model).rows}


def test_another_answers_for_the_state_dict():
    model = fully_shard(TinyLM(), CPU)
    on_state_dict(
        model,
        lambda module, *args, **kwargs: {"asked": (module is model, args, kwargs)},
        lambda module, state, strict, assign: (module is model, state, strict, assign),
    )
    assert model.state_dict(prefix="x") == {"asked": (True, (), {"prefix": "x"})}
    assert model.load_state_dict({"a": 1}, strict=False) == (True, {"a": 1}, False, False)
