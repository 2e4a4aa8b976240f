"""Streaming of a full model to rank 0 in runs of elements, with bounded memory.

Buffers that follow the data (running means of BatchNorm) are compared between ranks and made equal.
"""

from __future__ import annotations

import warnings
import zlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import nn

from fullshard.core.comm import Comm, SoloComm
from fullshard.core.engine.full.state import left_out, persistent_buffers, ranks_of, require_one_state
from fullshard.core.engine.parallel.parallel_lane import ParallelLane
from fullshard.core.engine.registry import runtime_of
from fullshard.core.engine.step.lane import Lane
from fullshard.core.engine.step.runtime import Runtime
from fullshard.core.engine.step.unit import Unit
from fullshard.core.layout import ShardMeta, interleaved
from fullshard.core.layout.names import plain_name


def warn_if_buffers_differ(runtime: Runtime) -> None:
    """Warn on every rank if ranks hold different values of a persistent buffer. Every rank calls it.

    Each rank evaluates with its own buffers, and rank 0's are saved.
    """
    buffers = [pair for top in runtime.root.modules for pair in persistent_buffers(top) if not pair[1].is_meta]
    if not buffers or runtime.mesh.size == 1:
        return
    # Of bytes: some dtypes, such as those of 8 bits, cannot be summed.
    flat = {name: buffer.detach().reshape(-1).cpu().view(torch.uint8) for name, buffer in buffers}
    sums = {name: zlib.crc32(values.numpy().tobytes()) for name, values in flat.items()}
    by_rank = runtime.mesh.all_gather_object(sums)
    differing = [name for name in sums if any(of_rank.get(name) != sums[name] for of_rank in by_rank)]
    if differing:
        warnings.warn(
            f"{len(differing)} buffers, such as {differing[0]}, differ between ranks: they follow each rank's own "
            "data, so ranks evaluate differently, and rank 0's are saved. Call fullshard.broadcast_buffers(model) "
            "before, or use layers with common statistics (SyncBatchNorm).",
            stacklevel=2,
        )


def broadcast_buffers(model: nn.Module) -> None:
    """Set the model's persistent buffers to rank 0's values on every rank. Every rank calls it.

    Raises:
        ShardingError: The model is not sharded.
    """
    mesh = runtime_of(model).mesh
    if mesh.size == 1:
        return
    for name, buffer in persistent_buffers(model):
        mesh.announce(f"broadcast of buffer {name}")
        sent = buffer.detach().to(mesh.device).contiguous()
        mesh.broadcast(sent)
        buffer.detach().copy_(sent)


def average_ignored_gradients(model: nn.Module) -> None:
    """Average the gradients of parameters left out of sharding over ranks; every rank calls it after backward.

    ``fully_shard`` leaves ``ignored_params`` alone: without this call each rank would train its own. A parameter
    without a gradient on this rank counts as zeros where another rank has one.

    Raises:
        ShardingError: The model is not sharded.
    """
    mesh = runtime_of(model).mesh
    params = {name: param for name, param in left_out(model).items() if param.requires_grad}
    have = torch.tensor([float(param.grad is not None) for param in params.values()], device=mesh.device)
    mesh.announce("which ignored parameters got a gradient")
    mesh.all_reduce(have).wait()
    for (name, param), ranks in zip(params.items(), have.tolist(), strict=True):
        if ranks:
            gradient = torch.zeros_like(param) if param.grad is None else param.grad
            mean = gradient.detach().to(mesh.device).contiguous()
            mesh.announce(f"mean gradient of {name}")
            mesh.all_reduce(mean).wait()
            param.grad = gradient.copy_(mean.div_(mesh.size))


Run = tuple[str, int, torch.Tensor]
"""A parameter's or buffer's first name, the first element in the flattened tensor, and the elements, (run,), on CPU."""

RUNS_BYTES = 64_000_000
"""Additional memory that streaming a model takes on rank 0."""


