"""A model's tree as it was before sharding, for code that looks at names, classes and modules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from fullshard.compat.torch_fsdp.checkpointing import ActivationWrapper
from fullshard.compat.torch_fsdp.fully_sharded_data_parallel import FullyShardedDataParallel
from fullshard.core.engine import plain_class, plain_name, sharded_roots
from fullshard.core.layout.names import WRAPPERS


def inside_wrappers(module: nn.Module) -> nn.Module:
    """Return ``module`` without the wrappers of version 1 and of activation checkpointing around it."""
    while isinstance(module, (FullyShardedDataParallel, ActivationWrapper)):
        module = next(child for name, child in module._modules.items() if name in WRAPPERS and child is not None)
    return module


@contextmanager
def plain_tree(model: nn.Module) -> Iterator[nn.Module]:
    """Take the wrappers out of ``model`` for a context, which gets the model itself; any rank, no communication.

    Its modules and parameters then have the names and classes of the unsharded model, however code looks them up: a
    wrapper hides its own name from ``named_parameters()`` and ``named_modules()``, but not from ``named_children()``.
    Nothing may run forward meanwhile, because version 1's wrappers take part in it.
    """
    replaced = [
        (parent, key, child)
        for parent in model.modules()
        if inside_wrappers(parent) is parent
        for key, child in parent._modules.items()
        if child is not None and inside_wrappers(child) is not child
    ]
    try:
        for parent, key, child in replaced:
            parent._modules[key] = inside_wrappers(child)
        yield inside_wrappers(model)
    finally:
        for parent, key, child in replaced:
            parent._modules[key] = child


def plain_copy(model: nn.Module, values: Mapping[str, torch.Tensor]) -> nn.Module:
    """Return a copy of ``model`` as it was before sharding, with the parameters ``values``; any rank, no communication.

    For code that one rank runs and that looks at modules or calls them, such as peft's ``save_pretrained``. It has the
    model's own classes, neither wrappers nor hooks, and shares everything that is no module or shard.

    Args:
        model: A sharded model, with or without wrappers.
        values: Full tensors by the unsharded model's names. A parameter that has none is on the meta device.
    """
    roots = sharded_roots(model)
    full: dict[int, nn.Parameter] = {}
    for name, param in inside_wrappers(model).named_parameters(remove_duplicate=False):
        if hasattr(param, "shard_meta"):
            value = values.get(plain_name(name))
            if value is not None or id(param) not in full:
                full[id(param)] = _parameter(param, value)
    made: dict[nn.Module, nn.Module] = {}

    def copied(module: nn.Module) -> nn.Module:
        module = inside_wrappers(module)
        if module not in made:
            cls = plain_class(type(module)) if any(module is root for root in roots) else type(module)
            cls = getattr(cls, "_fullshard_plain_type", cls)
            made[module] = object.__new__(cls)
            made[module].__dict__.update(_plain_state(module, cls))
            own = module._parameters.items()
            made[module]._parameters = {key: full.get(id(param), param) for key, param in own}
            made[module]._modules = {k: None if m is None else copied(m) for k, m in module._modules.items()}
        return made[module]

    return copied(model)


def _parameter(shard: nn.Parameter, value: torch.Tensor | None) -> nn.Parameter:
    if value is None:
        value = torch.empty(shard.shard_meta.global_shape, dtype=shard.dtype, device="meta")  # type: ignore[attr-defined]
    return nn.Parameter(value, requires_grad=shard.requires_grad and value.is_floating_point())


def _plain_state(module: nn.Module, cls: type[nn.Module]) -> dict[str, Any]:
    """Return the attributes of ``module`` without hooks, and without methods that were replaced on the instance."""
    replaced = {key for key, value in vars(module).items() if callable(value) and callable(getattr(cls, key, None))}
    own = {key: value for key, value in vars(module).items() if key not in replaced}
    return own | {key: type(own[key])() for key in _HOOKS}


_HOOKS = [key for key in vars(nn.Module()) if key.startswith(("_forward", "_backward"))]
