"""Which sharded model a module belongs to, and what users may change of its tree: names are followed, else refused."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence

from torch import nn

from fullshard.core.engine.step.param import ShardedParam
from fullshard.core.engine.step.runtime import Runtime
from fullshard.core.layout.names import plain_name
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


def follow_tree(runtime: Runtime) -> None:
    """Give parameters the names that they have now; no communication.

    Modules may have been exchanged, moved, wrapped, renamed or registered at another place too. Ranks compare the names
    at the end of the next backward.

    Raises:
        ShardingError: A parameter was added, removed or replaced, or registered by itself at another place.
    """
    sharded = {id(one): param for _, param in runtime.all_params() for one in (param.sharded, param.full)}
    _refuse_removed(runtime)
    names: dict[ShardedParam, list[str]] = {}
    added: dict[str, nn.Parameter] = {}
    left_out: set[str] = set()
    for name, module, key, one in _registered(runtime.root.modules):
        param = sharded.get(id(one))
        if param is not None:
            if (module, key) not in param.slots:
                raise ShardingError(
                    f"{param.meta.name} was registered as {name} after fully_shard: {type(module).__name__}.{key} "
                    "would compute with this rank's rows. Tie parameters before sharding."
                )
            names.setdefault(param, []).append(name)
        elif id(one) in runtime.ignored:
            left_out.add(name)
        else:
            added[name] = one
    _refuse_replaced(names, left_out | added.keys())
    if added:
        runtime.on_added(added)
    _rename(runtime, names)


def refuse_added(added: dict[str, nn.Parameter]) -> None:
    """Refuse parameters that modules added after sharding have brought.

    Raises:
        ShardingError: Always.
    """
    raise ShardingError(
        f"{next(iter(added))} was added to the model after fully_shard, so it would not be kept equal on all ranks. "
        "Add it before sharding, or pass it in ignored_params."
    )


def _registered(tops: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    """Yield each registration of a Parameter; a list of modules that became one unit is numbered, as a ModuleList."""
    for number, top in enumerate(tops):
        for path, module in top.named_modules(prefix="" if len(tops) == 1 else str(number), remove_duplicate=False):
            for key, param in module._parameters.items():
                if param is not None:
                    yield plain_name(f"{path}.{key}" if path else key), module, key, param


def _refuse_removed(runtime: Runtime) -> None:
    present = {id(module) for top in runtime.root.modules for module in top.modules()}
    for _, param in runtime.all_params():
        if all(id(module) not in present for module, _ in param.slots):
            raise ShardingError(
                f"{param.meta.name} is no longer part of the model, but ranks would still gather and save it. "
                "Remove or replace modules before fully_shard."
            )


def _refuse_replaced(names: dict[ShardedParam, list[str]], others: set[str]) -> None:
    """Refuse a tied parameter whose place another one has taken; the places that it keeps may be others now."""
    for param, now in names.items():
        before = {param.meta.name, *param.meta.aliases}
        taken = sorted((before - set(now)) & others) if len(now) < len(before) else []
        if taken:
            raise ShardingError(
                f"{taken[0]}, tied to {now[0]}, was replaced by another Parameter after fully_shard, which would not "
                "be kept equal on all ranks. Replace it before sharding."
            )


def _rename(runtime: Runtime, names: dict[ShardedParam, list[str]]) -> None:
    """Rename parameters. Units keep their names, by which ranks that move modules differently can tell them apart."""
    changed = {p: now for p, now in names.items() if now[0] != p.meta.name or {*now[1:]} != {*p.meta.aliases}}
    if not changed:
        return
    for param, now in changed.items():
        param.rename(now)
    runtime.agreement.renamed = [param.meta.name for _, param in runtime.all_params()]
