"""Parts of a model that were sharded before it: checked, and included in it."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

from torch import nn

from fullshard.core.comm import Mesh, same_group, same_ranks
from fullshard.core.engine.full.model_class import plain_class
from fullshard.core.engine.registry import detach, is_sharded, runtime_of
from fullshard.core.engine.step.buffers import Account, ReusableBuffer
from fullshard.core.engine.step.runtime import Runtime
from fullshard.core.engine.step.unit import Unit
from fullshard.core.layout.names import plain_name
from fullshard.errors import ProcessGroupError, ShardingError


def sharded_inside(root: nn.Module, ranks: Mesh) -> list[Runtime]:
    """Return the runtimes of modules inside ``root`` that were sharded before, in tree order.

    Raises:
        ShardingError: ``root`` itself is sharded.
        ProcessGroupError: A part was sharded over ranks that are not among ``ranks``.
    """
    if is_sharded(root):
        raise ShardingError(f"{type(root).__name__} is sharded already; call fully_shard on a module once.")
    found: dict[int, Runtime] = {}
    inside = {id(module) for module in root.modules()}
    for name, module in root.named_modules():
        if is_sharded(module):
            runtime = runtime_of(module)
            found[id(runtime)] = runtime
            if not inside.issuperset(map(id, runtime.root.modules)):
                raise ShardingError(
                    f"{name} was sharded as one unit with modules outside of {type(root).__name__}. Shard inner "
                    "modules first, then a module that contains all of them."
                )
            _check_ranks(name, root, runtime.mesh, ranks)
    return list(found.values())


def _check_ranks(name: str, root: nn.Module, inner: Mesh, ranks: Mesh) -> None:
    """Refuse a part of ``root`` whose ranks are neither the model's nor a group of them. Every rank calls it.

    Raises:
        ProcessGroupError: The ranks do not fit; raised on every rank.
    """
    if same_ranks(inner, ranks):
        return
    mine = uuid.uuid4().hex
    theirs, ours = inner.all_gather_object(mine), ranks.all_gather_object(mine)
    # With the same ranks in another order, rank 0 of the part would not be rank 0 of the model, which saves it.
    if not all(ranks.all_gather_object(theirs == ours or set(theirs) < set(ours))):
        raise ProcessGroupError(
            f"{name} was sharded over {inner.replica_group.size} x {inner.shard_group.size} ranks (replicas x shards), "
            f"and the call on {type(root).__name__} names {ranks.replica_group.size} x {ranks.shard_group.size}. The "
            "ranks of a part must be those of the model in the same order, or some of them: pass such a mesh to each "
            "call of fully_shard."
        )


def include(root: nn.Module, units: list[Unit], inner: list[Runtime], ranks: Mesh, account: Account) -> list[Unit]:
    """Return the new units and those sharded before, root first, the others in tree order."""
    if not inner:
        return units
    paths: dict[int, list[str]] = {}
    for path, module in root.named_modules(remove_duplicate=False):
        paths.setdefault(id(module), []).append(plain_name(path))
    order = {key: place for place, key in enumerate(paths)}
    comms = [ranks.shard_group, ranks.replica_group, ranks.all_ranks]
    for runtime in inner:
        for module in runtime.root.modules:
            detach(module)
            module.__class__ = plain_class(type(module))
        for unit in runtime.units:
            _join(unit, paths, ranks, comms, account)
        units += runtime.units
    return [units[0], *sorted(units[1:], key=lambda unit: order[id(unit.modules[0])])]


def _join(unit: Unit, paths: Mapping[int, list[str]], mesh: Mesh, comms: list[Any], account: Account) -> None:
    """Make ``unit`` part of a larger model.

    Args:
        unit: The unit.
        paths: Names of its modules in the larger model, by id.
        mesh: The ranks of that model.
        comms: The groups in use there; those of the unit are added.
        account: The bytes of that model.
    """
    unit.name = " + ".join(paths[id(module)][0] for module in unit.modules)
    for lane in unit.lanes:
        axes = lane.mesh.shard_group, lane.mesh.replica_group
        lane.mesh = Mesh(_one_of(comms, axes[0]), _one_of(comms, axes[1]), lane.mesh.messages)
        lane.account.add("shards", -lane.shard.nbytes)
        account.add("shards", lane.shard.nbytes)
        lane.account = account
        if isinstance(lane.full, ReusableBuffer):
            lane.full.account = account
    for param in unit.params:
        names = [f"{path}.{key}" if path else key for module, key in param.slots for path in paths[id(module)]]
        param.rename(names)
        if param.lane.mesh.size < mesh.size:
            counts = param.lane.mesh.replica_group.rank == 0
            vars(param.sharded).update(shard_everyone=mesh.all_ranks, shard_counts=counts)


def _one_of(comms: list[Any], comm: Any) -> Any:
    """Return the group in ``comms`` with the ranks of ``comm``; if there is none, add ``comm`` and return it.

    Two groups of the same ranks number their messages separately, so one model must use only one of them.
    """
    if comm.size == 1:
        return comm
    known = next((one for one in comms if same_group(one, comm)), None)
    if known is None:
        comms.append(comm)
    return comm if known is None else known
