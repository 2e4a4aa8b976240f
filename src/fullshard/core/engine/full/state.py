"""Full parameters of a sharded model: showing, streaming and loading them; and this rank's part of its saved state.

Evaluation may be in the parameters' own dtypes, for a model that trains in narrower ones.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fullshard.core.comm import Mesh, SoloComm
from fullshard.core.engine.parallel.parallel import everyone, is_distributed
from fullshard.core.engine.parallel.parallel_lane import ParallelParam
from fullshard.core.engine.registry import runtime_of
from fullshard.core.engine.step.param import ShardedParam
from fullshard.core.engine.step.precision import Dtypes
from fullshard.core.engine.step.runtime import Runtime
from fullshard.core.engine.step.unit import Keep, Unit
from fullshard.core.engine.tables.table_lane import request_tables
from fullshard.core.layout import Block
from fullshard.core.layout.names import plain_name
from fullshard.core.policy import MixedPrecision, UnitPolicy
from fullshard.core.shards import on_rows, rows_of, run_of, untraced
from fullshard.core.torch_private import in_backward
from fullshard.errors import ShardingError

_NARROW: weakref.WeakKeyDictionary[Unit, tuple[UnitPolicy, list[Dtypes]]] = weakref.WeakKeyDictionary()
"""Training policy and lane dtypes of the units that currently compute in full precision."""

_BUFFERS: weakref.WeakKeyDictionary[nn.Module, dict[str, torch.dtype]] = weakref.WeakKeyDictionary()
"""The dtypes of modules' buffers in the mode that is currently off; at first, those before sharding."""


def remember_buffers(modules: Iterable[nn.Module], precision: MixedPrecision) -> None:
    """Record the dtypes of floating buffers before they are cast, if evaluation needs them."""
    for module in modules if precision.full_in_eval else ():
        floating = {key: b.dtype for key, b in module._buffers.items() if b is not None and b.is_floating_point()}
        if floating:
            _BUFFERS[module] = floating


def follow_mode(units: Sequence[Unit]) -> None:
    """Make ``units`` with ``full_in_eval`` compute in full precision while the root of their model does not train.

    The hooks run before the engine's own, which cast inputs and gather.
    """
    for unit in units:
        for module in unit.modules if unit.policy.precision.full_in_eval else ():
            module.register_forward_pre_hook(functools.partial(_follow, unit), prepend=True)


@untraced
def _follow(unit: Unit, _module: nn.Module, _args: tuple[Any, ...]) -> None:
    switch_if_due(unit.runtime)


def switch_if_due(runtime: Runtime) -> None:
    """Switch the units of a model whose mode has changed since its last forward; every rank calls it.

    Raises:
        ShardingError: Gradients wait to be reduced.
    """
    if runtime.open_calls or in_backward() or any(one.summoned or one.stays_shown for one in runtime.units):
        return
    full = not runtime.root.modules[0].training
    switching = [one for one in runtime.units if one.policy.precision.full_in_eval and full is not (one in _NARROW)]
    if not switching:
        return
    waiting = [one.name for one in switching if any(lane.holds_gradient for lane in one.lanes)]
    waiting += [one.name for one in switching if any(lane.partial is not None for lane in one.lanes)]
    if waiting:
        raise ShardingError(
            f"The model was set to {'evaluate' if full else 'train'}, in other dtypes (full_in_eval), while gradients "
            f"of no_sync or no_all_reduce wait to be reduced, in unit {waiting[0]}. Finish the accumulation first."
        )
    runtime.forward_event()
    runtime.follow_changes(switching)
    for one in switching:
        _switch(one, full=full)
    modules = {module: None for top in runtime.root.modules for module in top.modules()}
    for module in modules:
        for key, dtype in _BUFFERS.get(module, {}).items():
            buffer = module._buffers.get(key)
            if buffer is not None:
                module._buffers[key], _BUFFERS[module][key] = buffer.to(dtype), buffer.dtype


