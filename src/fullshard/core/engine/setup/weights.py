"""Weights from a source into the shards, each rank its own elements: no full parameter is ever in memory.

Weights are quantised while they are read: each rank reads only the blocks that its shards hold part of.
The largest absolute value of every block of one weight (1/16 of its bytes in float32) is then summed over ranks, each
block from the rank that made it, many layers at a time, and every rank packs its own part of the scales. So double
quantisation subtracts the mean that the unsharded weight has, to the last bit: the mean of partial means would be
another number.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from math import prod
from operator import mul
from typing import Protocol

import torch
from torch import nn

from fullshard.core.comm import Comm, Mesh, together_in_background
from fullshard.core.engine.full.state import LocalTensor, left_out, local_tensors, ranks_of
from fullshard.core.engine.registry import runtime_of
from fullshard.core.engine.step.unit import Keep
from fullshard.core.layout import boxes, boxes_in_order, common, place_in_order
from fullshard.core.layout.names import plain_name
from fullshard.core.layout.sharded import ShardMeta
from fullshard.core.policy import Quantize
from fullshard.core.quantized import QuantizedLinear
from fullshard.core.shards import rows_of


@dataclass
class WantedTensor:
    """A tensor of a model's saved state.

    Attributes:
        shape: Full shape.
        dtype: Dtype of the model's tensor.
        required: Whether the source must have it; otherwise the model's value stays if the source has none.
        buffer: True if it is a buffer.
        names: Its names in the model; several when it is tied.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    required: bool
    buffer: bool
    names: list[str] = field(default_factory=list)


class WeightReader(Protocol):
    """Weights that fit a model, on one rank."""

    def has(self, name: str) -> bool:
        """Return whether there is a tensor of this name."""
        ...

    def read(self, name: str, start: int, out: torch.Tensor) -> None:
        """Fill ``out``, (numel,), contiguous, on any device, with a run of the flattened tensor from ``start`` on.

        Raises:
            UserError: It cannot be read.
        """
        ...


class WeightSource(Protocol):
    """Weights of a model by name, such as :class:`fullshard.Pretrained`; every rank has its own source.

    A source may have an attribute ``quantize``, a :class:`fullshard.Quantize`: how the model's frozen linear layers are
    quantised while they are read. The source itself names and reads their weights as they were before.
    """

    def open(self, model: nn.Module, wanted: list[WantedTensor]) -> WeightReader:
        """Check names, shapes and dtypes without reading values; no communication.

        Raises:
            UserError: They do not fit the model, or cannot be read.
        """
        ...


def wanted_tensors(model: nn.Module, left_out: frozenset[nn.Parameter] = frozenset()) -> list[WantedTensor]:
    """Return the saved state of a model: every parameter and persistent buffer with its names; any rank.

    Args:
        model: A model that is sharded, partly sharded or not sharded.
        left_out: Parameters that are not sharded: if a source has none, those with values keep them.
    """
    found: dict[int, WantedTensor] = {}
    for name, tensor, is_buffer in _named_state(model):
        one = found.get(id(tensor))
        if one is None:
            meta = getattr(tensor, "shard_meta", None)
            shape = tuple(tensor.shape) if meta is None else meta.global_shape
            required = tensor.is_meta or tensor not in left_out
            one = found[id(tensor)] = WantedTensor(shape, tensor.dtype, required, is_buffer)
        one.names.append(name)
    return list(found.values())


def quantize_of(source: WeightSource | None) -> Quantize | None:
    """Return how a source's weights are to be quantised, or None."""
    return getattr(source, "quantize", None)


