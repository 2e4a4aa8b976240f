"""Which rows of a packed micro-batch lie end to end in one sequence."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

MOST_PADDING = 0.02
"""Share of padding that a packed batch may have. In fewer, longer sequences there is less; attention costs more there,
since its masked part is computed too."""


def share_sequences(lengths: Sequence[Sequence[int]]) -> list[list[int]]:
    """Deal rows to as many sequences as go with hardly any padding; the same on every rank.

    The number of sequences is halved until padding is at most :data:`MOST_PADDING` of all positions; one sequence has
    none. Rows are dealt longest first, each to the sequence that is shortest so far.

    Args:
        lengths: For each row its tokens on each side: source and target, or of a causal model both joined.

    Returns:
        For each sequence the numbers of its rows, in order; no sequence is empty.
    """
    tokens = sum(map(sum, lengths))
    count = len(lengths)
    while True:
        sequences = _deal(lengths, count)
        if count == 1 or 1 - tokens / padded_size(lengths, sequences) <= MOST_PADDING:
            return sequences
        count = (count + 1) // 2


def padded_size(lengths: Sequence[Sequence[int]], sequences: Sequence[Sequence[int]]) -> int:
    """Positions of the sequences, padding included."""
    sides = range(len(lengths[0]))
    longest = [max(sum(lengths[row][side] for row in rows) for rows in sequences) for side in sides]
    return len(sequences) * sum(longest)


def _deal(lengths: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    sequences: list[list[int]] = [[] for _ in range(count)]
    shortest = [(0, number) for number in range(count)]
    for row in sorted(range(len(lengths)), key=lambda row: -sum(lengths[row])):
        tokens, number = heapq.heappop(shortest)
        sequences[number].append(row)
        heapq.heappush(shortest, (tokens + sum(lengths[row]), number))
    return [sorted(rows) for rows in sequences if rows]
