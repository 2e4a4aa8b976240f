"""The shapes of batches and their share of padding, computed from lengths."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from fullshard.program.data.batching.budget import TokenPlan
from fullshard.program.data.batching.collate import CollateSpec
from fullshard.program.data.batching.shapes import Shape, choose_shapes, fit, positions, share_sequences
from fullshard.program.data.batching.stream import BatchPlan, EpochPlan
from fullshard.program.data.tokenizing.tokenize import TokenizedSet

SAMPLED_STEPS = 500
"""Number of evenly spaced steps that are examined in a longer epoch."""

SAMPLED_BATCHES = 2000
"""Approximate number of micro-batches among which fixed shapes are chosen."""


def padding_share(plan: BatchPlan, tokenized: TokenizedSet, spec: CollateSpec) -> float:
    """Return the share of positions that are padding or fillers, over all ranks and one epoch. Any rank can call it.

    Args:
        plan: The epoch; if it has more than 500 steps, about 500 are examined.
        tokenized: The set.
        spec: Padding or packing, and the kind of model.

    Returns:
        From 0 (no padding) to below 1.
    """
    shape, tokens = _shapes(tokenized, spec), tokenized.lengths
    real = total = 0
    for step in range(0, plan.num_steps, -(-plan.num_steps // SAMPLED_STEPS)):
        for rank in range(plan.world_size):
            for indices, fillers in plan.step_places(step, rank):
                real += int(tokens[indices[~fillers]].sum())
                total += sum(positions(shape(one), causal=spec.causal) for one in tokenized.forwards(indices))
    return 1 - real / total


def fixed_shapes(plan: BatchPlan, tokenized: TokenizedSet, spec: CollateSpec) -> tuple[Shape, ...]:
    """Return a few shapes that hold every micro-batch of every epoch, the same in every process; any rank, alone.

    They are chosen for the micro-batches of a sample of the first epoch's steps. With a budget of tokens, runs of rows
    are the same in each epoch, and the shapes hold the longest rows that each run may get.

    Args:
        plan: The first epoch.
        tokenized: The set. If its lengths are estimated, shapes hold the longest rows that the settings allow.
        spec: Padding or packing, and the kind of model.
    """
    both = [(tokenized.source_ids, tokenized.source_stats), (tokenized.target_ids, tokenized.target_stats)]
    limits = [stats.limit if tokenized.estimated else int(ids.lengths.max()) for ids, stats in both]
    joined = sum(limits) if tokenized.estimated else int(tokenized.lengths.max())
    longest = (joined, joined) if spec.causal else (limits[0], limits[1])
    found, bounds, fewest = Counter[Shape](), dict[Shape, float](), 0
    if isinstance(plan, TokenPlan):
        # Packed rows need them only where no other shape holds them: one in a hundred at most.
        bounds = {shape: count * (0.01 if spec.packed else 1) for shape, count in plan.largest_shapes().items()}
    else:
        assert isinstance(plan, EpochPlan), "there are two kinds of plans"
        most = min(plan.batch_size, plan.rows_per_rank) * (plan.together if tokenized.desirable is None else 1)
        bounds, fewest = {(most, *longest): 0.0}, 0 if spec.packed else most  # fillers make all batches equally large
    if spec.packed or not isinstance(plan, TokenPlan):
        shape = _shapes(tokenized, replace(spec, shapes=()))
        for step in range(0, plan.num_steps, max(1, plan.num_steps * plan.world_size // SAMPLED_BATCHES)):
            for rank in range(plan.world_size):
                batches = chain.from_iterable(tokenized.forwards(one) for one, _ in plan.step_places(step, rank))
                for sequences, source, target in map(shape, batches):
                    found[max(sequences, fewest), source, target] += 1
    return choose_shapes({**bounds, **found}, causal=spec.causal, longest=longest)


def step_sizes(plan: BatchPlan, tokenized: TokenizedSet, rank: int, spec: CollateSpec) -> NDArray[np.int64]:
    """Return the positions of one rank's largest micro-batch in each of ``plan.num_steps`` steps.

    For packed micro-batches it is their tokens, nearly the same. Arguments as for :func:`padding_share`.
    """
    own = replace(spec, packed=False, shapes=()) if spec.packed else spec
    shape, tokens = _shapes(tokenized, own), tokenized.lengths

    def size(indices: NDArray[np.int64]) -> int:
        if spec.packed:
            return int(tokens[indices].sum())
        return sum(positions(shape(one), causal=spec.causal) for one in tokenized.forwards(indices))

    steps = range(plan.num_steps)
    return np.asarray([max(size(indices) for indices, _ in plan.step_places(step, rank)) for step in steps])


def step_shapes(
    plan: BatchPlan, tokenized: TokenizedSet, steps: int, spec: CollateSpec
) -> Iterator[list[tuple[Shape, NDArray[np.int64]]]]:
    """Yield for each rank in each of the first ``steps`` steps the shapes of its micro-batches and their rows.

    Any process, alone. Arguments as for :func:`padding_share`.
    """
    shape = _shapes(tokenized, spec)
    for step in range(steps):
        for rank in range(plan.world_size):
            places = [indices for indices, _ in plan.step_places(step, rank)]
            # With labels, of the forward with gradients.
            yield [(shape(tokenized.forwards(indices)[0]), indices) for indices in places]


def _shapes(tokenized: TokenizedSet, spec: CollateSpec) -> Callable[[NDArray[np.int64]], Shape]:
    """Return the function from a micro-batch's rows to its shape."""
    # The lengths of all rows on each separately padded side.
    sides = [tokenized.lengths] if spec.causal else [tokenized.source_ids.lengths, tokenized.target_ids.lengths]

    def shape(indices: NDArray[np.int64]) -> Shape:
        lengths = np.stack([side[indices] for side in sides], axis=1)
        if spec.shapes:
            return fit(spec.shapes, lengths.tolist(), packed=spec.packed)[0]
        if spec.packed:
            lengths = np.stack([lengths[rows].sum(0) for rows in share_sequences(lengths.tolist())])
        longest = lengths.max(0).clip(spec.shortest)
        return len(lengths), int(longest[0]), int(longest[-1])

    return shape