def _named_state(model: nn.Module) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Yield every name of each parameter and persistent buffer, the tensor, and whether it is a buffer.

    A quantised layer has its unquantised weight in place of codes and scales.
    """
    for path, module in model.named_modules(remove_duplicate=False):
        path = plain_name(path)
        prefix = f"{path}." if path else ""
        for key, param in module._parameters.items():
            if param is not None and not (isinstance(module, QuantizedLinear) and key != "bias"):
                yield prefix + key, param, False
        if isinstance(module, QuantizedLinear):
            yield prefix + "weight", module.before, False
        for key, buffer in module._buffers.items():
            if buffer is not None and key not in module._non_persistent_buffers_set:
                yield prefix + key, buffer, True


CHUNK = 1 << 20
"""Weights that are read and quantised at a time, at most; a block if it is larger."""

SHARED = 1 << 22
"""Largest values that are summed over ranks at a time, 16 MiB, at most; a layer's if it has more."""


@dataclass
class QuantisedPart:
    """The blocks of one layer that this rank quantised.

    Attributes:
        layer: The layer.
        first: First block whose largest value this rank contributes; ranks contribute each block once.
        largest: The largest absolute values of those blocks, float32.
    """

    layer: QuantizedLinear
    first: int
    largest: torch.Tensor


def quantised_layers(model: nn.Module) -> Iterator[tuple[str, QuantizedLinear]]:
    """Yield the name of each quantised layer's weight, and the layer, in tree order."""
    for path, module in model.named_modules():
        if isinstance(module, QuantizedLinear):
            yield plain_name(f"{path}.weight" if path else "weight"), module


@dataclass
class _Run:
    """Blocks of one layer, in a row, that are read together.

    Attributes:
        name: Name of the layer's weight.
        layer: The layer.
        low: The first block.
        high: The block after the last one.
    """

    name: str
    layer: QuantizedLinear
    low: int
    high: int

    def weights(self) -> tuple[int, int]:
        """Return the first weight, and how many there are: the weight's last block may be short."""
        shape = self.layer.shape
        block = self.layer.format.block(shape)
        return self.low * block, min(self.high * block, prod(shape)) - self.low * block


def quantise_parts(model: nn.Module, reader: WeightReader, device: torch.device) -> list[QuantisedPart]:
    """Read this rank's weights and quantise them into its shards, on ``device``; without communication.

    Raises:
        UserError: A weight cannot be read.
    """
    layers = [(name, layer) for name, layer in quantised_layers(model) if reader.has(name)]
    runs = [run for name, layer in layers for run in _runs(name, layer)]
    found: dict[str, list[torch.Tensor]] = {name: [] for name, _ in layers}
    # Closed here, also if an error ends the loop: its thread would read on.
    with closing(_read_ahead(runs, reader)) as read:
        for run, values in read:
            found[run.name].append(_quantise(run, values.to(device)))
    return [_part(layer, found[name], device) for name, layer in layers]