def _switch(unit: Unit, *, full: bool) -> None:
    """Gather, compute and reduce ``unit`` in its shards' own dtypes, or in those of training again."""
    unit.reshard()
    if full:
        policy, dtypes = unit.policy, [lane.dtypes for lane in unit.lanes]
        _NARROW[unit] = policy, dtypes
        own = dataclasses.replace(policy.precision, param=None, reduce=None, reduce_sum=None)
        policy = dataclasses.replace(policy, precision=own)
        dtypes = [dataclasses.replace(d, compute=d.master, reduce=d.master, reduce_sum=d.master) for d in dtypes]
    else:
        policy, dtypes = _NARROW.pop(unit)
    unit.policy = policy
    for lane, one in zip(unit.lanes, dtypes, strict=True):
        lane.retype(one)
        for param in unit.params_of(lane):
            param.bind(trainable=param.trainable)
        lane.full.release()


@contextmanager
def unsharded(model: nn.Module, *, write_back: bool = True) -> Iterator[None]:
    """Show full parameters, in the compute dtype, on every rank; all ranks enter it together.

    Changes of parameters made inside, in place or by ``p.data = x``, are kept: each rank keeps its own rows, so write
    the same values on every rank. Memory: the gathered model.

    Args:
        model: A sharded model.
        write_back: Whether changes are kept; if not, they are lost and nothing is compared at the end.

    Raises:
        ShardingError: Entered during backward, or while full parameters are shown already.
    """
    runtime = runtime_of(model)
    if in_backward():
        raise ShardingError("unsharded(model) cannot be entered during backward: it gathers and frees units itself.")
    if any(unit.summoned for unit in runtime.units):
        raise ShardingError("unsharded(model) cannot be entered while full parameters are shown already.")
    switch_if_due(runtime)
    runtime.forward_event()
    runtime.follow_changes()
    outermost = Keep.CONTEXT not in runtime.root.keep
    order = _Order(runtime) if outermost else None
    entered = [unit for unit in runtime.units if Keep.CONTEXT not in unit.keep]
    for unit in runtime.units:
        request_tables(unit)
        runtime.gather(unit)
        unit.settle()  # writes inside the context must not reach a rank that still reads
    for unit in entered:
        unit.keep.add(Keep.CONTEXT)
        for param in unit.params:
            param.full.__class__ = param.plain_class  # writes inside the context are kept, by whatever means
        for lane in unit.lanes if outermost and write_back else ():
            lane.expect_writes()
    try:
        yield
    finally:
        if order is not None:
            order.restore()
        _leave_unsharded(runtime, entered, write_back=outermost and write_back)


class _Order:
    """The order of units that ranks compare and prefetch by. Without gathers, a rank may run forwards alone.

    Afterwards the order is restored, also on ranks that ran none, so that all agree again.
    """

    def __init__(self, runtime: Runtime) -> None:
        """Keep the order of ``runtime``."""
        self._runtime = runtime
        schedule = runtime.schedule
        self._first_pass = runtime.agreement.first_pass
        self._kept = schedule.checksum, schedule.last, dict(schedule.following), set(schedule.gathered)

    def restore(self) -> None:
        """Forget the calls since then, except for what their backward needs."""
        schedule = self._runtime.schedule
        self._runtime.agreement.first_pass = self._first_pass
        schedule.checksum, schedule.last, schedule.following, schedule.gathered = self._kept


def _leave_unsharded(runtime: Runtime, entered: list[Unit], *, write_back: bool) -> None:
    for unit in entered:
        unit.keep.discard(Keep.CONTEXT)
    for unit in runtime.units if write_back else ():
        _write_back(unit)
    for unit in runtime.units:
        if not unit.open_calls:
            runtime.release(unit)


def _write_back(unit: Unit) -> None:
    """Copy what differs in the gathered parameters into this rank's shards, element by element.

    Raises:
        ShardingError: A parameter was replaced instead of changed.
    """
    for param in unit.params:
        if any(module._parameters.get(key) is not param.full for module, key in param.slots):
            raise ShardingError(
                f"{param.meta.name} was replaced by another Parameter inside unsharded(model); change its "
                "values in place (param.copy_, param.data.copy_) instead."
            )
    _take_assigned(unit)
    for lane in unit.lanes:
        lane.write_back()


