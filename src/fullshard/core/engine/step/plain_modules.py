"""Distinguishes modules whose forward and backward the engine knows from subclasses that it does not know."""

from __future__ import annotations

from torch import nn


def plain_type(module: nn.Module) -> type[nn.Module]:
    """Return the class of ``module``, without a subclass that a wrapper added and that does not change forward."""
    return getattr(type(module), "_fullshard_plain_type", type(module))


def is_plain_embedding(module: nn.Module) -> bool:
    """Return whether the backward of ``module`` is a sum of rows and reads no parameter."""
    if plain_type(module) is not nn.Embedding:
        return False
    return module.max_norm is None and not module.scale_grad_by_freq and not module.sparse
