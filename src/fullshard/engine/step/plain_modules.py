"""Tells modules whose forward and backward the engine knows from subclasses it does not."""

from __future__ import annotations

from torch import nn


def plain_type(module: nn.Module) -> type[nn.Module]:
    """The class of ``module``, without one that was put on top of it and changes nothing of its forward."""
    return getattr(type(module), "_fullshard_plain_type", type(module))


def is_plain_embedding(module: nn.Module) -> bool:
    """Whether the backward of ``module`` is a sum of rows, and needs no parameter."""
    if plain_type(module) is not nn.Embedding:
        return False
    return module.max_norm is None and not module.scale_grad_by_freq and not module.sparse
