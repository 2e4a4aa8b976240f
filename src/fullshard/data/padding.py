"""How much of what the model computes is padding, from lengths alone."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fullshard.data.pack import padded_size, share_sequences
from fullshard.data.stream import Plan
from fullshard.data.tokenize import TokenizedSet

SAMPLED_STEPS = 500
"""Of an epoch with more steps so many are looked at, evenly spread."""


def padding_share(plan: Plan, tokenized: TokenizedSet, *, causal: bool, packed: bool = False) -> float:
    """Share of positions that hold no token of a row that counts, over all ranks and one epoch; any rank, alone.

    Args:
        plan: The epoch; of one with more than 500 steps, about 500 are looked at.
        tokenized: The set.
        causal: Whether source and target are one sequence.
        packed: Whether rows are laid end to end.

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
    plan: Plan, tokenized: TokenizedSet, rank: int, *, causal: bool, packed: bool = False
) -> NDArray[np.int64]:
    """Positions of one rank's largest micro-batch of each step; of packed ones the tokens, which are nearly all.

    Args:
        plan: The epoch.
        tokenized: The set.
        rank: The rank.
        causal: Whether source and target are one sequence.
        packed: Whether rows are laid end to end.

    Returns:
        ``plan.num_steps`` numbers.
    """
    sides = _sides(tokenized, causal=causal)

    def size(indices: NDArray[np.int64]) -> int:
        lengths = [side[indices] for side in sides]
        return sum(int(side.sum()) for side in lengths) if packed else _padded_size(lengths)

    steps = range(plan.num_steps)
    return np.asarray([max(size(indices) for indices, _ in plan.step_places(step, rank)) for step in steps])


def _sides(tokenized: TokenizedSet, *, causal: bool) -> list[NDArray[np.int64]]:
    """Lengths of all rows on each side that is padded for itself."""
    return [tokenized.lengths] if causal else [tokenized.source_ids.lengths, tokenized.target_ids.lengths]


def _padded_size(lengths: list[NDArray[np.int64]]) -> int:
    return len(lengths[0]) * sum(int(side.max()) for side in lengths)


def _packed_size(lengths: list[NDArray[np.int64]]) -> int:
    rows = np.stack(lengths, axis=1).tolist()
    return padded_size(rows, share_sequences(rows))
