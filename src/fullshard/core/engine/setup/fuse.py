"""Selection of the modules of a unit that write their weight gradients straight into the lane."""

from __future__ import annotations

from types import MethodType

import torch
from torch import nn

from fullshard.core.engine.step.fused import EmbeddingSite, LinearSite
from fullshard.core.engine.step.hooks import UnitHooks
from fullshard.core.engine.step.plain_modules import is_plain_embedding, plain_type
from fullshard.core.engine.tables.table_param import TableEmbeddingSite, TableLinearSite, TableParam

_SITE = "_fullshard_site"  # in a module's __dict__


def fuse(hooks: UnitHooks) -> None:
    """Make the plain linear and embedding modules of a unit write their weight gradients into the lane."""
    for param in hooks.unit.params:
        for module, key in param.slots:
            if key != "weight" or "forward" in module.__dict__:
                continue
            home = isinstance(param, TableParam)
            if plain_type(module) is nn.Linear:
                _replace_forward(module, (TableLinearSite if home else LinearSite)(hooks, param, module))
            elif is_plain_embedding(module):
                _replace_forward(module, (TableEmbeddingSite if home else EmbeddingSite)(hooks, param, module))


def _replace_forward(module: nn.Module, site: LinearSite | EmbeddingSite) -> None:
    module.__dict__[_SITE] = site
    module.forward = MethodType(_forward, module)


def _forward(module: nn.Module, input: torch.Tensor) -> torch.Tensor:
    # One function for all modules, not each module's site: the compiler would take another ``forward`` for another kind
    # of block, compile each block anew, and give up after the eighth.
    if torch.compiler.is_compiling():
        return type(module).forward(module, input)
    return module.__dict__[_SITE](input)
