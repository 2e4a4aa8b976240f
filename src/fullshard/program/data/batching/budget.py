"""Plan of an epoch whose micro-batches have a budget of tokens instead of a number of rows."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import ceil

import numpy as np
import torch
from numpy.typing import NDArray

from fullshard.errors import DataError
from fullshard.program.data.batching.shapes import Shape
from fullshard.program.data.batching.stream import Places, require_rank

ROUNDING_BITS = 3
"""Lengths are rounded up to this many binary digits after the first: by at most 1/8."""


@dataclass(frozen=True)
class _Sorted:
    """The rows sorted by length, the same in every epoch."""

    order: NDArray[np.int64]  # all rows, similar lengths together, the longest sources first
    classes: NDArray[np.int64]  # for each of them the number of its class, ascending. Rows of one class may be permuted
    bounds: NDArray[np.int64]  # start of each step in ``order``, and the end of the last
    costs: NDArray[np.int64]  # for each step the maximum positions of a row, including padding


@dataclass(frozen=True, eq=False)
class TokenPlan:
    """The rows of one epoch for every rank, with as many rows per micro-batch as fit into a budget of tokens.

    Rows are sorted by lengths rounded up (by at most 1/8): sources from long to short, and within one rounded source
    length the targets alternately up and down, so that neighbors are similar in both. Steps are runs of this order, as
    long as the budget allows at the rounded lengths. The runs are the same in every epoch, and so is their number,
    which the learning rate schedule needs in advance. The epoch's seed decides which rows of equal rounded lengths are
    in which run, and the order of the runs. (Cutting runs from a shuffled order would be more random, but the number
    of steps would differ between epochs.) Rows are padded to their true lengths, so rounding costs no padding; it only
    leaves part of the budget unused.

    All ranks have the same number of micro-batches in a step, of equal sizes. Rows repeated for this are fillers, which
    do not count in loss and metrics.
    """

    source_lengths: NDArray[np.int64]  # source tokens of each row of the set
    target_lengths: NDArray[np.int64]  # target tokens of each row
    causal: bool  # whether source and target are padded as one sequence
    world_size: int  # number of ranks
    # maximum positions of a micro-batch on one rank: rows times (longest source + longest target), or times the longest
    # joined row
    batch_tokens: int
    accumulation: int = 1  # maximum micro-batches per step; the same number on all ranks
    seed: int = 0  # seed of the run
    epoch: int = 0  # number of the epoch, from 0
    # micro-batches over all ranks for which a step's rows are chosen; None: ``world_size * accumulation``. A run that
    # resumes with another world size keeps its initial value, and so the rows of each step; then ``world_size *
    # accumulation * batch_tokens`` must be unchanged
    group: int | None = None

    def __post_init__(self) -> None:
        """Check that every row fits.

        Raises:
            DataError: A size is not positive, there are no rows, or a row is longer than the budget.
        """
        for name in ("num_rows", "world_size", "batch_tokens", "accumulation", "group"):
            size = getattr(self, name)
            if size is not None and size < 1:
                raise DataError(f"An epoch needs {name} of at least 1; got {size}.")
        longest = int((self.source_lengths + self.target_lengths).max())
        if longest > min(self.batch_tokens, self._group_tokens):
            raise DataError(
                f"A micro-batch may have {min(self.batch_tokens, self._group_tokens):,} tokens, and the longest row "
                f"has {longest:,}, source and target together: raise training.per_device_train_batch_tokens to at "
                "least that, or lower data.max_source_length."
            )

    @property
    def num_rows(self) -> int:
        """Rows of the set."""
        return len(self.source_lengths)

    @property
    def num_steps(self) -> int:
        """See :class:`~fullshard.program.data.batching.stream.BatchPlan`."""
        return len(self._sorted.costs)

    def for_epoch(self, epoch: int) -> TokenPlan:
        """Return the same plan for another epoch; the sorting is shared."""
        plan = replace(self, epoch=epoch)
        plan.__dict__["_sorted"] = self._sorted
        return plan

    def largest_shapes(self) -> dict[Shape, int]:
        """Return shapes that hold every micro-batch of every epoch, and on one rank the micro-batches of each."""
        found, runs = Counter[Shape](), self._sorted
        sources, targets = self.source_lengths, self.target_lengths
        if self.causal:
            sources = targets = sources + targets
        starts = np.flatnonzero(np.diff(runs.classes, prepend=-1))
        most = [np.maximum.reduceat(lengths[runs.order], starts) for lengths in (sources, targets)]
        for run, (first, last) in enumerate(pairwise(runs.bounds.tolist())):
            classes = slice(int(runs.classes[first]), int(runs.classes[last - 1]) + 1)
            each, count = self._rows_each(run, last - first)
            found[each, int(most[0][classes].max()), int(most[1][classes].max())] += count
        return dict(found)

    def step_places(self, step: int, rank: int) -> list[Places]:
        """See :class:`~fullshard.program.data.batching.stream.BatchPlan`."""
        require_rank(rank, self.world_size)
        order, runs = self._shuffled
        run = int(runs[step])
        rows = order[self._sorted.bounds[run] : self._sorted.bounds[run + 1]]
        per_rank = ceil(len(rows) / self.world_size)
        places = np.arange(per_rank * self.world_size)
        size = self._rows_each(run, len(rows))[0] * self.world_size
        mine = [places[start : start + size][rank :: self.world_size] for start in range(0, len(places), size)]
        return [(rows[some % len(rows)], some >= len(rows)) for some in mine]

    def _rows_each(self, run: int, rows: int) -> tuple[int, int]:
        """Return the rows of a micro-batch of a run of so many rows, and the micro-batches of one rank."""
        per_rank = ceil(rows / self.world_size)
        count = ceil(per_rank / max(1, self.batch_tokens // int(self._sorted.costs[run])))
        return ceil(per_rank / count), count

    @property
    def _cells(self) -> int:
        return self.group or self.world_size * self.accumulation

    @property
    def _group_tokens(self) -> int:
        """The budget of a micro-batch at the start of the run."""
        return self.world_size * self.accumulation * self.batch_tokens // self._cells

    @cached_property
    def _shuffled(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The epoch's rows, and the order of the steps' runs."""
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        chance = torch.randperm(self.num_rows, generator=generator).numpy()
        order = self._sorted.order[np.lexsort((chance, self._sorted.classes))]
        return order, torch.randperm(self.num_steps, generator=generator).numpy()

    @cached_property
    def _sorted(self) -> _Sorted:
        """Rows by rounded lengths, cut into steps."""
        sources, targets = self.source_lengths, self.target_lengths
        if self.causal:
            sources, targets = sources + targets, np.zeros_like(targets)
        sources, targets = _rounded_up(sources), _rounded_up(targets)
        # Targets go down within one source length and up within the next.
        _, source_rank = np.unique(-sources, return_inverse=True)
        keys = np.where(source_rank % 2 == 0, -targets, targets)
        order = np.lexsort((keys, source_rank))
        sources, targets = sources[order], targets[order]
        changes = (np.diff(sources) != 0) | (np.diff(targets) != 0)
        classes = np.concatenate([np.zeros(1, np.int64), np.cumsum(changes)])
        bounds, costs = _runs(sources, targets, classes, self._cells, self._group_tokens)
        return _Sorted(order, classes, bounds, costs)


