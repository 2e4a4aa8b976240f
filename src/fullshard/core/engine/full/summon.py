"""Full tensors in the dtype of the shards: gathered one lane at a time, or registered on the modules temporarily."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from fullshard.core.comm import settle
from fullshard.core.engine.extension.extension_lane import ExtensionParam
from fullshard.core.engine.full.state import ranks_of, require_undivided
from fullshard.core.engine.parallel.parallel_lane import ParallelParam
from fullshard.core.engine.registry import home_of, runtime_of
from fullshard.core.engine.step.lane import Lane
from fullshard.core.engine.step.param import ShardedParam
from fullshard.core.engine.step.runtime import Runtime
from fullshard.core.engine.step.unit import Summoned, Unit
from fullshard.core.layout import ShardMeta
from fullshard.core.layout.names import plain_name
from fullshard.core.shards import on_rows, rows_of
from fullshard.core.torch_private import in_backward
from fullshard.errors import ShardingError


def gathered(
    model: nn.Module,
    tensors: Mapping[str, torch.Tensor],
    wanted: Mapping[str, torch.dtype],
    *,
    rank0_only: bool = False,
) -> Iterator[dict[str, torch.Tensor]]:
    """Gather tensors that are sharded like the parameters; every rank iterates to the end.

    One step is one lane, on the device of the collectives: nothing else is held.

    Args:
        model: A sharded model.
        tensors: This rank's part of each tensor, by the parameter's first name: a shard, a gradient or an optimizer
            state, in the shard's shape. A missing part counts as zeros.
        wanted: The dtype of each tensor to gather, by the same names; the same on every rank.
        rank0_only: Whether only rank 0 receives them.

    Yields:
        The full tensors by name, mostly views of one buffer; an empty dict on other ranks with ``rank0_only``.

    Raises:
        ShardingError: Only rank 0 has the full parameters at present.
    """
    if not rank0_only:
        require_undivided(model, "Gathering full tensors on each rank at once (FULL_STATE_DICT)")
    runtime = runtime_of(model)
    writes = not rank0_only or ranks_of(runtime).rank == 0
    for unit in runtime.units:
        for lane in unit.lanes:
            members = [param for param in unit.params if param.lane is lane and param.meta.name in wanted]
            if members and unit.summoned is not None:
                unit.summoned.require_here()
            for dtype in dict.fromkeys(wanted[param.meta.name] for param in members):
                alike = [param for param in members if wanted[param.meta.name] == dtype]
                runtime.mesh.announce(f"gather of unit {unit.name}")
                full = _gather(lane, alike, tensors, dtype, rank0_only=rank0_only)
                here = full is not None and (runtime.mesh.rank == 0 or not rank0_only)  # each group has a rank 0
                parts = {param.meta.name: _part(full, param) for param in alike} if full is not None and here else {}
                yield {name: part for name, part in parts.items() if part is not None and writes}


def _gather(
    lane: Lane,
    members: Iterable[ShardedParam],
    tensors: Mapping[str, torch.Tensor],
    dtype: torch.dtype,
    *,
    rank0_only: bool,
) -> torch.Tensor | None:
    """Gather one lane, (numel,), from each rank's part of ``members``."""
    comm = lane.mesh.shard_group
    if rank0_only and lane.mesh.replica_group.rank > 0:  # another replica sends the same values
        return None
    low, high = lane.layout.shard_bounds(comm.rank)
    full = torch.empty(lane.numel if not rank0_only or comm.rank == 0 else 0, dtype=dtype, device=comm.device)
    mine = torch.empty(high - low, dtype=dtype, device=comm.device) if rank0_only else full[low:high]
    mine.zero_()
    with torch.no_grad():
        for param in members:
            if param.has_rows and param.meta.name in tensors:
                param.local_view(mine).copy_(rows_of(tensors[param.meta.name]))
    target = full if comm.rank == 0 else None
    work = comm.gather(mine, target) if rank0_only else comm.all_gather(full, mine)
    work.wait()
    settle(work)  # other ranks have read their part: the caller may write to it
    return full if full.numel() else None


def _part(full: torch.Tensor, param: ShardedParam) -> torch.Tensor | None:
    """Return the full tensor, which of a divided parameter the first rank of those that divide it has; else None."""
    start = param.meta.placement.start
    block = full[start : start + param.numel].view(param.meta.block_shape)
    return param.whole_on_first(block) if isinstance(param, ParallelParam) else block