def _take_assigned(unit: Unit) -> None:
    """Move values that ``param.data = x`` put elsewhere into the gathered memory, and point the parameters at it.

    Raises:
        ShardingError: They have another shape or dtype.
    """
    other = []
    for param in unit.params:
        if param.plain_class is not nn.Parameter:
            continue  # made by its class, without memory of its own
        place = param.lane.full_view(param.place)
        given = param.full.data
        if given.data_ptr() == place.data_ptr() and given.dtype == place.dtype:
            continue
        param.full.data = place
        if given.shape == place.shape and given.dtype == place.dtype:
            place.copy_(given)
        else:
            other.append(f"{param.meta.name} ({tuple(given.shape)}, {given.dtype})")
    if other:
        raise ShardingError(
            f"{', '.join(other)}: given another shape or dtype inside unsharded(model). Keep both; cast a model before "
            "fully_shard, or with mp_policy."
        )


class RootHeld:
    """Context in which the root unit stays gathered between forwards, for a generation loop."""

    def __init__(self, runtime: Runtime) -> None:
        """Hold the root of ``runtime``."""
        self.runtime = runtime
        self.outermost = False

    def __enter__(self) -> None:
        """Gather the root, unless it shows full parameters already."""
        runtime, root = self.runtime, self.runtime.root
        switch_if_due(runtime)
        runtime.forward_event()
        if root.summoned is not None:
            return
        self.outermost = Keep.GENERATION not in root.keep
        if not root.stays_shown:
            root.reshard()  # the gathered values may be older than the shards
            runtime.follow_changes([root])
        request_tables(root)
        runtime.gather(root)
        root.keep.add(Keep.GENERATION)

    def __exit__(self, *_error: object) -> None:
        """Release it, unless another context holds it."""
        if self.outermost:
            self.runtime.root.keep.discard(Keep.GENERATION)
            self.runtime.release(self.runtime.root)


def full_tensors(model: nn.Module) -> Iterator[tuple[str, dict[str, torch.Tensor | None]]]:
    """Stream the full model to rank 0, one unit at a time; every rank iterates to the end.

    Yields:
        The unit's name, and for each of its parameters the first name and, on rank 0, the full tensor on CPU in the
        shard's dtype (valid until the next step of the iteration); None on other ranks. Ignored parameters and
        persistent buffers come last, under the names ``(ignored)`` and ``(buffers)``.
    """
    require_one_state(model)
    runtime = runtime_of(model)
    runtime.follow_changes()
    writes = ranks_of(runtime).rank == 0
    for unit in runtime.units:
        tensors: dict[str, torch.Tensor | None] = {}
        for lane in unit.lanes:
            full = None
            mine = lane.shard.to(runtime.mesh.device)
            if runtime.mesh.rank == 0:
                full = torch.empty(lane.numel, dtype=mine.dtype, device=mine.device)
            if lane.mesh.replica_group.rank == 0:  # other replicas hold the same values
                runtime.mesh.announce(f"gather of unit {unit.name} to rank 0")
                lane.mesh.shard_group.gather(mine, full).wait()
            full = None if full is None else full.cpu()
            for param in unit.params_of(lane):
                start, numel = param.meta.placement.start, param.meta.placement.numel
                view = None if full is None else full[start : start + numel].view(param.meta.block_shape)
                if view is not None and isinstance(param, ParallelParam):
                    view = param.whole_on_first(view)
                tensors[param.meta.name] = view if writes else None
        yield unit.name, tensors
    yield "(ignored)", {name: (p.detach().cpu() if writes else None) for name, p in left_out(model).items()}
    yield "(buffers)", {name: (b.cpu() if writes else None) for name, b in persistent_buffers(model)}


@dataclass(frozen=True)
class LocalTensor:
    """This rank's part of a tensor of a model's saved state.

    Attributes:
        name: First name of the parameter, or the name of the buffer.
        aliases: The parameter's other names, when it is tied.
        shape: Full shape.
        start: First element that this rank holds, in the flattened full tensor.
        tensor: This rank's elements, 1-D, possibly none: a view of ``home``, or a copy where that is not contiguous.
        home: The tensor that training uses.
        replica: Index of this copy among the copies of these elements.
        replicas: Number of ranks that hold a copy.
        param: The Parameter that an optimizer steps; None for a buffer.
        block: If tensor parallelism divides the parameter, the block of it whose elements ``start`` counts.
    """

    name: str
    aliases: tuple[str, ...]
    shape: tuple[int, ...]
    start: int
    tensor: torch.Tensor
    home: torch.Tensor
    replica: int
    replicas: int
    param: nn.Parameter | None
    block: Block | None = None

    @property
    def is_first(self) -> bool:
        """True for the first copy of the tensor's first element, if this rank has elements."""
        return self.start == 0 and self.replica == 0 and (self.block is None or self.block.index == 0)

    @property
    def is_frozen(self) -> bool:
        """True for a parameter that does not train."""
        return self.param is not None and not self.param.requires_grad


