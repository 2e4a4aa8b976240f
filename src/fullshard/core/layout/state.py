"""The part of an optimizer state tensor that a rank holds, for elementwise states and others.

An optimizer's state is split like its parameter, so that the ranks' parts form the tensor of the unsharded optimizer:
row statistics by rows, column statistics in full on every rank that holds rows, the scales of block-wise quantised
states by blocks. Each part is one run of the flattened tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from fullshard.core.layout.sharded import ShardMeta
from fullshard.errors import InvariantError


@dataclass(frozen=True)
class StatePart:
    """One rank's part of a tensor of a parameter's optimizer state. Counts are of elements of the flattened tensor.

    Attributes:
        shape: Shape in the unsharded optimizer's state.
        local_shape: Shape on this rank; empty along dimension 0 if it holds none.
        held: First and past-the-last element that this rank holds; ``(0, 0)`` if none.
        written: The run of them that it writes when state is saved; together the ranks write each element once.
    """

    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    held: tuple[int, int]
    written: tuple[int, int]

    @property
    def numel(self) -> int:
        """Elements that this rank holds."""
        return self.held[1] - self.held[0]


def elementwise(meta: ShardMeta) -> StatePart:
    """Return the part of a tensor with one element for each element of the parameter.

    Examples:
        >>> from fullshard.core.layout.plan import plan_unit
        >>> lane = plan_unit(((9, 8),), 3).lanes[0]
        >>> elementwise(ShardMeta("w", (), (9, 8), lane, lane.placements[0], rank=1))
        StatePart(shape=(9, 8), local_shape=(4, 8), held=(32, 64), written=(32, 64))
    """
    return StatePart(meta.global_shape, meta.local_shape, meta.element_range, meta.element_range)


def along_rows(meta: ShardMeta, shape: tuple[int, ...]) -> StatePart:
    """Return the part of a tensor whose dimension 0 is that of the parameter, which is split by full rows.

    Args:
        meta: Metadata of the parameter.
        shape: Shape of the unsharded tensor.

    Raises:
        InvariantError: The parameter is not split by full rows, or has another number of rows.

    Examples:
        >>> from fullshard.core.layout.plan import plan_unit
        >>> lane = plan_unit(((9, 8),), 3).lanes[0]
        >>> along_rows(ShardMeta("w", (), (9, 8), lane, lane.placements[0], rank=1), (9,))
        StatePart(shape=(9,), local_shape=(4,), held=(4, 8), written=(4, 8))
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
        >>> from fullshard.core.layout.plan import plan_unit
        >>> lane = plan_unit(((9, 8),), 3).lanes[0]
        >>> on_all_owners(ShardMeta("w", (), (9, 8), lane, lane.placements[0], rank=1), (8,))
        StatePart(shape=(8,), local_shape=(8,), held=(0, 8), written=(0, 0))
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
        >>> from fullshard.core.layout.plan import plan_unit
        >>> lane = plan_unit(((9, 8),), 3).lanes[0]  # elements 32 to 64
        >>> by_block(ShardMeta("w", (), (9, 8), lane, lane.placements[0], rank=1), 24)
        StatePart(shape=(3,), local_shape=(2,), held=(1, 3), written=(2, 3))
    """
    start, stop = meta.element_range
    shape = (-(-meta.placement.numel // block),)
    if start == stop:
        return StatePart(shape, (0,), (0, 0), (0, 0))
    held = (start // block, -(-stop // block))
    first = -(-start // block)
    return StatePart(shape, (held[1] - held[0],), held, (first, held[1]) if first < held[1] else (0, 0))
