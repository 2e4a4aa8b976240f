"""Registry of sharded models: which one a module belongs to."""

from __future__ import annotations

import weakref

from torch import nn

from fullshard.core.engine.step.runtime import Runtime
from fullshard.errors import ShardingError

_ATTRIBUTE = "_fullshard_runtime"

_HOMES: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Runtime]] = weakref.WeakKeyDictionary()
"""The sharded model of each module; weak on both sides, because a runtime holds its modules."""


def attach(model: nn.Module, runtime: Runtime) -> None:
    """Register ``model`` as a sharded model."""
    model.__dict__[_ATTRIBUTE] = runtime
    for module in model.modules():
        _HOMES[module] = weakref.ref(runtime)


def sharded_roots(module: nn.Module) -> list[nn.Module]:
    """Return the sharded models that ``module`` is, belongs to or contains, in tree order; any rank."""
    found = (_HOMES.get(part) for part in module.modules())
    runtimes = (reference() for reference in found if reference is not None)
    return list({id(runtime): runtime.root.modules[0] for runtime in runtimes if runtime is not None}.values())


def home_of(module: nn.Module) -> Runtime:
    """Return the runtime of the one sharded model that ``module`` is, belongs to or wraps.

    Raises:
        ShardingError: There are none or several.
    """
    roots = sharded_roots(module)
    if len(roots) != 1:
        raise ShardingError(
            f"{type(module).__name__} is not a sharded model or a part of one: call fully_shard(model) first."
            if not roots
            else f"{type(module).__name__} holds {len(roots)} sharded models; pass one of them."
        )
    return runtime_of(roots[0])


def detach(model: nn.Module) -> None:
    """Remove ``model`` as a sharded model, because it becomes part of another one."""
    del model.__dict__[_ATTRIBUTE]


def is_sharded(module: nn.Module) -> bool:
    """Return whether ``module`` is the root of a sharded model."""
    return _ATTRIBUTE in module.__dict__


def runtime_of(model: nn.Module) -> Runtime:
    """Return the runtime of a sharded model.

    Raises:
        ShardingError: The module is not the root that ``fully_shard`` was called on.
    """
    runtime = model.__dict__.get(_ATTRIBUTE)
    if runtime is None:
        raise ShardingError(
            f"{type(model).__name__} is not sharded: call fully_shard(model) first, and pass that model."
        )
    return runtime
