"""Quantisation of weights while they are read: each rank reads only the blocks that its shards hold part of.

The largest absolute value of every block of one weight (1/16 of its bytes in float32) is then summed over ranks, each
block from the rank that made it, many layers at a time, and every rank packs its own part of the scales. So double
quantisation subtracts the mean that the unsharded weight has, to the last bit: the mean of partial means would be
another number.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from fullshard.comm import Comm
from fullshard.engine.setup.source import WeightReader
from fullshard.layout.names import plain_name
from fullshard.layout.sharded import ShardMeta
from fullshard.quantized import QuantizedLinear
from fullshard.shards import rows_of

CHUNK = 1 << 22
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


def quantise_parts(model: nn.Module, reader: WeightReader, device: torch.device) -> list[QuantisedPart]:
    """Read this rank's weights and quantise them into its shards, on ``device``; without communication.

    Raises:
        UserError: A weight cannot be read.
    """
    return [_quantise(name, layer, reader, device) for name, layer in quantised_layers(model) if reader.has(name)]


def _quantise(name: str, layer: QuantizedLinear, reader: WeightReader, device: torch.device) -> QuantisedPart:
    format, shape, codes = layer.format, layer.shape, layer.stored[0]
    start, stop = _range(codes)
    block = format.block(shape)
    size, numel = format.code_bytes(block), shape[0] * shape[1]
    first, last = start // size, -(-stop // size)
    chunk = max(1, CHUNK // block)
    found = []
    for low in range(first, last, chunk):
        high = min(low + chunk, last)
        values = torch.empty(min(high * block, numel) - low * block, dtype=layer.weight_dtype, device=device)
        reader.read(name, low * block, values)
        made, largest = format.quantise(values, shape)
        found.append(largest)
        here = slice(max(start, low * size), min(stop, low * size + made.numel()))
        target = _flat(codes)[here.start - start : here.stop - start]
        target.copy_(made[here.start - low * size : here.stop - low * size])
    largest = torch.cat(found) if found else torch.empty(0, device=device)
    # A block that begins on the rank before is brought by that rank.
    skipped = int(first * size < start)
    return QuantisedPart(layer, first + skipped, largest[skipped:])


def share_scales(parts: list[QuantisedPart]) -> None:
    """Write this rank's part of every layer's scales; every rank of the model calls it with the same layers."""
    batch: list[QuantisedPart] = []
    for part in parts:
        if batch and (_group(part) is not _group(batch[0]) or sum(map(_blocks, [*batch, part])) > SHARED):
            _share(batch)
            batch = []
        batch.append(part)
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