@dataclass(frozen=True)
class SavedTensor:
    """A tensor of a model's saved state.

    Attributes:
        names: Its names in the model's ``state_dict()``; several when it is tied.
        shape: Full shape.
        dtype: Dtype of the shards.
        is_parameter: Whether it is a parameter, else a persistent buffer.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_parameter: bool


def saved_tensors(model: nn.Module) -> list[SavedTensor]:
    """Return the tensors of the model's saved state in ``state_dict()`` order; any rank, no communication.

    A buffer that several modules share has one entry for each of them, because each loads it.
    """
    sharded = {id(one): param for _, param in runtime_of(model).all_params() for one in (param.sharded, param.full)}
    tensors: dict[object, torch.Tensor] = {}
    names: dict[object, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        kept = {key: b for key, b in module._buffers.items() if key not in module._non_persistent_buffers_set}
        of_module = [(key, id(parameter), parameter) for key, parameter in module._parameters.items()]
        of_module += [(key, (id(module), key), buffer) for key, buffer in kept.items()]
        for key, identity, tensor in of_module:
            if tensor is not None:
                tensors[identity] = tensor
                names.setdefault(identity, []).append(plain_name(f"{path}.{key}" if path else key))
    found = []
    for identity, tensor in tensors.items():
        param = sharded.get(id(tensor))
        shape, dtype = (tensor.shape, tensor.dtype) if param is None else (param.meta.global_shape, param.sharded.dtype)
        is_parameter = not isinstance(identity, tuple)
        found.append(SavedTensor(tuple(names[identity]), tuple(shape), dtype, is_parameter))
    return found


def full_runs(
    model: nn.Module, limit_bytes: int = RUNS_BYTES, *, ahead: int = 0, names: frozenset[str] | None = None
) -> Iterator[list[Run]]:
    """Stream the full model to rank 0 in runs of elements; every rank iterates, to the end or to the same step.

    A step is at most one gather. Steps take turns in ``ahead + 1`` buffers, so rank 0 never holds more than
    ``limit_bytes`` in addition to its shards, whatever the size of a unit or table. What rank 0 holds already is not
    copied on CPU: such runs are views, to be read before the model changes.

    Args:
        model: The sharded model.
        limit_bytes: Most bytes of all buffers.
        ahead: Number of previous steps whose runs may still be in use when the next step is requested.
        names: First names of the tensors to stream, the same on every rank; tensors in the same lanes are included.
            None: all.

    Yields:
        On rank 0 the step's runs, each element once over all steps; elsewhere an empty list. Sharded parameters unit by
        unit, in the shard's dtype, then ignored parameters, then persistent buffers.
    """
    runtime = _ready(model)
    warn_if_buffers_differ(runtime)
    host = _host(runtime, limit_bytes, ahead + 1)
    for unit in runtime.units:
        yield from _unit_runs(runtime, unit, host, names)
    others = [*left_out(model).items(), *persistent_buffers(model)]
    yield from _other_runs(runtime, [pair for pair in others if names is None or pair[0] in names], host)


def full_tensors(model: nn.Module) -> Iterator[tuple[str, dict[str, torch.Tensor | None]]]:
    """Stream the full model to rank 0, one unit at a time; every rank iterates to the end.

    Yields:
        The unit's name, and for each of its parameters the first name and, on rank 0, the full tensor on CPU in the
        shard's dtype; None on other ranks. Ignored parameters and persistent buffers come last, under the names
        ``(ignored)`` and ``(buffers)``.
    """
    runtime = _ready(model)
    host = _host(runtime, RUNS_BYTES, 1)
    for unit in runtime.units:
        specs = {param.meta.name: (param.meta.global_shape, param.sharded.dtype) for param in unit.params}
        yield unit.name, _joined(runtime, specs, _unit_runs(runtime, unit, host, None))
    for title, tensors in (("(ignored)", left_out(model)), ("(buffers)", dict(persistent_buffers(model)))):
        specs = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
        yield title, _joined(runtime, specs, _other_runs(runtime, tensors.items(), host))


def full_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the full model as a plain state dict on rank 0, for ``torch.save``; every rank calls it.

    Rank 0 needs memory for the full model and another 64 MB. To write a model, ``save`` needs only the 64 MB.

    Args:
        model: The sharded model.

    Returns:
        On rank 0 every name of the unsharded model's ``state_dict()`` with its tensor on CPU, full shape, in the dtype
        of the shards; tied names share one tensor. ``{}`` on other ranks.

    Raises:
        ShardingError: The model is not sharded.
    """
    saved = saved_tensors(model)
    specs = {one.names[0]: (one.shape, one.dtype) for one in saved}
    full = _joined(runtime_of(model), specs, full_runs(model))
    return {name: tensor for one in saved for name in one.names if (tensor := full[one.names[0]]) is not None}


