"""The shapes of batches and their share of padding, computed from lengths."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from fullshard.program.data.batching.collate import share_sequences
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
    shape, tokens = _shapes(tokenized, causal=causal, packed=packed), tokenized.lengths
    real = positions = 0
    for step in range(0, plan.num_steps, -(-plan.num_steps // SAMPLED_STEPS)):
        for rank in range(plan.world_size):
            for indices, fillers in plan.step_places(step, rank):
                real += int(tokens[indices[~fillers]].sum())
                positions += _positions(shape(indices), causal=causal)
    return 1 - real / positions


def step_sizes(
    plan: BatchPlan, tokenized: TokenizedSet, rank: int, *, causal: bool, packed: bool = False
) -> NDArray[np.int64]:
    """Return the positions of one rank's largest micro-batch in each of ``plan.num_steps`` steps.

    For packed micro-batches it is their tokens, nearly the same. Arguments as for :func:`padding_share`.
    """
    shape, tokens = _shapes(tokenized, causal=causal, packed=False), tokenized.lengths

    def size(indices: NDArray[np.int64]) -> int:
        return int(tokens[indices].sum()) if packed else _positions(shape(indices), causal=causal)

    steps = range(plan.num_steps)
    return np.asarray([max(size(indices) for indices, _ in plan.step_places(step, rank)) for step in steps])


def step_shapes(
    plan: BatchPlan, tokenized: TokenizedSet, steps: int, *, causal: bool, packed: bool = False
) -> Iterator[list[tuple[Shape, NDArray[np.int64]]]]:
    """Yield for each rank in each of the first ``steps`` steps the shapes of its micro-batches and their rows.

    Any process, alone. Arguments as for :func:`padding_share`.
    """
    shape = _shapes(tokenized, causal=causal, packed=packed)
    for step in range(steps):
        for rank in range(plan.world_size):
            yield [(shape(indices), indices) for indices, _ in plan.step_places(step, rank)]


def _shapes(tokenized: TokenizedSet, *, causal: bool, packed: bool) -> Callable[[NDArray[np.int64]], Shape]:
    """Return the function from a micro-batch's rows to its shape."""
    # The lengths of all rows on each separately padded side.
    sides = [tokenized.lengths] if causal else [tokenized.source_ids.lengths, tokenized.target_ids.lengths]

    def shape(indices: NDArray[np.int64]) -> Shape:
        lengths = np.stack([side[indices] for side in sides], axis=1)
        if packed:
            lengths = np.stack([lengths[rows].sum(0) for rows in share_sequences(lengths.tolist())])
        longest = lengths.max(0)
        return len(lengths), int(longest[0]), int(longest[-1])

    return shape


def _positions(shape: Shape, *, causal: bool) -> int:
    sequences, source, target = shape
    return sequences * (source if causal else source + target)