def local_tensors(model: nn.Module) -> list[LocalTensor]:
    """Return this rank's part of the model's saved state, in the same order on every rank; no communication.

    Sharded parameters unit by unit, then ignored parameters, then persistent buffers.
    """
    runtime = runtime_of(model)
    runtime.guard_shards(on=False)  # still on after a forward that was interrupted
    runtime.follow_changes()
    found, ranks, divided = list[LocalTensor](), ranks_of(runtime), _divided(runtime)
    blocks = SoloComm(ranks.device) if divided is None else divided.parallel.comm
    for _, param in runtime.all_params():
        meta, copies, shard = param.meta, param.lane.mesh.replica_group, param.sharded
        names = (meta.name, meta.aliases, meta.global_shape, meta.element_range[0])
        rank, size = copies.rank, copies.size
        if meta.block is None:  # the ranks that divide others have copies of it
            rank, size = blocks.rank * size + rank, blocks.size * size
        found.append(LocalTensor(*names, rows_of(shard).reshape(-1), shard, rank, size, shard, meta.block))
    rank, size = ranks.rank, ranks.size
    ignored = [(name, param, param) for name, param in left_out(model).items()]
    for name, tensor, param in [*ignored, *((name, buffer, None) for name, buffer in persistent_buffers(model))]:
        # The memory of lazily conjugated tensors holds other values.
        flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
        found.append(LocalTensor(name, (), tuple(tensor.shape), 0, flat, tensor, rank, size, param))
    return found


def require_one_state(model: nn.Module) -> None:
    """Refuse to save or load a model in which groups of ranks hold parameters of their own.

    Raises:
        ShardingError: There are such parameters.
    """
    runtime = runtime_of(model)
    own = [param.meta.name for _, param in runtime.all_params() if param.lane.mesh.size < runtime.mesh.size]
    if own:
        raise ShardingError(
            f"{own[0]} and {len(own) - 1} other parameters are sharded over some of the model's {runtime.mesh.size} "
            "ranks only (another mesh or process_group). Each group of ranks holds its own values, so what all ranks "
            "save together, or rank 0 alone, would have one group's. Save a full state dict on each rank, in a file "
            "of its own. Use StateDictType.FULL_STATE_DICT, or model.state_dict() inside `with unsharded(model):`."
        )


def ranks_of(runtime: Runtime) -> Mesh:
    """Return all ranks that hold parts of a model: those that share shards and, if it is tensor parallel, blocks."""
    divided = _divided(runtime)
    return everyone(runtime.mesh, None if divided is None else divided.parallel)


def divided_by(model: nn.Module) -> int | None:
    """Return the number of ranks that divide parameters of a tensor parallel model; None of any other; any rank."""
    divided = _divided(runtime_of(model))
    return None if divided is None or divided.parallel.comm.size == 1 else divided.parallel.comm.size


def _divided(runtime: Runtime) -> ParallelParam | None:
    return next((param for _, param in runtime.all_params() if isinstance(param, ParallelParam)), None)


def require_undivided(model: nn.Module, what: str) -> None:
    """Refuse what is not there for a model that is tensor parallel; any rank.

    Raises:
        ShardingError: It is.
    """
    found = _divided(runtime_of(model))
    if found is not None:
        raise ShardingError(
            f"{what} is not supported for a model that is tensor parallel, as {found.meta.name} "
            f"{found.meta.global_shape} is, over {found.parallel.comm.size} ranks. Use fullshard.Checkpoints for "
            "checkpoints, fullshard.save or fullshard.full_state_dict for the full model, and "
            "model.load_state_dict(full tensors)."
        )


