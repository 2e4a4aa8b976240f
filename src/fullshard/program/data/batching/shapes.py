"""Shapes of micro-batches: rows distributed over sequences, and a few fixed shapes that hold every micro-batch."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from itertools import pairwise, product

import numpy as np
from numpy.typing import NDArray

Shape = tuple[int, int, int]
"""Sequences of a batch, tokens of its longest source and of its longest target; causal: of both joined, twice."""

MOST_PADDING = 0.02
"""Maximum share of padding in a packed batch. Fewer, longer sequences have less padding, but cost more attention,
since its masked part is computed too."""

MOST_SHAPES = 6
"""Fixed shapes of a run. Each is compiled by itself, which takes seconds to minutes."""

SPARE = 0.03
"""Share of further positions from which on one more fixed shape is worth compiling."""

_MOST_CELLS = 256
"""Distinct shapes among which fixed ones are chosen, in time that grows with their square."""

_ALIGNED_FROM = 128
"""Length from which on fixed lengths are multiples of 8, as kernels of a GPU want them: by at most 6 % more."""


def positions(shape: Shape, *, causal: bool) -> int:
    """Return the positions of a batch, padding included."""
    sequences, source, target = shape
    return sequences * (source if causal else source + target)


def fit(shapes: Sequence[Shape], lengths: Sequence[Sequence[int]], *, packed: bool) -> tuple[Shape, list[list[int]]]:
    """Return the first of some shapes that holds rows, and the row numbers of each of its sequences.

    Args:
        shapes: Result of :func:`choose_shapes`, of which one is large enough.
        lengths: Tokens of each row on each side: source and target, or both joined for a causal model.
        packed: Whether a sequence may have several rows.
    """
    for shape in shapes:
        sequences = deal(lengths, shape[0]) if packed else [[row] for row in range(len(lengths))]
        longest = [
            max(sum(lengths[row][side] for row in rows) for rows in sequences) for side in range(len(lengths[0]))
        ]
        if len(sequences) <= shape[0] and all(most <= size for most, size in zip(longest, shape[1:], strict=False)):
            return shape, sequences
    raise AssertionError(f"no shape of {shapes} holds rows of {lengths} tokens")


def choose_shapes(found: Mapping[Shape, float], *, causal: bool, longest: tuple[int, int]) -> tuple[Shape, ...]:
    """Return at most :data:`MOST_SHAPES` shapes that hold all of ``found``, ascending by positions; a pure function.

    They are as few as need at most :data:`SPARE` more positions than ``found``, otherwise those with fewest.

    Args:
        found: How often a run has each shape; 0 for one that must be held but hardly occurs.
        causal: Whether source and target are one sequence.
        longest: Most tokens of a source and of a target, or twice of both joined; no length is rounded up above it.
    """
    cells = _cells(found)
    order = sorted(cells, key=lambda shape: shape[1:])
    segments = _segments(np.array(order), np.array([cells[shape] for shape in order]), causal=causal)
    allowed = (1 + SPARE) * sum(count * positions(shape, causal=causal) for shape, count in found.items())
    chosen: tuple[Shape, ...] = ()
    for some in segments:
        better = {_aligned(shape, longest) for shape in (some if causal else _descended(cells, some))}
        chosen = tuple(sorted(better, key=lambda shape: (positions(shape, causal=causal), shape)))
        if _total(found, chosen, causal=causal) <= allowed:
            break
    return chosen


def _descended(cells: Mapping[Shape, float], chosen: Sequence[Shape]) -> list[Shape]:
    """Return shapes with fewer positions in all, changing one length at a time: segments differ in sources only."""
    lengths = np.array(list(cells))
    tried = [np.unique(np.quantile(lengths[:, side], np.linspace(0, 1, 17), method="higher")) for side in (1, 2)]
    shapes, best, before = [list(shape) for shape in chosen], _total(cells, chosen, causal=False), np.inf
    while best < before:
        before = best
        for shape, side in product(shapes, (1, 2)):
            for length in tried[side - 1].tolist():
                shape[side], old = length, shape[side]
                total = _total(cells, [(n, source, target) for n, source, target in shapes], causal=False)
                if total < best:
                    best = total
                else:
                    shape[side] = old
    return [(n, source, target) for n, source, target in shapes]


def _cells(found: Mapping[Shape, float]) -> dict[Shape, float]:
    """Return at most :data:`_MOST_CELLS` shapes, each holding the similar ones of ``found``, and how many these are."""
    shapes = np.array(list(found))
    parts = 256
    while True:
        keys = np.ceil(shapes * (parts / shapes.max(0)))
        _, cell = np.unique(keys, axis=0, return_inverse=True)
        cell = cell.reshape(-1)
        if cell.max() < _MOST_CELLS:
            break
        parts //= 2
    most, counts = np.zeros((cell.max() + 1, 3), np.int64), np.zeros(cell.max() + 1)
    np.maximum.at(most, cell, shapes)
    np.add.at(counts, cell, list(found.values()))
    merged: dict[Shape, float] = {}
    for (n, source, target), count in zip(most.tolist(), counts.tolist(), strict=True):
        merged[n, source, target] = merged.get((n, source, target), 0.0) + count
    return merged


def _segments(shapes: NDArray[np.int64], counts: NDArray[np.float64], *, causal: bool) -> list[list[Shape]]:
    """Return for 1, 2, … segments of this order of shapes the shapes that hold each, with fewest positions in all."""
    total = len(shapes)
    cost = np.full((total, total), np.inf)  # of one segment from the first to the last index
    for first in range(total):
        sequences, source, target = np.maximum.accumulate(shapes[first:], 0).T
        cost[first, first:] = sequences * (source if causal else source + target) * counts[first:].cumsum()
    fewest, cuts, results = cost[0], list[NDArray[np.int64]](), list[list[Shape]]()
    for _ in range(MOST_SHAPES):
        starts, end = [], total - 1
        for cut in reversed(cuts):  # where the last segment begins, the one before it, …
            starts.append(int(cut[end]))
            end = max(starts[-1] - 1, 0)
        bounds = [*sorted({0, *starts}), total]
        maxima = [shapes[first:last].max(0).tolist() for first, last in pairwise(bounds)]
        results.append([(n, source, target) for n, source, target in maxima])
        options = np.concatenate([[0.0], fewest[:-1]])[:, None] + cost
        cuts.append(options.argmin(0))
        fewest = options.min(0)
    return results


def _aligned(shape: Shape, longest: tuple[int, int]) -> Shape:
    def up(length: int, most: int) -> int:
        return length if length < _ALIGNED_FROM else max(length, min(-(-length // 8) * 8, most))

    return shape[0], up(shape[1], longest[0]), up(shape[2], longest[1])


def _total(found: Mapping[Shape, float], chosen: Sequence[Shape], *, causal: bool) -> float:
    """Return the positions of all shapes of ``found`` in the smallest of the chosen ones that hold each."""
    shapes, counts = np.array(list(found)), np.array(list(found.values()))
    sizes = np.array([positions(shape, causal=causal) for shape in chosen], dtype=np.float64)
    holds = (shapes[:, None, :] <= np.array(chosen)[None]).all(-1)
    smallest = np.where(holds, sizes, np.inf).min(1)
    return float((smallest * counts).sum()) if np.isfinite(smallest).all() else np.inf


def share_sequences(lengths: Sequence[Sequence[int]]) -> list[list[int]]:
    """Distribute rows over as many sequences as possible with hardly any padding; the same on every rank.

    The number of sequences is halved until padding is at most :data:`MOST_PADDING` of all positions; one sequence has
    none. Rows are assigned longest first, each to the shortest sequence so far.

    ``lengths`` are the tokens of each row on each side: source and target, or both joined for a causal model. Returns
    the row numbers of each sequence, in order; no sequence is empty.
    """
    tokens, sides, count = sum(map(sum, lengths)), range(len(lengths[0])), len(lengths)
    while True:
        sequences = deal(lengths, count)
        longest = [max(sum(lengths[row][side] for row in rows) for rows in sequences) for side in sides]
        if count == 1 or 1 - tokens / (len(sequences) * sum(longest)) <= MOST_PADDING:
            return sequences
        count = (count + 1) // 2


def deal(lengths: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """Return the row numbers of ``count`` sequences or fewer, none empty: each row goes to the shortest so far."""
    sequences: list[list[int]] = [[] for _ in range(count)]
    shortest = [(0, number) for number in range(count)]
    for row in sorted(range(len(lengths)), key=lambda row: -sum(lengths[row])):
        tokens, number = heapq.heappop(shortest)
        sequences[number].append(row)
        heapq.heappush(shortest, (tokens + sum(lengths[row]), number))
    return [sorted(rows) for rows in sequences if rows]
