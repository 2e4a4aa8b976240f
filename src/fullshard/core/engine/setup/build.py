"""Builds units from unsharded parameters, one unit at a time, and includes parts that were sharded before."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fullshard.core.comm import Comm, Device, Mesh, SoloComm, identity_of, marked_sharers, same_group, same_ranks
from fullshard.core.engine.extension.extension_lane import ExtensionLane, ExtensionParam, even_layout
from fullshard.core.engine.full.model_class import plain_class
from fullshard.core.engine.parallel.parallel_lane import ParallelLane, ParallelParam
from fullshard.core.engine.registry import detach, is_sharded, runtime_of
from fullshard.core.engine.setup.wrap import ParamSpec, UnitSpec, can_stay_home, is_table
from fullshard.core.engine.step.lane import BufferTracker, Lane, ReusableBuffer
from fullshard.core.engine.step.param import ShardedParam
from fullshard.core.engine.step.precision import Dtypes, cast_floats, dtypes_of, torch_dtype
from fullshard.core.engine.step.runtime import Runtime
from fullshard.core.engine.step.unit import Unit
from fullshard.core.engine.tables.table_lane import TableLane
from fullshard.core.engine.tables.table_param import TableParam
from fullshard.core.layout import LaneLayout, plan_unit
from fullshard.core.layout.names import plain_name
from fullshard.core.layout.sharded import ShardMeta
from fullshard.core.policy import MixedPrecision, UnitPolicy
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
            _check_divided(name, runtime, ranks)
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


def _check_divided(name: str, inner: Runtime, ranks: Mesh) -> None:
    """Refuse a tensor parallel part that is sharded over some of the model's ranks only.

    Raises:
        ProcessGroupError: It is.
    """
    divided = next((param for _, param in inner.all_params() if isinstance(param, ParallelParam)), None)
    if divided is not None and inner.mesh.size < ranks.size:
        raise ProcessGroupError(
            f"{name} was sharded over {inner.mesh.size} of the model's {ranks.size} ranks, and tensor parallelism "
            f"divides {divided.meta.name}: norms would count its elements more than once. Pass the same mesh to each "
            "call of fully_shard."
        )


def sharers_in(root: nn.Module) -> list[Comm]:
    """Return the groups of ranks that share rows of modules in ``root``, each once, in tree order."""
    found = {identity_of(comm): comm for module in root.modules() if (comm := marked_sharers(module)) is not None}
    return list(found.values())


def check_sharers(name: str, sharers: Sequence[Comm], ranks: Mesh) -> None:
    """Refuse groups that share rows and are not complete among ``ranks``: gradients would lack their tokens.

    Every rank calls it, with as many groups of the same sizes. Only ``ranks`` exchange anything: where two ranks name
    different groups, neither would come to the other's.

    Raises:
        ProcessGroupError: They are not; on every rank, with the same text.
    """
    if not sharers:
        return
    by_rank = ranks.all_gather_object([identity_of(comm) for comm in sharers])
    for comm, groups in zip(sharers, zip(*by_rank, strict=True), strict=True):
        counts = Counter(groups)
        lacking = [str(rank) for rank, group in enumerate(groups) if counts[group] < comm.size]
        if lacking:
            raise ProcessGroupError(
                f"Groups of {comm.size} ranks share the rows of {name}, and of the {ranks.size} ranks of fully_shard "
                f"not all of a group have passed it: those of rank {', '.join(lacking)} lack some. Gradients of their "
                "tokens would be left out. Put each rank into one group, pass that to sequence_parallel on each of its "
                "ranks, and pass fully_shard no mesh, or one that has each group."
            )


def include(
    root: nn.Module, units: list[Unit], inner: list[Runtime], ranks: Mesh, tracker: BufferTracker
) -> list[Unit]:
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
            _join(unit, paths, ranks, comms, tracker)
        units += runtime.units
    return [units[0], *sorted(units[1:], key=lambda unit: order[id(unit.modules[0])])]


def _join(unit: Unit, paths: Mapping[int, list[str]], mesh: Mesh, comms: list[Any], tracker: BufferTracker) -> None:
    """Make ``unit`` part of a larger model.

    Args:
        unit: The unit.
        paths: Names of its modules in the larger model, by id.
        mesh: The ranks of that model.
        comms: The groups in use there; those of the unit are added.
        tracker: The bytes of that model.
    """
    unit.name = " + ".join(paths[id(module)][0] for module in unit.modules)
    for lane in unit.lanes:
        axes = lane.mesh.shard_group, lane.mesh.replica_group
        lane.mesh = Mesh(_one_of(comms, axes[0]), _one_of(comms, axes[1]))
        lane.tracker.add("shards", -lane.shard.nbytes)
        tracker.add("shards", lane.shard.nbytes)
        lane.tracker = tracker
        if isinstance(lane.full, ReusableBuffer):
            lane.full.tracker = tracker
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


_PARAMS: dict[type[Lane], type[ShardedParam]] = {TableLane: TableParam, ExtensionLane: ExtensionParam}
"""The class of the parameters of each kind of lane, if it has one of its own."""


class UnitBuilder:
    """Builds the units of one model; every rank builds the same ones in the same order."""

    def __init__(
        self, mesh: Mesh, policy: UnitPolicy, tracker: BufferTracker, device: Device, kept: frozenset[int]
    ) -> None:
        """Build units that compute on ``device``; ``kept`` are the ids of modules that compute in float32."""
        self.mesh = mesh
        self.policy = policy
        self.tracker = tracker
        self.runtime_device = device
        self.device = device.device
        self.kept = kept

    def build(self, spec: UnitSpec, *, values: bool) -> Unit:
        """Make a unit; at most its own full parameters are in memory besides the shards made so far.

        Args:
            spec: Its modules and parameters.
            values: If True, the shards get the parameters' values; otherwise they hold zeros, for a source to fill.
        """
        tables = {id(member) for member in spec.params if is_table(member)}
        homes = self._homes(spec)
        cut = [piece for group in self._groups(spec, homes) for piece in self._cut(group, homes, values=values)]
        # The full values are not needed any more. Freed before the gathered buffers are allocated: otherwise two units
        # would be in memory at once.
        for member in spec.params:
            if member.parallel is not None:
                member.parallel.leave(member.slots, member.param)
            if not member.param.is_meta:
                member.param.data = member.param.data.new_empty(0)
        params: list[ShardedParam] = []
        for lane, members in cut:
            lane.allocate()
            params += self._sharded_params(lane, members, tables)
        return Unit(spec.name, spec.modules, params, [lane for lane, _ in cut], self.policy)

    def _is_kept(self, member: ParamSpec) -> bool:
        return any(id(module) in self.kept for module, _ in member.slots)

    def _dtypes(self, member: ParamSpec) -> Dtypes:
        dtypes = dtypes_of(self.policy.precision, member.param, kept=self._is_kept(member))
        # Its class sends the values that it was given, also if it is frozen.
        if member.extension is None:
            return dtypes
        wanted = torch_dtype(self.policy.precision.param)
        compute = wanted if wanted is not None and not self._is_kept(member) else member.extension.dtype
        return replace(dtypes, shard=dtypes.master, compute=compute if member.extension.packed else dtypes.compute)

    def _homes(self, spec: UnitSpec) -> set[int]:
        """Return the ids of the parameters whose rows stay home: tables, and heads in units of their own."""
        if self.policy.tables == "gather" or not self.policy.strategy.shards:
            return set()
        size, homes = self.mesh.shard_group.size, set()
        for member in (one for one in spec.params if one.extension is None):
            if can_stay_home(member, spec) and not self._is_replicated(member):
                lanes = plan_unit((tuple(member.param.shape),), size).lanes
                if len(lanes) == 1 and lanes[0].placements[0].full_rows:
                    homes.add(id(member))
        return homes

    def _is_replicated(self, member: ParamSpec) -> bool:
        return self.policy.frozen == "replicate" and not member.param.requires_grad

    def _groups(self, spec: UnitSpec, homes: set[int]) -> Iterable[list[ParamSpec]]:
        """Group parameters that may share a lane: the same dtypes, all trainable or all frozen, each table alone."""
        groups: dict[tuple[object, ...], list[ParamSpec]] = {}
        for member in spec.params:
            alone = id(member) if is_table(member) or id(member) in homes or member.extension is not None else None
            groups.setdefault((self._dtypes(member), member.param.requires_grad, alone), []).append(member)
        return groups.values()

    @property
    def _pinned(self) -> bool:
        offload = self.policy.offload
        return offload is not None and offload.pin_memory and self.device.type != "cpu"

    def _host(self, piece: torch.Tensor) -> torch.Tensor:
        """Move a shard to host memory if the policy says so."""
        if self.policy.offload is None or piece.is_meta:
            return piece
        return self.runtime_device.pin(piece.cpu()) if self._pinned else piece.cpu()

    def _cut(self, group: list[ParamSpec], homes: set[int], *, values: bool) -> Iterable[tuple[Lane, list[ParamSpec]]]:
        """Plan the lanes of one group and cut this rank's shards, with the parameters' values if ``values``."""
        first, dtypes = group[0].param, self._dtypes(group[0])
        replicated = self._is_replicated(group[0])
        mesh = Mesh(SoloComm(self.mesh.device), self.mesh.all_ranks) if replicated else self.mesh
        for layout in self._layouts(group, mesh.shard_group.size):
            shard = torch.zeros(layout.shard_numel, dtype=dtypes.shard, device=self.device)
            if values:
                _copy_values(group, layout, mesh.shard_group.rank, shard)
            members = [group[placement.index] for placement in layout.placements]
            extension = group[0].extension
            lane = self._kind(members, homes)(
                layout,
                mesh,
                self._host(shard),
                shapes=[tuple(member.param.shape) for member in members],
                dtypes=dtypes,
                trainable=first.requires_grad,
                replicated=replicated or not self.policy.strategy.shards,
                pinned=self._pinned,
                device=self.runtime_device,
                tracker=self.tracker,
            )
            if isinstance(lane, TableLane):
                lane.forced = self.policy.tables == "home"
            if isinstance(lane, ParallelLane):
                lane.parallels = [member.parallel for member in members]
            if isinstance(lane, ExtensionLane) and extension is not None:
                lane.extension, extension.precision = extension, self.policy.precision
                extension.cut(lane.rows.shape, lane.shard.dtype, self.device)
            yield lane, members

    @staticmethod
    def _kind(members: list[ParamSpec], homes: set[int]) -> type[Lane]:
        """Return the class of the lane of ``members``."""
        if any(member.parallel is not None for member in members):
            return ParallelLane
        if members[0].extension is not None:
            return ExtensionLane
        return TableLane if id(members[0]) in homes else Lane

    @staticmethod
    def _layouts(group: list[ParamSpec], ranks: int) -> Iterable[LaneLayout]:
        """Return the layouts of the lanes of one group."""
        if group[0].extension is not None:
            return [even_layout(group[0].extension, ranks)]
        return plan_unit(tuple(tuple(member.param.shape) for member in group), ranks).lanes

    def _sharded_params(self, lane: Lane, members: list[ParamSpec], tables: set[int]) -> Iterable[ShardedParam]:
        rank = lane.mesh.shard_group.rank
        for placement, shape, member in zip(lane.layout.placements, lane.shapes, members, strict=True):
            parallel = member.parallel
            shape, block = (shape, None) if parallel is None else (parallel.shape, parallel.block)
            meta = ShardMeta(member.names[0], tuple(member.names[1:]), shape, lane.layout, placement, rank, block)
            kind = _PARAMS.get(type(lane), ShardedParam) if parallel is None else ParallelParam
            yield kind(meta, lane, member.param, member.slots, is_table=id(member) in tables)


def _copy_values(group: list[ParamSpec], layout: LaneLayout, rank: int, shard: torch.Tensor) -> None:
    """Copy a rank's part of a lane's parameters into ``shard``, (shard_numel,)."""
    low, _ = layout.shard_bounds(rank)
    for placement in layout.placements:
        start, stop = layout.local_range(placement, rank)
        source = group[placement.index].param.detach().reshape(-1)[start:stop]
        offset = placement.start + start - low
        if stop > start:
            shard[offset : offset + stop - start].copy_(source)


def move_buffers(modules: Iterable[nn.Module], device: torch.device, dtype: str | None) -> None:
    """Move buffers to the device, and floating ones to the named dtype; skip those on the meta device."""
    for module in modules:
        for key, buffer in module._buffers.items():
            if buffer is None or buffer.is_meta:
                continue
            wanted = torch_dtype(dtype) if buffer.is_floating_point() else None
            module._buffers[key] = buffer.to(device=device, dtype=wanted)


def keep_in_float32(modules: list[nn.Module], precision: MixedPrecision, root: Unit) -> None:
    """Make ``modules`` take float32 and return the compute dtype, unless the model of ``root`` runs unsharded."""

    def to_float32(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return cast_floats((args, kwargs), "float32")

    def back(_module: nn.Module, _args: tuple[Any, ...], output: Any) -> Any:
        return output if root.summoned is not None else cast_floats(output, root.policy.precision.param)

    for module in modules if precision.param is not None else ():
        module.register_forward_pre_hook(to_float32, with_kwargs=True)
        module.register_forward_hook(back)