def _rounded_up(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Round lengths up to a few binary digits."""
    digits = np.frexp(lengths.astype(np.float64))[1]  # 2 ** (digits - 1) <= length < 2 ** digits
    unit = np.int64(1) << np.maximum(0, digits - 1 - ROUNDING_BITS).astype(np.int64)
    return -(-lengths // unit) * unit


def _runs(
    sources: NDArray[np.int64], targets: NDArray[np.int64], classes: NDArray[np.int64], cells: int, tokens: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the runs of sorted rows that fit into ``cells`` micro-batches of ``tokens`` positions.

    They are the start of each run and the end of the last, and the maximum positions of a row in each.
    """
    bounds, costs, start, total = [0], [], 0, len(sources)
    while start < total:
        cost = int(sources[start] + targets[start])
        end = min(total, start + cells * max(1, tokens // cost))
        if classes[end - 1] != classes[start]:
            span = slice(start, end)
            most = np.maximum.accumulate(sources[span]) + np.maximum.accumulate(targets[span])
            fits = np.arange(1, end - start + 1) <= cells * np.maximum(1, tokens // most)
            end = start + (end - start if fits.all() else int(np.argmin(fits)))
            cost = int(most[end - start - 1])
        bounds.append(end)
        costs.append(cost)
        start = end
    return np.asarray(bounds), np.asarray(costs)
