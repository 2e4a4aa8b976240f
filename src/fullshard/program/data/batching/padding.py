"""The share of padding in batches, computed from lengths."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from fullshard.program.data.batching.pack import padded_size, share_sequences
from fullshard.program.data.batching.stream import BatchPlan
from fullshard.program.data.tokenizing.tokenize import TokenizedSet

SAMPLED_STEPS = 500
"""Number of evenly spaced steps that are examined in a longer epoch."""

Shape = tuple[int, int, int]
"""Sequences of a batch, tokens of its longest source and of its longest target; causal: of both joined, twice."""


def padding_share(plan: BatchPlan, tokenized: TokenizedSet, *, causal: bool, packed: bool = False) -> float:
    """Return the share of positions that are padding or fillers, over all ranks and one epoch. Any rank can call it.

    Args:
        plan: The epoch; if it has more than 500 steps, about 500 are examined.
        tokenized: The set.
        causal: Whether source and target are one sequence.
        packed: Whether rows are packed.

    Returns:
        From 0 (no padding) to below 1.
    """
    sides = _sides(tokenized, causal=causal)
    real = positions = 0
    for step in range(0, plan.num_steps, -(-plan.num_steps // SAMPLED_STEPS)):
        for rank in range(plan.world_size):
            for indices, fillers in plan.step_places(step, rank):
                lengths = [side[indices] for side in sides]
                real += sum(int(side[~fillers].sum()) for side in lengths)
                positions += _packed_size(lengths) if packed else _padded_size(lengths)
    return 1 - real / positions


def step_sizes(
    plan: BatchPlan, tokenized: TokenizedSet, rank: int, *, causal: bool, packed: bool = False
) -> NDArray[np.int64]:
    """Return the positions of one rank's largest micro-batch in each step; for packed ones the tokens, nearly the same.

    Args:
        plan: The epoch.
        tokenized: The set.
        rank: The rank.
        causal: Whether source and target are one sequence.
        packed: Whether rows are packed.

    Returns:
        ``plan.num_steps`` numbers.
    """
    sides = _sides(tokenized, causal=causal)

    def size(indices: NDArray[np.int64]) -> int:
        lengths = [side[indices] for side in sides]
        return sum(int(side.sum()) for side in lengths) if packed else _padded_size(lengths)

    steps = range(plan.num_steps)
    return np.asarray([max(size(indices) for indices, _ in plan.step_places(step, rank)) for step in steps])


def step_shapes(
    plan: BatchPlan, tokenized: TokenizedSet, steps: int, *, causal: bool, packed: bool = False
) -> Iterator[list[tuple[Shape, NDArray[np.int64]]]]:
    """Yield for each step and rank the shapes of its micro-batches and their rows; any process, alone.

    Args:
        plan: The epoch.
        tokenized: The set.
        steps: Number of its steps, from the first.
        causal: Whether source and target are one sequence.
        packed: Whether rows are packed.
    """
    sides = _sides(tokenized, causal=causal)

    def shape(indices: NDArray[np.int64]) -> Shape:
        lengths = [side[indices] for side in sides]
        count = len(indices)
        if packed:
            rows = np.stack(lengths, axis=1)
            sequences = share_sequences(rows.tolist())
            count, lengths = len(sequences), list(np.stack([rows[one].sum(0) for one in sequences], axis=1))
        return count, int(lengths[0].max()), int(lengths[-1].max())

    for step in range(steps):
        for rank in range(plan.world_size):
            yield [(shape(indices), indices) for indices, _ in plan.step_places(step, rank)]


def _sides(tokenized: TokenizedSet, *, causal: bool) -> list[NDArray[np.int64]]:
    """Return the lengths of all rows on each separately padded side."""
    return [tokenized.lengths] if causal else [tokenized.source_ids.lengths, tokenized.target_ids.lengths]


def _padded_size(lengths: list[NDArray[np.int64]]) -> int:
    return len(lengths[0]) * sum(int(side.max()) for side in lengths)


def _packed_size(lengths: list[NDArray[np.int64]]) -> int:
    rows = np.stack(lengths, axis=1).tolist()
    return padded_size(rows, share_sequences(rows))