def _runs(name: str, layer: QuantizedLinear) -> list[_Run]:
    """Return the runs that this rank's codes of a layer are made of."""
    first, last, _ = _held_blocks(layer)
    step = max(1, CHUNK // layer.format.block(layer.shape))
    return [_Run(name, layer, low, min(low + step, last)) for low in range(first, last, step)]


def _read_ahead(runs: list[_Run], reader: WeightReader) -> Generator[tuple[_Run, torch.Tensor]]:
    """Yield the weights of each run, on the CPU, valid until the next one; a thread reads the next run meanwhile.

    Two runs share two pieces of memory: new pages for each run took longer than reading it.
    """
    if not runs:
        return
    most = max(run.weights()[1] * run.layer.weight_dtype.itemsize for run in runs)
    memory = [torch.empty(most, dtype=torch.uint8, device="cpu") for _ in range(2)]

    def read(index: int) -> torch.Tensor:
        run, dtype = runs[index], runs[index].layer.weight_dtype
        start, count = run.weights()
        values = memory[index % 2][: count * dtype.itemsize].view(dtype)
        reader.read(run.name, start, values)
        return values

    with ThreadPoolExecutor(1) as thread:
        reading = thread.submit(read, 0)
        for index, run in enumerate(runs):
            values = reading.result()
            if index + 1 < len(runs):
                reading = thread.submit(read, index + 1)
            yield run, values


def _quantise(run: _Run, values: torch.Tensor) -> torch.Tensor:
    """Write the codes of a run that this rank holds, and return the largest absolute values of its blocks."""
    layer, codes = run.layer, run.layer.stored[0]
    start, stop = _range(codes)
    made, largest = layer.format.quantise(values, layer.shape)
    low = run.low * _code_bytes(layer)
    here = slice(max(start, low), min(stop, low + made.numel()))
    _flat(codes)[here.start - start : here.stop - start].copy_(made[here.start - low : here.stop - low])
    return largest


def _part(layer: QuantizedLinear, found: list[torch.Tensor], device: torch.device) -> QuantisedPart:
    """Return what this rank quantised of a layer; ``found``: the largest absolute values of its runs."""
    first, _, skipped = _held_blocks(layer)
    largest = torch.cat(found) if found else torch.empty(0, device=device)
    return QuantisedPart(layer, first + skipped, largest[skipped:])


def _held_blocks(layer: QuantizedLinear) -> tuple[int, int, int]:
    """Return the first and past-the-last block that this rank holds codes of, and how many another one brings: 0 or 1.

    A block that begins on the rank before is brought by that rank.
    """
    size = _code_bytes(layer)
    start, stop = _range(layer.stored[0])
    return start // size, -(-stop // size), int(start % size > 0)


def _code_bytes(layer: QuantizedLinear) -> int:
    """Return the bytes of a block's codes."""
    return layer.format.code_bytes(layer.format.block(layer.shape))


def share_scales(parts: list[QuantisedPart]) -> None:
    """Write this rank's part of every layer's scales; every rank of the model calls it with the same layers."""
    batch: list[QuantisedPart] = []
    blocks = 0
    for part in parts:
        more = _blocks(part)
        if batch and (_group(part) is not _group(batch[0]) or blocks + more > SHARED):
            _share(batch)
            batch, blocks = [], 0
        batch.append(part)
        blocks += more
    if batch:
        _share(batch)


def _share(parts: list[QuantisedPart]) -> None:
    """Write the scales of one group's layers, in one collective."""
    group, brought = _group(parts[0]), parts[0].largest
    total = torch.zeros(sum(map(_blocks, parts)), device=brought.device if group is None else group.device)
    each = total.split(list(map(_blocks, parts)))
    for part, values in zip(parts, each, strict=True):
        values[part.first : part.first + part.largest.numel()] = part.largest
    if group is not None and group.size > 1:
        group.announce("scales of quantised weights")
        group.all_reduce(total).wait()
    for part, values in zip(parts, each, strict=True):
        scales = part.layer.stored[1]
        _flat(scales).copy_(part.layer.format.pack(values.to(brought.device), *_range(scales)))


def _group(part: QuantisedPart) -> Comm | None:
    """Return the ranks that share a layer; None: an ignored parameter, complete on each rank."""
    return getattr(part.layer.stored[0], "shard_comm", None)


def _blocks(part: QuantisedPart) -> int:
    """Return the number of blocks of the layer's weight."""
    shape = part.layer.shape
    return -(-shape[0] * shape[1] // part.layer.format.block(shape))


def _range(param: torch.Tensor) -> tuple[int, int]:
    """Return the first and past-the-last element of a parameter that this rank holds."""
    meta: ShardMeta | None = getattr(param, "shard_meta", None)
    return (0, param.numel()) if meta is None else meta.element_range


def _flat(param: torch.Tensor) -> torch.Tensor:
    """Return this rank's elements, (n,), a view."""
    return rows_of(param).reshape(-1)


def open_weights(model: nn.Module, mesh: Mesh, source: WeightSource, ignored: frozenset[nn.Parameter]) -> WeightReader:
    """Check on every rank that the source fits the model, before anything changes; every rank calls it.

    Args:
        model: The root, sharded or not.
        mesh: Its ranks.
        source: This rank's source.
        ignored: Parameters that are not sharded.

    Raises:
        UserError: It does not fit on some rank; raised on every rank with the same text.
    """
    return together_in_background(mesh, lambda: source.open(model, wanted_tensors(model, ignored)))


def give_memory(
    model: nn.Module, ignored: frozenset[nn.Parameter], device: torch.device, reader: WeightReader
) -> frozenset[nn.Parameter]:
    """Allocate unsharded meta tensors that will be read: ignored parameters and persistent buffers.

    Returns:
        The ignored parameters, with replacements for those on the meta device.
    """
    made: dict[int, nn.Parameter] = {}
    for path, module in model.named_modules():
        for key, param in module._parameters.items():
            if param is not None and param.is_meta and param in ignored:
                fresh = nn.Parameter(torch.empty_like(param, device=device), param.requires_grad)
                module._parameters[key] = made.setdefault(id(param), fresh)
        for key, buffer in module._buffers.items():
            kept = key not in module._non_persistent_buffers_set
            name = plain_name(f"{path}.{key}" if path else key)
            if buffer is not None and buffer.is_meta and kept and reader.has(name):
                module._buffers[key] = torch.empty_like(buffer, device=device)
    return frozenset(made.get(id(param), param) for param in ignored)


def fill(model: nn.Module, reader: WeightReader) -> None:
    """Read this rank's elements of every tensor into the model; every rank of a sharded model calls it.

    Raises:
        UserError: Reading failed on some rank; raised on every rank with the same text. What was read by then stays.
    """
    runtime = runtime_of(model)
    for unit in runtime.units:
        unit.keep.discard(Keep.NEXT_PASS)

    def read() -> list[QuantisedPart]:
        for local in local_tensors(model):
            if not reader.has(local.name):
                continue
            _read(reader, local)
            if local.tensor.data_ptr() != local.home.data_ptr():
                with torch.no_grad():
                    local.home.copy_(local.tensor.view(local.home.shape))
        return quantise_parts(model, reader, runtime.device.device)

    share_scales(together_in_background(ranks_of(runtime), runtime.device.for_thread(read)))


def _read(reader: WeightReader, local: LocalTensor) -> None:
    """Read this rank's elements of a tensor; of some columns, complete rows, of which it keeps its own.

    Raises:
        UserError: They cannot be read.
    """
    shape, target = local.shape, local.tensor
    order, first = place_in_order(shape, local.block)
    first, numel = first + local.start, target.numel()
    if order is None or not numel:
        reader.read(local.name, first, target)
        return
    own = boxes_in_order(shape, order, first, first + numel)
    strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    ends = (boxes_in_order(shape, order, at, at + 1)[0].offsets for at in (first, first + numel - 1))
    low, last = (sum(map(mul, offsets, strides)) for offsets in ends)
    for start in range(low, last + 1, CHUNK):
        run = target.new_empty(min(CHUNK, last + 1 - start))
        reader.read(local.name, start, run)
        for box in boxes(shape, start, start + run.numel()):
            for mine in own:
                if parts := common(mine, box):
                    here = target[mine.start - first :][: mine.numel].view(mine.sizes)
                    here[parts[0]].copy_(run[box.start - start :][: box.numel].view(box.sizes)[parts[1]])


def load_weights(model: nn.Module, source: WeightSource) -> None:
    """Replace the weights of a sharded model, in place, by those of a source; every rank calls it.

    Args:
        model: The sharded model.
        source: This rank's source.

    Raises:
        ShardingError: The model is not sharded.
        UserError: The weights do not fit, or cannot be read; raised on every rank with the same text. If they do not
            fit, nothing has changed.
    """
    reader = open_weights(model, ranks_of(runtime_of(model)), source, frozenset(left_out(model).values()))
    fill(model, reader)
