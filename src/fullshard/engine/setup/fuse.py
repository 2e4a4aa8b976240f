"""Which modules of a unit write their weight gradients straight into the lane."""

from __future__ import annotations

from torch import nn

from fullshard.engine.step.fused import EmbeddingSite, LinearSite
from fullshard.engine.step.hooks import UnitHooks
from fullshard.engine.step.plain_modules import is_plain_embedding, plain_type


def fuse(hooks: UnitHooks) -> None:
    """Have the plain linear and embedding modules of a unit write their weight gradients into the lane.

    Not those inside a module that is compiled already: their graphs would call the module's own forward anyway, and the
    compiler would compile each block anew, because it takes another ``forward`` for another kind of block.
    """
    compiled = {
        id(inner)
        for module in hooks.unit.modules
        for outer in module.modules()
        if outer._compiled_call_impl is not None
        for inner in outer.modules()
    }
    for param in hooks.unit.params:
        for module, key in param.slots:
            if key != "weight" or "forward" in module.__dict__ or id(module) in compiled:
                continue
            if plain_type(module) is nn.Linear:
                module.forward = LinearSite(hooks, param, module)
            elif is_plain_embedding(module):
                module.forward = EmbeddingSite(hooks, param, module)