def left_out(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return parameters that are not sharded, by their first name.

    Raises:
        ShardingError: One is a DTensor.
    """
    sharded = {id(m._parameters.get(key)) for _, param in runtime_of(model).all_params() for m, key in param.slots}
    found = {plain_name(name): param for name, param in model.named_parameters() if id(param) not in sharded}
    for name, param in found.items():
        if is_distributed(param):
            raise _not_whole(name, param)
    return found


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and value of each buffer in the model's saved state; any rank.

    Of a DTensor of which every rank has all, as ``parallelize_module`` makes them, it is the plain tensor.

    Raises:
        ShardingError: A buffer is a DTensor of which ranks have parts.
    """
    for path, module in model.named_modules():
        for key, buffer in module._buffers.items():
            if buffer is not None and key not in module._non_persistent_buffers_set:
                name = plain_name(f"{path}.{key}" if path else key)
                yield name, _whole(name, buffer) if is_distributed(buffer) else buffer


def _whole(name: str, dtensor: Any) -> torch.Tensor:
    if all(place.is_replicate() for place in dtensor.placements):
        return dtensor.detach().to_local()
    raise _not_whole(name, dtensor)


def _not_whole(name: str, dtensor: Any) -> ShardingError:
    return ShardingError(
        f"{name} {tuple(dtensor.shape)} is a DTensor placed {tuple(map(str, dtensor.placements))} that fullshard does "
        "not shard: it is neither saved nor averaged as one that each rank has. Leave a parameter out of "
        "ignored_params; register a buffer with persistent=False, or make it a plain tensor."
    )


@on_rows
def load_full_state(
    model: nn.Module, state: Mapping[str, torch.Tensor], *, strict: bool, optional: Collection[str] = ()
) -> tuple[list[str], list[str]]:
    """Copy this rank's rows of full tensors into the shards, and full buffers; every rank, with equal tensors.

    Args:
        model: The sharded model.
        state: Full tensors by name, on any device, of any floating dtype; a tied parameter under any of its names.
        strict: Whether names must match exactly.
        optional: Names that may be missing in any case; those tensors keep their values.

    Returns:
        Names missing in ``state``, and names unknown to the model.

    Raises:
        ShardingError: Names do not match (if strict), or a shape does not; nothing has been copied.
    """
    targets, missing, used = _targets(model, state)
    unexpected = sorted(set(state) - used)
    required = [name for name in missing if name not in optional]
    problems = [f"it lacks {', '.join(required)}"] if required else []
    problems += [f"the model has no {', '.join(unexpected)}"] if unexpected else []
    problems = problems if strict else []
    for name, (_, shape) in targets.items():
        if tuple(state[name].shape) != shape:
            problems.append(f"{name} has shape {tuple(state[name].shape)} where the model has {shape}")
    if problems:
        raise ShardingError(f"This state dict does not fit {type(model).__name__}: {'; '.join(problems)}.")
    with torch.no_grad():
        for name, (target, _) in targets.items():
            if isinstance(target, ShardedParam):
                rows = run_of(state[name], target.meta.block, *target.meta.element_range)
                target.sharded.copy_(rows.view(target.meta.local_shape))
            else:
                target.copy_(state[name])
    return missing, unexpected


def _targets(
    model: nn.Module, state: Mapping[str, torch.Tensor]
) -> tuple[dict[str, tuple[ShardedParam | torch.Tensor, tuple[int, ...]]], list[str], set[str]]:
    """Return the target and required shape of each name in ``state``, the missing names, and the known names."""
    runtime = runtime_of(model)
    runtime.follow_changes()
    targets: dict[str, tuple[ShardedParam | torch.Tensor, tuple[int, ...]]] = {}
    missing: list[str] = []
    known: set[str] = set()
    for _, param in runtime.all_params():
        names = (param.meta.name, *param.meta.aliases)
        known.update(names)
        given = next((name for name in names if name in state), None)
        if given is None:
            missing.append(param.meta.name)
        else:
            targets[given] = param, param.meta.global_shape
    for name, tensor in [*left_out(model).items(), *persistent_buffers(model)]:
        known.add(name)
        if name in state:
            targets[name] = tensor, tuple(tensor.shape)
        else:
            missing.append(name)
    return targets, missing, known & set(state)
