"""Numbers kept as 8-bit codes with a scale for each block of 256, as bitsandbytes and torchao keep optimizer states.

Blocks are runs of the flattened unsharded tensor. Functions here work on a run of it that may begin and end inside a
block; ``lead`` says how many elements of its first block come before it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from fullshard.layout import ShardMeta

BLOCK = 256
"""Elements that share a scale."""

CHUNK = 2**20
"""Elements that are worked on at a time, a multiple of BLOCK: bounds the float32 copies of what is kept narrow."""

TINY = torch.finfo(torch.float32).tiny


def dynamic_codes(*, signed: bool) -> torch.Tensor:
    """The numbers that 8-bit codes stand for: dynamic tree quantisation, https://arxiv.org/abs/2110.02861, section 1.3.

    A code has an exponent e from -6 to 0 in a varying number of bits, and what is left of the bits cut 0.1 to 1 into
    equal parts, of which the middle times ``10 ** e`` is the number: 2 ** (e + 6) parts with a sign, twice as many
    without. Zero and one are codes of their own. Equal to bitsandbytes' ``create_dynamic_map``.

    Args:
        signed: For numbers from -1 to 1; else from 0 to 1.

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
    """What codes stand for, and what finds the nearest code fast.

    Of a float32's bits the upper half, sign, exponent and 7 bits, leaves at most one midpoint of two codes undecided,
    which one comparison decides: several times faster on a CPU than a search among 255.

    Attributes:
        values: float32, (256,), ascending.
        midpoints: Between each two, and infinity; float32, (256,).
        lowest: By the upper 16 bits of a number, the code of the least number that has them; int32, (65536,).
    """

    values: torch.Tensor
    midpoints: torch.Tensor
    lowest: torch.Tensor

    @classmethod
    def of(cls, values: torch.Tensor) -> CodeBook:
        """The book of ``values``, on their device; neighbours are at least 1/128 of the greater one apart."""
        device = values.device
        midpoints = torch.cat([(values[:-1] + values[1:]) / 2, torch.full((1,), math.inf, device=device)])
        upper = torch.arange(2**16, dtype=torch.int32, device=device) << 16
        least = torch.where(upper < 0, upper | 0xFFFF, upper).view(torch.float32)
        return cls(values, midpoints, torch.bucketize(least, midpoints[:-1], out_int32=True))

    def nearest(self, numbers: torch.Tensor) -> torch.Tensor:
        """The code nearest to each number, the lower one of two that are equally near; finite float32 to uint8."""
        codes = self.lowest.index_select(0, (numbers.view(torch.int32) >> 16).bitwise_and_(0xFFFF))
        return codes.add_(numbers > self.midpoints.index_select(0, codes)).to(torch.uint8)


def block_maxima(values: torch.Tensor, lead: int = 0) -> torch.Tensor:
    """The largest absolute value of each block that a run touches; nan where it has one.

    Args:
        values: float32, (n,).
        lead: Elements of the first block before the run.

    Returns:
        float32, (blocks,).
    """
    return _in_blocks(values.abs(), lead).amax(1)


def quantise(values: torch.Tensor, scales: torch.Tensor, book: CodeBook, lead: int = 0) -> torch.Tensor:
    """The code nearest to each value over its block's scale.

    Args:
        values: float32, (n,).
        scales: float32, (blocks,), of each block that the run touches; a block of zeros may have the scale zero.
        book: What codes stand for.
        lead: Elements of the first block before the run.

    Returns:
        uint8, (n,).
    """
    scaled = _in_blocks(values, lead) / scales.clamp_min(TINY)[:, None]
    return book.nearest(scaled.view(-1)[lead : lead + values.numel()])


def dequantise(quantised: torch.Tensor, scales: torch.Tensor, codes: torch.Tensor, lead: int = 0) -> torch.Tensor:
    """The values that codes stand for.

    Args:
        quantised: Codes, uint8, (n,).
        scales: float32, (blocks,), of each block that the run touches.
        codes: What codes stand for, float32, (256,).
        lead: Elements of the first block before the run.

    Returns:
        float32, (n,), new.
    """
    values = codes.index_select(0, quantised.int())
    return (_in_blocks(values, lead) * scales[:, None]).view(-1)[lead : lead + values.numel()]


def _in_blocks(values: torch.Tensor, lead: int) -> torch.Tensor:
    """A run as whole blocks, (blocks, 256), with zeros before and after it; a view where it is of whole ones."""
    tail = -(lead + values.numel()) % BLOCK
    return (pad(values, (lead, tail)) if lead or tail else values).view(-1, BLOCK)


def chunks(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Cut a run of elements where their number is a multiple of CHUNK, so that no block is cut.

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
    """A block of a parameter that several ranks hold elements of.

    Attributes:
        index: Among the blocks of the unsharded parameter.
        held: First and past-the-last element of it that this rank holds, counted in the flattened parameter.
        owners: The ranks that hold some of it; they are consecutive.
    """

    index: int
    held: tuple[int, int]
    owners: range


def cut_blocks(meta: ShardMeta) -> tuple[CutBlock, ...]:
    """The blocks of which this rank holds some elements but not all: none, one or two, in ascending order.

    Examples:
        >>> from fullshard.layout.plan import plan_unit
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
    """Whether a shard boundary, of whichever ranks, lies inside a block of the parameter; the same on every rank."""
    ends = [(rank * meta.layout.shard_numel - meta.placement.start) % BLOCK for rank in meta.owners[1:]]
    return any(ends)