@dataclass(frozen=True)
class StateEntry:
    """One name of a module's saved state.

    Attributes:
        name: In the ``state_dict()`` of the module without wrappers.
        tensor: The parameter or buffer that is registered on the module now.
        meta: Place of ``tensor`` in the full tensor; None if it is the full one.
        is_full: True if it is the full tensor of a sharded parameter, registered temporarily.
    """

    name: str
    tensor: torch.Tensor
    meta: ShardMeta | None
    is_full: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the full tensor."""
        return tuple(self.tensor.shape) if self.meta is None else self.meta.global_shape


def state_entries(module: nn.Module) -> list[StateEntry]:
    """Return parameters and persistent buffers of a module under every name, as ``state_dict()`` has them.

    Raises:
        ShardingError: The module is not part of a sharded model, or the model was changed in a way that cannot be
            followed.
    """
    runtime = home_of(module)
    runtime.check_tree()  # the entries' places have the names of now
    sharded = {(id(m), key): p for _, p in runtime.all_params() for m, key in p.slots}
    entries = []
    for path, owner in module.named_modules(remove_duplicate=False):
        kept = {key: b for key, b in owner._buffers.items() if key not in owner._non_persistent_buffers_set}
        for key, tensor in [*owner._parameters.items(), *kept.items()]:
            if tensor is not None:
                name = plain_name(f"{path}.{key}" if path else key)
                param = sharded.get((id(owner), key))
                is_full = param is not None and param.sharded is not tensor
                entries.append(StateEntry(name, tensor, None if param is None or is_full else param.meta, is_full))
    return entries


@contextmanager
def summoned_parameters(
    model: nn.Module,
    modules: Iterable[nn.Module],
    *,
    writeback: bool = True,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
) -> Iterator[None]:
    """Register full parameters, in the shards' dtype, on the units of some modules; all ranks enter it together.

    Inside, such a unit is a plain module with plain Parameters: its forward casts and gathers nothing, gradients stay
    in the Parameters. Memory: the full parameters of these units.

    Args:
        model: A sharded model.
        modules: The units of these modules show full parameters.
        writeback: Whether each rank copies its rows of the Parameters into its shards at the end.
        rank0_only: Whether only rank 0 gets full parameters; other ranks keep their shards.
        offload_to_cpu: Whether the full parameters are in host memory.
        with_grads: Whether ``.grad`` is the full gradient, and written back too.

    Raises:
        ShardingError: During forward or backward, or if full parameters are shown already.
    """
    runtime = runtime_of(model)
    chosen = {id(module) for module in modules}
    units = [unit for unit in runtime.units if any(id(module) in chosen for module in unit.modules)]
    _check(runtime, units)
    runtime.forward_event()
    runtime.follow_changes(units)
    here = runtime.mesh.rank == 0 or not rank0_only
    device = torch.device("cpu") if offload_to_cpu else None
    params = [param for unit in units for param in unit.params]
    shown = _Shown(runtime, params, device, rank0_only=rank0_only)
    if with_grads:
        shown.take_gradients()
    with ExitStack() as stack:
        stack.callback(shown.take_back, writeback=writeback and here, with_grads=with_grads)
        for unit in units:
            unit.summoned = Summoned(here=here)
            stack.callback(setattr, unit, "summoned", None)
        shown.show()
        yield


def _check(runtime: Runtime, units: Iterable[Unit]) -> None:
    if in_backward() or runtime.open_calls:
        raise ShardingError(
            "Full parameters cannot be shown during forward or backward, which gather and free units. Enter "
            "the context before or after."
        )
    for unit in units:
        packed = [p.meta.name for p in unit.params if isinstance(p, ExtensionParam) and p.lane.extension.packed]
        if packed:
            raise ShardingError(
                f"{packed[0]} is made of several tensors and sharded as their bytes, with which no module computes. "
                "Show it as its class makes it, with unsharded(model)."
            )
        if unit.summoned is not None or unit.stays_unsharded:
            raise ShardingError(
                f"The full parameters of unit {unit.name} are shown already: leave that context before you enter "
                "another one, or use it."
            )


class _Shown:
    """Full Parameters that temporarily replace the shards on the modules."""

    def __init__(
        self, runtime: Runtime, params: list[ShardedParam], device: torch.device | None, *, rank0_only: bool
    ) -> None:
        """Gather ``params`` without showing them yet."""
        self.runtime = runtime
        self.device = device
        self.rank0_only = rank0_only
        self.by_name = {param.meta.name: param for param in params}
        wanted = {name: param.sharded.dtype for name, param in self.by_name.items()}
        held = {name: rows_of(param.sharded) for name, param in self.by_name.items()}
        self.full: dict[str, nn.Parameter] = {}
        self.before = {name: rows.clone() for name, rows in held.items()}
        for name, tensor in self._gathered(held, wanted):
            # .data: its own version counter, as Parameters of a plain module have.
            self.full[name] = nn.Parameter(tensor.data, requires_grad=self.by_name[name].sharded.requires_grad)

    def _gathered(
        self, held: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.dtype]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        model = self.runtime.root.modules[0]
        for lane in gathered(model, held, wanted, rank0_only=self.rank0_only):
            for name, tensor in lane.items():
                # A copy on the CPU must not keep the lane alive, nor be a view of it.
                yield name, tensor if self.device is None else tensor.to(self.device)

    def take_gradients(self) -> None:
        """Gather the gradients that any rank has."""
        held = {name: p.sharded.grad for name, p in self.by_name.items() if p.sharded.grad is not None}
        by_rank = self.runtime.mesh.all_gather_object({name: gradient.dtype for name, gradient in held.items()})
        wanted = {name: dtype for of_rank in by_rank for name, dtype in of_rank.items()}
        ordered = {name: wanted[name] for name in self.by_name if name in wanted}
        for name, gradient in self._gathered(held, ordered):
            self.full[name].grad_dtype = gradient.dtype
            self.full[name].grad = gradient

    def show(self) -> None:
        """Register the full Parameters in every slot."""
        for name, full in self.full.items():
            for module, key in self.by_name[name].slots:
                module._parameters[key] = full

    def take_back(self, *, writeback: bool, with_grads: bool) -> None:
        """Register the shards again, and copy this rank's rows of the full Parameters into them if ``writeback``.

        Raises:
            ShardingError: A parameter was replaced or changed its shape, or its shard was changed; the shards are
                registered again.
        """
        replaced = []
        for name, full in self.full.items():
            param = self.by_name[name]
            kept = all(module._parameters.get(key) is full for module, key in param.slots)
            if not kept or tuple(full.shape) != param.meta.global_shape:
                replaced.append(name)
            param.to_sharded()
        if writeback:
            self._refuse_changed_shards()
        if writeback and replaced:
            raise ShardingError(
                f"{', '.join(replaced)}: replaced by another Parameter, or given another shape, while full "
                "parameters were shown. Change values in place (param.copy_, param.data.copy_) instead."
            )
        for name, full in self.full.items() if writeback else ():
            self._write(self.by_name[name], full, with_grads=with_grads)

    def _refuse_changed_shards(self) -> None:
        """Refuse to overwrite shards that an optimizer has stepped meanwhile: the lost step would go unnoticed."""
        changed = [
            name
            for name, before in self.before.items()
            if not torch.allclose(before, rows_of(self.by_name[name].sharded), rtol=0.0, atol=0.0, equal_nan=True)
        ]
        if changed:
            more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
            raise ShardingError(
                f"{', '.join(changed[:3])}{more}: the shards were changed (by optimizer.step(), or a load) while "
                "full parameters were shown, and would be overwritten by them. Step outside of the context, or enter "
                "it with writeback=False."
            )

    @on_rows
    def _write(self, param: ShardedParam, full: nn.Parameter, *, with_grads: bool) -> None:
        rows = _rows(param, full.detach())
        # Only if it differs: writing a shard makes a pending backward of its unit raise an error.
        if not torch.equal(rows.to(param.sharded.device), param.sharded):
            with torch.no_grad():
                param.sharded.copy_(rows)
        if with_grads:
            dtype = param.lane.dtypes.grad or param.sharded.dtype
            gradient = None if full.grad is None else _rows(param, full.grad).to(param.sharded.device, dtype, copy=True)
            param.sharded.grad = gradient


def _rows(param: ShardedParam, full: torch.Tensor) -> torch.Tensor:
    start, stop = param.meta.element_range
    return full.reshape(-1)[start:stop].view(param.meta.local_shape)
