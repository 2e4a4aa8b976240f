"""Division of a run of flattened elements into boxes, for formats that store offsets and sizes per dimension."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod


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
