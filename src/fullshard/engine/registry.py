"""Which sharded model a module belongs to."""

from __future__ import annotations

import weakref

from torch import nn

from fullshard.engine.step.runtime import Runtime
from fullshard.errors import ShardingError

_ATTRIBUTE = "_fullshard_runtime"

_HOMES: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Runtime]] = weakref.WeakKeyDictionary()
"""The sharded model that each module is a part of; weak on both sides, as a runtime holds its modules."""


def attach(model: nn.Module, runtime: Runtime) -> None:
    """Make ``model`` a sharded model."""
    model.__dict__[_ATTRIBUTE] = runtime
    for module in model.modules():
        _HOMES[module] = weakref.ref(runtime)


def sharded_roots(module: nn.Module) -> list[nn.Module]:
    """The sharded models that ``module`` is, is a part of, or has inside, in tree order; any rank."""
    found = (_HOMES.get(part) for part in module.modules())
    runtimes = (reference() for reference in found if reference is not None)
    return list({id(runtime): runtime.root.modules[0] for runtime in runtimes if runtime is not None}.values())


def home_of(module: nn.Module) -> Runtime:
    """The runtime of the one sharded model that ``module`` is, is a part of, or is a wrapper of.

    Raises:
        ShardingError: There is none, or there are several.
    """
    roots = sharded_roots(module)
    if len(roots) != 1:
        raise ShardingError(
            f"{type(module).__name__} is no sharded model nor a part of one: call fully_shard(model) first."
            if not roots
            else f"{type(module).__name__} holds {len(roots)} sharded models; pass one of them."
        )
    return runtime_of(roots[0])


def detach(model: nn.Module) -> None:
    """Make ``model`` a part of another one."""
    del model.__dict__[_ATTRIBUTE]


def is_sharded(module: nn.Module) -> bool:
    """Whether ``fully_shard`` was called on ``module``, and on nothing around it."""
    return _ATTRIBUTE in module.__dict__


def runtime_of(model: nn.Module) -> Runtime:
    """The runtime of a sharded model.

    Raises:
        ShardingError: The module is not the root that ``fully_shard`` was called on.
    """
    runtime = model.__dict__.get(_ATTRIBUTE)
    if runtime is None:
        raise ShardingError(
            f"{type(model).__name__} is not sharded: call fully_shard(model) first, and pass that model."
        )
    return runtime
