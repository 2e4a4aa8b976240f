"""The plan of an epoch: the rows of each rank, step and micro-batch; and the batches made from it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from math import ceil
from typing import Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from fullshard.errors import DataError
from fullshard.program.data.batching.collate import Batch, CollateSpec, RowRef, collate
from fullshard.program.data.batching.mixture import Mixture
from fullshard.program.data.tokenizing.tokenize import TokenizedSet

WINDOW_GROUPS = 50
"""Groups whose rows are sorted by length together; a larger number makes the order less random."""

STEPS_AHEAD = 2
"""Steps read ahead if ids are made on demand. Two, because one may be slow; each holds only its rows' ids."""

T = TypeVar("T")

Places = tuple[NDArray[np.int64], NDArray[np.bool_]]
"""Indices of rows, and which of them are fillers."""


class BatchPlan(Protocol):
    """The rows of one epoch, by optimizer step, rank and micro-batch."""

    @property
    def num_rows(self) -> int:
        """Rows of the set."""
        ...

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        ...

    @property
    def epoch(self) -> int:
        """Number of the epoch, from 0."""
        ...

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the epoch; the same in every epoch."""
        ...

    def step_places(self, step: int, rank: int) -> list[Places]:
        """Return the rows of each micro-batch of one rank in one step, both numbered from 0.

        Raises:
            DataError: There is no such rank.
        """
        ...

    def for_epoch(self, epoch: int) -> BatchPlan:
        """Return the same plan for another epoch."""
        ...


@dataclass(frozen=True, eq=False)
class EpochPlan:
    """The rows of one epoch for every rank, computed from a seed, so that all ranks agree without communication.

    The order is that of ``torch.utils.data.DistributedSampler``: a permutation drawn from ``seed + epoch``, extended
    from its start until the world size divides it, and distributed round-robin over the ranks. All ranks have the same
    number of micro-batches, of equal sizes. Repeated rows are fillers: every row counts exactly once, whatever the
    world size.

    The n-th micro-batches of all ranks together are ``world_size * batch_size`` consecutive places of one order, which
    depends on neither: a step has the same rows, however ranks, batch size and accumulation divide a global batch.

    With lengths, rows of similar length share a step, and those of most similar length a batch, which saves most of the
    padding. In training, rows are sorted by length within windows of 50 groups of ``group_rows`` rows of the same
    permutation; then the groups are shuffled. In evaluation, all rows are sorted, the longest first, so that memory
    peaks at the start.
    """

    num_rows: int  # rows of the set
    world_size: int  # number of ranks
    batch_size: int  # rows per micro-batch on one rank; the last one of an epoch may have fewer
    seed: int = 0  # seed of the run
    epoch: int = 0  # number of the epoch, from 0
    training: bool = True  # True: shuffled. False (evaluation): in the order of the set
    # length of each row, for grouping; None: rows are not grouped
    lengths: Sequence[int] | NDArray[np.int64] | None = None
    # rows per group in training; None: the global batch, so that a group is a step and does not depend on how it is
    # divided. Runs of earlier versions go on with a micro-batch of all ranks, with which they began
    group_rows: int | None = None
    accumulation: int = 1  # micro-batches per step; the last step of an epoch may have fewer
    mixture: Mixture | None = None  # in training, the mixture that rows are drawn from; None: each row once
    # rows next to each other that share every micro-batch; batch sizes and groups count such runs of rows
    together: int = 1

    def __post_init__(self) -> None:
        """Check the sizes.

        Raises:
            DataError: A size is not positive, or the numbers of lengths and rows differ.
        """
        for name in ("num_rows", "world_size", "batch_size", "group_rows", "accumulation"):
            size = getattr(self, name)
            if size is not None and size < 1:
                raise DataError(f"An epoch needs {name} of at least 1; got {size}.")
        if self.lengths is not None and len(self.lengths) != self.num_rows:
            raise DataError(f"An epoch of {self.num_rows} rows needs {self.num_rows} lengths; got {len(self.lengths)}.")
        assert self.num_rows % self.together == 0, "a set of pairs has two rows of each"

    @property
    def rows_per_rank(self) -> int:
        """Rows of one rank, or runs of rows that are together, fillers included."""
        return ceil(self.num_rows / self.together / self.world_size)

    @property
    def num_batches(self) -> int:
        """Micro-batches of one rank."""
        return ceil(self.rows_per_rank / self.batch_size)

    @property
    def num_steps(self) -> int:
        """See :class:`BatchPlan`."""
        return ceil(self.num_batches / self.accumulation)

    def for_epoch(self, epoch: int) -> EpochPlan:
        """See :class:`BatchPlan`."""
        return replace(self, epoch=epoch)

    def micro_batch(self, number: int, rank: int) -> Places:
        """Return the rows of one micro-batch of one rank, both numbered from 0."""
        size = self.batch_size * self.world_size
        mine = slice(number * size + rank, (number + 1) * size, self.world_size)
        indices, fillers = self._places
        if self.together == 1:
            return indices[mine], fillers[mine]
        rows = indices[mine, None] * self.together + np.arange(self.together)
        return rows.reshape(-1), np.repeat(fillers[mine], self.together)

    def step_places(self, step: int, rank: int) -> list[Places]:
        """See :class:`BatchPlan`."""
        require_rank(rank, self.world_size)
        first = step * self.accumulation
        return [self.micro_batch(n, rank) for n in range(first, min(first + self.accumulation, self.num_batches))]

    @cached_property
    def _places(self) -> Places:
        """The rows (or runs of rows) of all ranks, and which are fillers; rank r has each ``world_size``-th, from r."""
        generator, count = torch.Generator().manual_seed(self.seed + self.epoch), self.num_rows // self.together
        order = torch.randperm(count, generator=generator).numpy() if self.training else None
        if order is not None and self.mixture is not None:
            order = self.mixture.epoch_rows(self.epoch)[order]
        order = np.arange(count) if order is None else order
        places = np.arange(count, self.rows_per_rank * self.world_size)
        fillers = np.zeros(count + len(places), np.bool_)
        fillers[count:] = True
        repeated = order[places % count]
        if self.lengths is None:
            return np.concatenate([order, repeated]), fillers
        lengths = np.asarray(self.lengths).reshape(count, -1).sum(1)
        if self.training:
            # Fillers stay at the end; otherwise the order would depend on their number, and so on the world size.
            return np.concatenate([self._grouped(order, lengths, generator), repeated]), fillers
        everything = np.concatenate([order, repeated])
        by_length = np.argsort(-lengths[everything], kind="stable")
        return everything[by_length], fillers[by_length]

    def _grouped(
        self, order: NDArray[np.int64], lengths: NDArray[np.int64], generator: torch.Generator
    ) -> NDArray[np.int64]:
        """Reorder the rows so that each group has rows of similar length."""
        size = self.group_rows or self.world_size * self.batch_size * self.accumulation
        windows = np.arange(len(order)) // (WINDOW_GROUPS * size)
        # By window, then the longest first; rows of equal length stay in order.
        order = order[np.lexsort((-lengths[order], windows))]
        # Only full groups are permuted: a short one would shift all that follow.
        num_full = len(order) // size
        places = torch.randperm(num_full, generator=generator).numpy()
        full = order[: num_full * size].reshape(num_full, size)[places]
        return np.concatenate([full.ravel(), order[num_full * size :]])


def batches(
    tokenized: TokenizedSet, plan: EpochPlan, rank: int, spec: CollateSpec, *, start: int = 0
) -> Iterator[Batch]:
    """Yield the ``plan.num_batches - start`` micro-batches of one rank for one epoch; otherwise as :func:`steps`."""
    require_rows(plan, tokenized)
    require_rank(rank, plan.world_size)
    for number in range(start, plan.num_batches):
        yield collate(row_refs(plan.micro_batch(number, rank)), tokenized, spec)


def steps(
    tokenized: TokenizedSet, plan: BatchPlan, rank: int, spec: CollateSpec, *, start: int = 0
) -> Generator[list[Batch]]:
    """Yield the micro-batches of one rank for each step of an epoch, on the CPU; all ranks have the same number.

    Args:
        tokenized: The set, the same on all ranks.
        plan: The epoch, the same on all ranks.
        rank: The calling rank.
        spec: Padding and the kind of model.
        start: Steps to skip without making their batches.

    Yields:
        At least one batch for each of ``plan.num_steps - start`` steps.

    Raises:
        DataError: The plan was made for another number of rows.
    """
    require_rows(plan, tokenized)
    tokenized = tokenized.for_epoch(plan.epoch)
    coming = deque[list[Places]]()

    def rows_of_steps() -> Iterator[Sequence[int]]:
        for step in range(start, plan.num_steps):
            coming.append(plan.step_places(step, rank))
            yield np.unique(np.concatenate([indices for indices, _ in coming[-1]])).tolist()

    def collated(rows: TokenizedSet) -> list[Batch]:
        return [collate(row_refs(places), rows, spec) for places in coming.popleft()]

    yield from read_ahead(tokenized, rows_of_steps(), collated)


def read_ahead(
    tokenized: TokenizedSet, wanted: Iterator[Sequence[int]], use: Callable[[TokenizedSet], T]
) -> Generator[T]:
    """Yield ``use`` of each step's rows, which are read ahead into memory if the set makes ids on demand.

    ``wanted`` are the rows of each step, ascending. ``use`` is called in the order of the steps, in the caller's
    thread. A row that cannot be read raises DataError when its step is due.
    """
    if tokenized.source is None:
        for _ in wanted:
            yield use(tokenized)
        return
    with ThreadPoolExecutor(1, "tokenize-ahead") as worker:
        waiting: deque[Future[TokenizedSet]] = deque()
        try:
            for rows in islice(wanted, STEPS_AHEAD):
                waiting.append(worker.submit(tokenized.taken, rows))
            while waiting:
                made = use(waiting.popleft().result())
                # Started only here: the thread competes for the GIL with ``use``, which then took 3 ms instead of 1.
                waiting += [worker.submit(tokenized.taken, rows) for rows in islice(wanted, 1)]
                yield made
        finally:
            for left in waiting:
                left.cancel()


def require_rank(rank: int, world_size: int) -> None:
    """Raise DataError if there is no such rank."""
    if not 0 <= rank < world_size:
        raise DataError(f"There is no rank {rank}: ranks are 0 to {world_size - 1}.")


def require_rows(plan: BatchPlan, tokenized: TokenizedSet) -> None:
    """Raise DataError if a plan is for another number of rows."""
    if plan.num_rows != len(tokenized):
        raise DataError(f"The plan is for {plan.num_rows} rows, the set has {len(tokenized)}.")


def row_refs(places: Places) -> list[RowRef]:
    """Convert a micro-batch's arrays to rows."""
    indices, fillers = places
    return [RowRef(index, filler) for index, filler in zip(indices.tolist(), fillers.tolist(), strict=True)]
