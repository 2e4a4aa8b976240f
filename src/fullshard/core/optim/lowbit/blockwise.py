"""8-bit codes with a scale for each block of 256 numbers, the format of bitsandbytes' and torchao's optimizer states.

Blocks are runs of the flattened unsharded tensor. Functions here take a run of it that may begin and end inside a
block; ``lead`` is the number of elements of its first block before it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from fullshard.core.layout import ShardMeta

BLOCK = 256
"""Elements that share a scale."""

CHUNK = 2**20
"""Elements updated at a time, a multiple of BLOCK: bounds the float32 copies of 8-bit and bfloat16 states."""

TINY = torch.finfo(torch.float32).tiny


def dynamic_codes(*, signed: bool) -> torch.Tensor:
    """Return the values of 8-bit codes: dynamic tree quantisation, https://arxiv.org/abs/2110.02861, section 1.3.

    A code has an exponent e from -6 to 0 in a varying number of bits; the remaining bits divide 0.1 to 1 into equal
    parts, whose middle times ``10 ** e`` is the value: 2 ** (e + 6) parts with a sign, twice as many without. Zero and
    one have codes of their own. Equal to bitsandbytes' ``create_dynamic_map``.

    Args:
        signed: True: values from -1 to 1; False: from 0 to 1.

    Returns:
        float32, (256,), ascending, on the CPU.
    """
    parts = [torch.tensor([0.0, 1.0], device="cpu")]
    for exponent in range(-6, 1):
        count = 2 ** (exponent + 6) * (1 if signed else 2)
        edges = torch.linspace(0.1, 1.0, count + 1, dtype=torch.float32, device="cpu")
        middles = (edges[:-1] + edges[1:]) / 2 * 10.0**exponent
        parts += [middles, -middles] if signed else [middles]
    return torch.cat(parts).sort().values


@dataclass(frozen=True)
class CodeBook:
    """The values of codes, and a table to find the nearest code.

    The upper half of a float32's bits (sign, exponent and 7 bits) leaves at most one midpoint of two codes undecided,
    which one comparison decides: on a CPU 3.4 times faster than ``torch.bucketize`` over 255 midpoints.
    """

    values: torch.Tensor  # float32, (256,), ascending
    midpoints: torch.Tensor  # between neighbors, and infinity; float32, (256,)
    # by the upper 16 bits of a number, the code of the smallest number that has them; int32, (65536,)
    lowest: torch.Tensor

    @classmethod
    def of(cls, values: torch.Tensor) -> CodeBook:
        """Return the book of ``values``, on their device; neighbors are at least 1/128 of the greater one apart."""
        device = values.device
        midpoints = torch.cat([(values[:-1] + values[1:]) / 2, torch.full((1,), math.inf, device=device)])
        upper = torch.arange(2**16, dtype=torch.int32, device=device) << 16
        least = torch.where(upper < 0, upper | 0xFFFF, upper).view(torch.float32)
        return cls(values, midpoints, torch.bucketize(least, midpoints[:-1], out_int32=True))

    def nearest(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return the code nearest to each number, the lower of two equally near ones; finite float32 to uint8."""
        codes = self.lowest.index_select(0, (numbers.view(torch.int32) >> 16).bitwise_and_(0xFFFF))
        return codes.add_(numbers > self.midpoints.index_select(0, codes)).to(torch.uint8)


def block_maxima(values: torch.Tensor, lead: int = 0) -> torch.Tensor:
    """Return the largest absolute value of each block that a run is in; nan if the block has one.

    Args:
        values: float32, (n,).
        lead: Elements of the first block before the run.

    Returns:
        float32, (blocks,).
    """
    return _in_blocks(values.abs(), lead).amax(1)


def quantise(values: torch.Tensor, scales: torch.Tensor, book: CodeBook, lead: int = 0) -> torch.Tensor:
    """Return the code nearest to each value over its block's scale.

    Args:
        values: float32, (n,).
        scales: float32, (blocks,), of each block that the run is in; zero is allowed for a block of zeros.
        book: The values of codes.
        lead: Elements of the first block before the run.

    Returns:
        uint8, (n,).
    """
    scaled = _in_blocks(values, lead) / scales.clamp_min(TINY)[:, None]
    return book.nearest(scaled.view(-1)[lead : lead + values.numel()])


def dequantise(quantised: torch.Tensor, scales: torch.Tensor, codes: torch.Tensor, lead: int = 0) -> torch.Tensor:
    """Return the values of codes.

    Args:
        quantised: Codes, uint8, (n,).
        scales: float32, (blocks,), of each block that the run is in.
        codes: The values of codes, float32, (256,).
        lead: Elements of the first block before the run.

    Returns:
        float32, (n,), new.
    """
    values = codes.index_select(0, quantised.int())
    return (_in_blocks(values, lead) * scales[:, None]).view(-1)[lead : lead + values.numel()]


def _in_blocks(values: torch.Tensor, lead: int) -> torch.Tensor:
    """Return a run as full blocks, (blocks, 256), padded with zeros; a view if it consists of full blocks."""
    tail = -(lead + values.numel()) % BLOCK
    return (pad(values, (lead, tail)) if lead or tail else values).view(-1, BLOCK)


def chunks(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Divide a run of elements at multiples of CHUNK, so that no block is split.

    Examples:
        >>> list(chunks(100, 2**20 + 7))
        [(100, 1048576), (1048576, 1048583)]
    """
    while start < stop:
        end = min(stop, (start // CHUNK + 1) * CHUNK)
        yield start, end
        start = end


@dataclass(frozen=True)
class CutBlock:
    """A block of a parameter that several ranks hold elements of."""

    index: int  # its number among the blocks of the unsharded parameter
    # first and past-the-last element of it that this rank holds, counted in the flattened parameter
    held: tuple[int, int]
    owners: range  # the ranks that hold some of it; they are consecutive


def cut_blocks(meta: ShardMeta) -> tuple[CutBlock, ...]:
    """Return the blocks of which this rank holds some elements but not all: none, one or two, in ascending order.

    Examples:
        >>> from fullshard.core.layout.plan import plan_unit
        >>> lane = plan_unit(((9, 48),), 3).lanes[0]  # ranks hold 144 elements each
        >>> cut_blocks(ShardMeta("w", (), (9, 48), lane, lane.placements[0], rank=1))
        (CutBlock(index=0, held=(144, 256), owners=range(0, 2)), CutBlock(index=1, held=(256, 288), owners=range(1, 3)))
    """
    start, stop = meta.element_range
    if start == stop:
        return ()
    place, size = meta.placement, meta.layout.shard_numel
    found = []
    for index in sorted({start // BLOCK, (stop - 1) // BLOCK}):
        first, end = index * BLOCK, min((index + 1) * BLOCK, place.numel)
        owners = range((place.start + first) // size, (place.start + end - 1) // size + 1)
        if len(owners) > 1:
            found.append(CutBlock(index, (max(first, start), min(end, stop)), owners))
    return tuple(found)


def any_block_is_cut(meta: ShardMeta) -> bool:
    """Return whether a shard boundary, of any rank, is inside a block of the parameter; the same on every rank."""
    ends = [(rank * meta.layout.shard_numel - meta.placement.start) % BLOCK for rank in meta.owners[1:]]
    return any(ends)
