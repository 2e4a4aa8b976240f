"""What a rank holds: of a sharded parameter, of a tensor of its optimizer's state, and as boxes for file formats.

An optimizer's state is split like its parameter, so that the ranks' parts form the tensor of the unsharded optimizer:
row statistics by rows, column statistics in full on every rank that holds rows, the scales of block-wise quantised
states by blocks. Each part is one run of the flattened tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from operator import add

from fullshard.core.layout.unit_layout import LaneLayout, Placement
from fullshard.errors import InvariantError

Fingerprint = dict[str, tuple[int, tuple[str, ...]]]
"""The parameters that an optimizer steps: by parameter name, the number of its group and that group's options.

This rank's are in a list that every sharded parameter has as ``param.shard_fingerprints``.
"""


@dataclass(frozen=True)
class Block:
    """Which part of a parameter a rank has that tensor parallelism divides, into equal parts along one dimension.

    Attributes:
        dim: The dimension.
        index: This rank's part.
        count: The number of parts.

    Examples:
        >>> block = Block(dim=1, index=1, count=2)
        >>> block.shape((4, 6)), block.offsets((4, 6))
        ((4, 3), (0, 3))
    """

    dim: int
    index: int
    count: int

    def __str__(self) -> str:
        """Return what messages call it."""
        return f"block {self.index} of {self.count} along dimension {self.dim}"

    def shape(self, full: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of a part of a tensor of shape ``full``."""
        return tuple(size // self.count if dim == self.dim else size for dim, size in enumerate(full))

    def offsets(self, full: Sequence[int]) -> tuple[int, ...]:
        """Return the first index of this rank's part in each dimension of a tensor of shape ``full``."""
        return tuple(self.index * (size // self.count) if dim == self.dim else 0 for dim, size in enumerate(full))


@dataclass(frozen=True)
class ShardMeta:
    """Identity and place of one parameter's shard; every sharded parameter has it as ``param.shard_meta``.

    Attributes:
        name: First fully qualified name of the parameter in the model.
        aliases: Its other names, if the parameter is tied.
        global_shape: Shape of the unsharded parameter.
        layout: The layout of the lane that holds it.
        placement: Its place in that lane.
        rank: The rank whose shard this is.
        block: Which part of it the ranks of the lane share, if tensor parallelism divides it too; else None. Then rows
            and elements are those of this part.

    Examples:
        >>> from fullshard.core.layout.unit_layout import plan_unit
        >>> lane = plan_unit(((9, 8), (5,)), 3).lanes[0]
        >>> meta = ShardMeta("proj.weight", (), (9, 8), lane, lane.placements[0], rank=1)
        >>> meta.element_range, meta.row_range, meta.local_shape
        ((32, 64), (4, 8), (4, 8))
    """

    name: str
    aliases: tuple[str, ...]
    global_shape: tuple[int, ...]
    layout: LaneLayout
    placement: Placement
    rank: int
    block: Block | None = None

    @property
    def block_shape(self) -> tuple[int, ...]:
        """Shape of what the ranks of the lane share: the full parameter, or one block of it."""
        return self.global_shape if self.block is None else self.block.shape(self.global_shape)

    @property
    def element_range(self) -> tuple[int, int]:
        """First and past-the-last element of the flattened parameter that this rank holds; ``(0, 0)`` if none."""
        return self.layout.local_range(self.placement, self.rank)

    @property
    def owners(self) -> range:
        """The ranks that hold part of the parameter; they are consecutive."""
        return self.layout.owners(self.placement)

    @property
    def row_range(self) -> tuple[int, int] | None:
        """First and past-the-last row that this rank holds; None if the parameter is not split by full rows."""
        if not self.placement.full_rows:
            return None
        start, stop = self.element_range
        return start // self.placement.row_numel, stop // self.placement.row_numel

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of this rank's shard: full rows, or rows of one granule if rows had to be split.

        A scalar has shape ``()`` on the rank that holds it and ``(0,)`` on the others.
        """
        start, stop = self.element_range
        if not self.global_shape:
            return () if stop > start else (0,)
        if self.placement.full_rows:
            return ((stop - start) // self.placement.row_numel, *self.block_shape[1:])
        return ((stop - start) // self.placement.granule, self.placement.granule)


def fingerprint_difference(by_rank: Sequence[Sequence[Fingerprint]]) -> str | None:
    """Describe the first parameter that another rank steps differently from rank 0; return None if there is none."""
    merged = [{name: place for fingerprints in of_rank for name, place in fingerprints.items()} for of_rank in by_rank]
    for rank, other in enumerate(merged):
        for name in [*merged[0], *other]:
            here, there = merged[0].get(name), other.get(name)
            if here != there:
                return f"{name} is in {_place(here, there)} on rank 0 and in {_place(there, here)} on rank {rank}"
        if len(by_rank[rank]) != len(by_rank[0]):
            return f"rank 0 has stepped {len(by_rank[0])} of them and rank {rank} {len(by_rank[rank])}"
    return None


def _place(place: tuple[int, tuple[str, ...]] | None, other: tuple[int, tuple[str, ...]] | None) -> str:
    """Describe a group, with the options that the other group does not have."""
    if place is None:
        return "no optimizer that has stepped"
    number, options = place
    apart = ", ".join(one for one in options if other is not None and one not in other[1])
    return f"group {number} ({apart})" if apart else f"group {number}"


@dataclass(frozen=True)
class StatePart:
    """One rank's part of a tensor of a parameter's optimizer state. Counts are of elements of the flattened tensor.

    Attributes:
        shape: Shape in the unsharded optimizer's state.
        local_shape: Shape on this rank; empty along dimension 0 if it holds none.
        held: First and past-the-last element that this rank holds; ``(0, 0)`` if none.
        written: The run of them that it writes when state is saved; together the ranks write each element once.
        block: If tensor parallelism divides the tensor, the block whose elements ``held`` and ``written`` count.
    """

    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    held: tuple[int, int]
    written: tuple[int, int]
    block: Block | None = None

    @property
    def numel(self) -> int:
        """Elements that this rank holds."""
        return self.held[1] - self.held[0]


def elementwise(meta: ShardMeta) -> StatePart:
    """Return the part of a tensor with one element for each element of the parameter.

    Examples:
        >>> from fullshard.core.layout.unit_layout import plan_unit
        >>> lane = plan_unit(((9, 8),), 3).lanes[0]
        >>> elementwise(ShardMeta("w", (), (9, 8), lane, lane.placements[0], rank=1))
        StatePart(shape=(9, 8), local_shape=(4, 8), held=(32, 64), written=(32, 64), block=None)
    """
    return StatePart(meta.global_shape, meta.local_shape, meta.element_range, meta.element_range, meta.block)


def along_rows(meta: ShardMeta, shape: tuple[int, ...]) -> StatePart:
    """Return the part of a tensor whose dimension 0 is that of the parameter, which is split by full rows.

    Args:
        meta: Metadata of the parameter.
        shape: Shape of the unsharded tensor.

    Raises:
        InvariantError: The parameter is not split by full rows, or has another number of rows.

    Examples:
        >>> from fullshard.core.layout.unit_layout import plan_unit
        >>> lane = plan_unit(((9, 8),), 3).lanes[0]
        >>> along_rows(ShardMeta("w", (), (9, 8), lane, lane.placements[0], rank=1), (9,))
        StatePart(shape=(9,), local_shape=(4,), held=(4, 8), written=(4, 8), block=None)
    """
    rows = meta.row_range
    if rows is None or shape[:1] != meta.global_shape[:1]:
        raise InvariantError(f"A state of shape {shape} is not split by rows of {meta.name}, {meta.global_shape}.")
    width = prod(shape[1:])
    held = (rows[0] * width, rows[1] * width)
    return StatePart(shape, (rows[1] - rows[0], *shape[1:]), held, held)


def on_all_owners(meta: ShardMeta, shape: tuple[int, ...]) -> StatePart:
    """Return the part of a tensor that every owner of the parameter holds in full; the first owner writes it.

    Args:
        meta: Metadata of the parameter.
        shape: Shape of the tensor, with at least one dimension.

    Examples:
        >>> from fullshard.core.layout.unit_layout import plan_unit
        >>> lane = plan_unit(((9, 8),), 3).lanes[0]
        >>> on_all_owners(ShardMeta("w", (), (9, 8), lane, lane.placements[0], rank=1), (8,))
        StatePart(shape=(8,), local_shape=(8,), held=(0, 8), written=(0, 0), block=None)
    """
    numel = prod(shape)
    if meta.rank not in meta.owners:
        return StatePart(shape, (0, *shape[1:]), (0, 0), (0, 0))
    return StatePart(shape, shape, (0, numel), (0, numel) if meta.rank == meta.owners[0] else (0, 0))


def by_block(meta: ShardMeta, block: int) -> StatePart:
    """Return the part of a tensor with one element for each run of ``block`` elements of the flattened parameter.

    A rank holds it for each block of which it holds any element; the rank with the block's first element writes it.

    Args:
        meta: Metadata of the parameter.
        block: Elements of a block, at least 1; the last one may be shorter.

    Examples:
        >>> from fullshard.core.layout.unit_layout import plan_unit
        >>> lane = plan_unit(((9, 8),), 3).lanes[0]  # elements 32 to 64
        >>> by_block(ShardMeta("w", (), (9, 8), lane, lane.placements[0], rank=1), 24)
        StatePart(shape=(3,), local_shape=(2,), held=(1, 3), written=(2, 3), block=None)
    """
    start, stop = meta.element_range
    shape = (-(-meta.placement.numel // block),)
    if start == stop:
        return StatePart(shape, (0,), (0, 0), (0, 0))
    held = (start // block, -(-stop // block))
    first = -(-start // block)
    return StatePart(shape, (held[1] - held[0],), held, (first, held[1]) if first < held[1] else (0, 0))


@dataclass(frozen=True, slots=True)
class Box:
    """An axis-aligned part of a tensor whose elements are consecutive in the flattened tensor.

    Attributes:
        offsets: First index in each dimension.
        sizes: Number of indices in each dimension, none of them zero.
        start: First element, counted in the flattened tensor.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int

    @property
    def numel(self) -> int:
        """Elements of the box."""
        return prod(self.sizes)


def boxes_in(shape: Sequence[int], block: Block | None, start: int, stop: int) -> list[Box]:
    """Divide a run of the elements of a block of a tensor of ``shape`` into boxes of the tensor; None: of all of it.

    Examples:
        >>> [(box.offsets, box.sizes, box.start) for box in boxes_in((4, 6), Block(1, 1, 2), 3, 9)]
        [((1, 3), (2, 3), 3)]
    """
    if block is None:
        return boxes(shape, start, stop)
    first = block.offsets(shape)
    return [
        Box(tuple(map(add, first, box.offsets)), box.sizes, box.start) for box in boxes(block.shape(shape), start, stop)
    ]


Order = tuple[int, int] | None
"""In which order a tensor's elements are counted, so that each block is one run: block by block, of a number of equal
blocks along a dimension, ``(dim, count)``; None: as in the flattened tensor."""


def place_in_order(shape: Sequence[int], block: Block | None) -> tuple[Order, int]:
    """Return the order in which a block of a tensor of ``shape`` is one run, and where it begins.

    Examples:
        >>> place_in_order((4, 6), Block(0, 1, 2)), place_in_order((4, 6), Block(1, 1, 2))
        ((None, 12), ((1, 2), 12))
    """
    if block is None:
        return None, 0
    return (block.dim, block.count) if block.dim else None, block.index * (prod(shape) // block.count)


def boxes_in_order(shape: Sequence[int], order: Order, start: int, stop: int) -> list[Box]:
    """Divide a run of the elements of a tensor, counted in ``order``, into boxes; their starts are counted so too.

    Examples:
        >>> [(box.offsets, box.sizes, box.start) for box in boxes_in_order((4, 6), (1, 2), 9, 15)]
        [((3, 0), (1, 3), 9), ((0, 3), (1, 3), 12)]
    """
    if order is None or start >= stop:
        return boxes(shape, start, stop)
    dim, count = order
    each, found = prod(shape) // count, list[Box]()
    for index in range(start // each, -(-stop // each)):
        first = index * each
        inside = boxes_in(shape, Block(dim, index, count), max(start - first, 0), min(stop - first, each))
        found += [replace(box, start=first + box.start) for box in inside]
    return found


def common(one: Box, other: Box) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """Return which part of each of two boxes of a tensor is in both; None if they have no element in common.

    Examples:
        >>> common(Box((0, 2), (4, 2), 0), Box((1, 0), (1, 3), 0))
        ((slice(1, 2, None), slice(0, 1, None)), (slice(0, 1, None), slice(2, 3, None)))
    """
    ends = zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
    sides = [(max(a, b), min(a + size, b + width)) for a, size, b, width in ends]
    if any(low >= high for low, high in sides):
        return None
    parts = (
        tuple(slice(low - at, high - at) for (low, high), at in zip(sides, box.offsets, strict=True))
        for box in (one, other)
    )
    return next(parts), next(parts)


def interleaved(shape: Sequence[int], block: Block, start: int, stop: int) -> tuple[tuple[int, int], int]:
    """Return which elements ``start`` to ``stop``, the same of each block, are runs of the full tensor of ``shape``.

    Returns:
        The first and the past-the-last element of the part of the run that consists of full stretches, which all
        blocks' stretches together make one run of the full tensor; and the length of a stretch.

    Examples:
        >>> interleaved((4, 6), Block(1, 0, 2), 2, 11)
        ((3, 9), 3)
    """
    stretch = prod(block.shape(shape)[block.dim :])
    low, high = -(-start // stretch) * stretch, stop // stretch * stretch
    return (low, high) if low < high else (start, start), stretch


def boxes(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Divide a run of flattened elements into the smallest possible number of boxes.

    Args:
        shape: Shape of the full tensor; ``()`` for a scalar.
        start: First element of the run.
        stop: The element just past it, at most the number of elements.

    Returns:
        The boxes by ascending start, each of them a run of its own: one for full rows, at most ``2 * ndim - 1``, none
        for an empty run.

    Examples:
        >>> [(box.offsets, box.sizes) for box in boxes((10, 8), 16, 56)]
        [((2, 0), (5, 8))]
        >>> [(box.offsets, box.sizes) for box in boxes((4, 6), 4, 20)]
        [((0, 4), (1, 2)), ((1, 0), (2, 6)), ((3, 0), (1, 2))]
        >>> boxes((), 0, 1)
        [Box(offsets=(), sizes=(), start=0)]
    """
    if not shape:
        return [Box((), (), 0)][start:stop]
    strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    found: list[Box] = []
    while start < stop:
        # The outermost dimension of which a full index begins here and fits; the last one always does.
        dim = next(dim for dim, stride in enumerate(strides) if start % stride == 0 and start + stride <= stop)
        offsets = tuple(start // stride % size for stride, size in zip(strides, shape, strict=True))
        count = min(shape[dim] - offsets[dim], (stop - start) // strides[dim])
        found.append(Box(offsets, (1,) * dim + (count, *shape[dim + 1 :]), start))
        start = found[-1].start + found[-1].numel
    return found