def _ready(model: nn.Module) -> Runtime:
    """Return the runtime of a model that is about to be streamed."""
    require_one_state(model)
    runtime = runtime_of(model)
    runtime.follow_changes()
    return runtime


def _joined(
    runtime: Runtime, specs: Mapping[str, tuple[tuple[int, ...], torch.dtype]], steps: Iterable[list[Run]]
) -> dict[str, torch.Tensor | None]:
    """Return tensors of the given shapes and dtypes put together from runs, by name; None except on rank 0."""
    writes = ranks_of(runtime).rank == 0
    full = {name: torch.empty(shape, dtype=dtype) if writes else None for name, (shape, dtype) in specs.items()}
    for runs in steps:
        for name, start, flat in runs:
            whole = full[name]
            assert whole is not None
            whole.view(-1)[start : start + flat.numel()].copy_(flat)
    return full


class _Host:
    """Host memory of rank 0 that steps use in turn.

    One block, kept to the end: the C library returns a block of this size to the system, whereas new ones for each step
    would leave holes that the process keeps.
    """

    def __init__(self, step_bytes: int, count: int) -> None:
        """Provide ``count`` parts of ``step_bytes``, a multiple of 8; memory is allocated at first use."""
        self.step_bytes = step_bytes
        self._count = count
        self._taken = 0
        self._block: torch.Tensor | None = None

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return memory for one step, (numel,), reusing the oldest."""
        if self._block is None:
            self._block = torch.empty(self._count * self.step_bytes, dtype=torch.uint8)
        start = self._taken % self._count * self.step_bytes
        self._taken += 1
        return self._block[start : start + numel * dtype.itemsize].view(dtype)

    def flat(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the elements of one step on the CPU, (numel,): a view if contiguous there, else a copy."""
        if tensor.device.type == "cpu" and tensor.is_contiguous():
            return tensor.view(-1)
        copy = self.take(tensor.numel(), tensor.dtype)
        copy.view(tensor.shape).copy_(tensor)
        return copy


