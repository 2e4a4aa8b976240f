"""Distribution of a packed micro-batch's rows over sequences."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

MOST_PADDING = 0.02
"""Maximum share of padding in a packed batch. Fewer, longer sequences have less padding, but cost more attention,
since its masked part is computed too."""


def share_sequences(lengths: Sequence[Sequence[int]]) -> list[list[int]]:
    """Distribute rows over as many sequences as possible with hardly any padding; the same on every rank.

    The number of sequences is halved until padding is at most :data:`MOST_PADDING` of all positions; one sequence has
    none. Rows are assigned longest first, each to the shortest sequence so far.

    Args:
        lengths: Tokens of each row on each side: source and target, or both joined for a causal model.

    Returns:
        The row numbers of each sequence, in order; no sequence is empty.
    """
    tokens = sum(map(sum, lengths))
    count = len(lengths)
    while True:
        sequences = _deal(lengths, count)
        if count == 1 or 1 - tokens / padded_size(lengths, sequences) <= MOST_PADDING:
            return sequences
        count = (count + 1) // 2


def padded_size(lengths: Sequence[Sequence[int]], sequences: Sequence[Sequence[int]]) -> int:
    """Return the number of positions of the sequences, including padding."""
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