def _host(runtime: Runtime, limit_bytes: int, count: int) -> _Host:
    """Return memory of ``limit_bytes`` for ``count`` steps: at least eight bytes, the largest element, of each rank."""
    return _Host(8 * max(limit_bytes // count // 8, ranks_of(runtime).size), count)


def _unit_runs(runtime: Runtime, unit: Unit, host: _Host, names: frozenset[str] | None) -> Iterator[list[Run]]:
    """Yield the lanes of a unit that have one of ``names``; None: all."""
    for lane in unit.lanes:
        if names is None or not names.isdisjoint(param.meta.name for param in unit.params_of(lane)):
            yield from _lane_runs(runtime, unit, lane, host)


def _other_runs(runtime: Runtime, tensors: Iterable[tuple[str, torch.Tensor]], host: _Host) -> Iterator[list[Run]]:
    """Yield tensors that every rank has."""
    writes = ranks_of(runtime).rank == 0
    for name, tensor in tensors:
        for start, piece in _pieces(tensor.detach(), 0, host.step_bytes // tensor.dtype.itemsize):
            yield [(name, start, host.flat(piece))] if writes else []


def _lane_runs(runtime: Runtime, unit: Unit, lane: Lane, host: _Host) -> Iterator[list[Run]]:
    """Yield one lane step by step, with equally many elements of every rank's shard."""
    metas = {param.place: param.meta for param in unit.params if param.lane is lane}
    size = lane.mesh.shard_group.size
    blocks = lane.blocks if isinstance(lane, ParallelLane) else SoloComm(runtime.mesh.device)
    step = host.step_bytes // (lane.shard.dtype.itemsize * size * blocks.size)
    writes = ranks_of(runtime).rank == 0
    for low in range(0, lane.layout.shard_numel, step):
        runtime.mesh.announce(f"gather of unit {unit.name} to rank 0")
        part = _gather(runtime, lane, lane.shard[low : low + step], host)
        part = _of_all_blocks(blocks, part) if blocks.size > 1 else part
        runs: list[Run] = []
        for rank, slices in enumerate(() if part is None or not writes else part.view(blocks.size, size, -1).unbind(1)):
            for place, first, inside in _split(lane, lane.layout.shard_bounds(rank)[0] + low, slices.shape[1]):
                runs += _in_full(metas[place], first, slices[:, inside])
        yield runs


def _of_all_blocks(blocks: Comm, part: torch.Tensor | None) -> torch.Tensor | None:
    """Gather each block's elements of one step on the first of the ranks that divide parameters; else None."""
    if part is None:  # not a first rank of those that share a block
        return None
    every = part.new_empty(blocks.size * part.numel()) if blocks.rank == 0 else None
    blocks.announce("gather of blocks to rank 0")
    sent, received = part.to(blocks.device), None if every is None else every.to(blocks.device)
    blocks.gather(sent, received).wait()
    return None if received is None else received.to(part.device)


def _in_full(meta: ShardMeta, first: int, elements: torch.Tensor) -> Iterator[Run]:
    """Yield the runs of the full parameter that elements from ``first`` on are, (blocks, n), the same of each block."""
    block, stop = meta.block, first + elements.shape[1]
    if block is None:  # every rank that divides others has all of it
        yield meta.name, first, elements[0]
        return
    (low, high), stretch = interleaved(meta.global_shape, block, first, stop)
    if low < high:
        together = elements[:, low - first : high - first].reshape(block.count, -1, stretch).transpose(0, 1)
        yield meta.name, low * block.count, together.reshape(-1)
    for start, end in ((first, low), (max(low, high), stop)):
        while start < end:
            here = min(end, (start // stretch + 1) * stretch)
            for index in range(block.count):
                at = (start // stretch * block.count + index) * stretch + start % stretch
                yield meta.name, at, elements[index, start - first : here - first]
            start = here


def _gather(runtime: Runtime, lane: Lane, mine: torch.Tensor, host: _Host) -> torch.Tensor | None:
    """Gather a step's elements of each rank's shard, (ranks * step,), on rank 0's CPU; None on other ranks."""
    device, writes = runtime.mesh.device, runtime.mesh.rank == 0
    if lane.mesh.shard_group.size == 1:
        return host.flat(mine) if writes else None
    if lane.mesh.replica_group.rank > 0:  # another replica sends the same values
        return None
    mine, full = mine.to(device), None
    if writes:
        numel = lane.mesh.shard_group.size * mine.numel()
        full = host.take(numel, mine.dtype) if device.type == "cpu" else mine.new_empty(numel)
    lane.mesh.shard_group.gather(mine, full).wait()
    return None if full is None else host.flat(full)


def _split(lane: Lane, first: int, numel: int) -> Iterator[tuple[int, int, slice]]:
    """Yield which parameters ``numel`` consecutive elements of a lane are, from ``first`` on, without padding.

    Yields:
        The parameter's place in the lane, the first of its elements, and where they are among the elements.
    """
    placements, stop = lane.layout.placements, first + numel
    place = max(0, bisect_right(placements, first, key=lambda placement: placement.start) - 1)
    while place < len(placements) and placements[place].start < stop:
        placement = placements[place]
        low, high = max(first, placement.start), min(stop, placement.stop)
        if low < high:
            yield place, low - placement.start, slice(low - first, high - first)
        place += 1


def _pieces(tensor: torch.Tensor, start: int, most: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield parts of a tensor of at most ``most`` elements, each with the index of its first; equal for equal shapes.

    Parts are rows, not slices of the flattened tensor: flattening a non-contiguous tensor copies all of it.
    """
    if tensor.numel() <= most:
        yield start, tensor
        return
    row = prod(tensor.shape[1:])
    rows = max(1, most // row)
    for index in range(0, tensor.shape[0], rows):
        if row > most:
            yield from _pieces(tensor[index], start + index * row, most)
        else:
            yield start + index * row, tensor[index : index + rows]
