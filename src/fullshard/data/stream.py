"""Which rows each rank sees in which micro-batch of which step, and the batches themselves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from fullshard.data.collate import Batch, CollateSpec, RowRef, collate
from fullshard.data.tokenize import TokenizedSet
from fullshard.errors import DataError

WINDOW_GROUPS = 50
"""Groups whose rows are sorted by length together; more would leave less to chance."""


Places = tuple[NDArray[np.int64], NDArray[np.bool_]]
"""Indices of rows, and which of them are fillers."""


class Plan(Protocol):
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
    def num_steps(self) -> int:
        """Optimizer steps of the epoch; the same in every epoch."""
        ...

    def step_places(self, step: int, rank: int) -> list[Places]:
        """The rows of each of one rank's micro-batches of one step, from 0."""
        ...

    def for_epoch(self, epoch: int) -> Plan:
        """The same plan for another epoch."""
        ...


@dataclass(frozen=True, eq=False)
class EpochPlan:
    """The rows of one epoch for every rank; arithmetic and a seed, so all ranks agree without talking.

    The order is that of ``torch.utils.data.DistributedSampler``: a permutation drawn from ``seed + epoch``, continued
    from its start until the world size divides it, and dealt to the ranks in turn. All ranks have equally many
    micro-batches, of equal sizes. Repeated rows are fillers: every row counts exactly once, whatever the world size.

    So the n-th micro-batches of all ranks are together a run of ``world_size * batch_size`` places of one order, which
    depends on none of the two: however ranks, batch size and accumulation share a global batch, a step has the same
    rows.

    Given lengths, rows of similar length share a batch, which saves most of the padding. Training: within windows of
    50 groups of ``group_rows`` rows, taken from the same permutation, rows are sorted by length; then the groups are
    shuffled. Evaluation: all rows are sorted, the longest first, so that memory peaks at the start.

    Attributes:
        num_rows: Rows of the set.
        world_size: Number of ranks.
        batch_size: Rows of a micro-batch on one rank; the last of an epoch may have fewer.
        seed: Seed of the run.
        epoch: Number of the epoch, from 0.
        training: True: shuffled. False (evaluation): in the order of the set.
        lengths: Length of each row of the set, to group rows by; None: rows are not grouped.
        group_rows: Rows of a group in training; None: ``world_size * batch_size``, so that a group is one micro-batch
            of all ranks. A run that goes on with other ranks keeps the groups that it began with.
        accumulation: Micro-batches of a step; the last step of an epoch may have fewer.
    """

    num_rows: int
    world_size: int
    batch_size: int
    seed: int = 0
    epoch: int = 0
    training: bool = True
    lengths: Sequence[int] | NDArray[np.int64] | None = None
    group_rows: int | None = None
    accumulation: int = 1

    def __post_init__(self) -> None:
        """Check the sizes.

        Raises:
            DataError: A size is not positive, or there are more or fewer lengths than rows.
        """
        for name in ("num_rows", "world_size", "batch_size", "group_rows", "accumulation"):
            size = getattr(self, name)
            if size is not None and size < 1:
                raise DataError(f"An epoch needs {name} of at least 1; got {size}.")
        if self.lengths is not None and len(self.lengths) != self.num_rows:
            raise DataError(f"An epoch of {self.num_rows} rows needs as many lengths; got {len(self.lengths)}.")

    @property
    def rows_per_rank(self) -> int:
        """Rows of one rank, fillers included."""
        return ceil(self.num_rows / self.world_size)

    @property
    def num_batches(self) -> int:
        """Micro-batches of one rank."""
        return ceil(self.rows_per_rank / self.batch_size)

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the epoch."""
        return ceil(self.num_batches / self.accumulation)

    def for_epoch(self, epoch: int) -> EpochPlan:
        """The same plan for another epoch."""
        return replace(self, epoch=epoch)

    def rank_rows(self, rank: int) -> list[RowRef]:
        """The rows of one rank, in order.

        Args:
            rank: From 0 to ``world_size - 1``.

        Returns:
            ``rows_per_rank`` rows.

        Raises:
            DataError: There is no such rank.
        """
        require_rank(rank, self.world_size)
        return row_refs(self._of_rank(rank, 0, None))

    def micro_batches(self, rank: int) -> list[list[RowRef]]:
        """The rows of one rank, cut into micro-batches.

        Args:
            rank: From 0 to ``world_size - 1``.

        Returns:
            ``num_batches`` lists of rows.

        Raises:
            DataError: There is no such rank.
        """
        require_rank(rank, self.world_size)
        return [row_refs(self.micro_batch(number, rank)) for number in range(self.num_batches)]

    def micro_batch(self, number: int, rank: int) -> Places:
        """The rows of one micro-batch of one rank, both from 0."""
        return self._of_rank(rank, number * self.batch_size, (number + 1) * self.batch_size)

    def step_places(self, step: int, rank: int) -> list[Places]:
        """The rows of each of one rank's micro-batches of one step.

        Args:
            step: From 0 to ``num_steps - 1``.
            rank: From 0 to ``world_size - 1``.

        Raises:
            DataError: There is no such rank.
        """
        require_rank(rank, self.world_size)
        first = step * self.accumulation
        return [self.micro_batch(n, rank) for n in range(first, min(first + self.accumulation, self.num_batches))]

    def _of_rank(self, rank: int, start: int, end: int | None) -> Places:
        """A rank's rows from one place to another."""
        stop = None if end is None else end * self.world_size
        mine = slice(start * self.world_size + rank, stop, self.world_size)
        indices, fillers = self._places
        return indices[mine], fillers[mine]

    @cached_property
    def _places(self) -> Places:
        """The rows of all ranks, and which are fillers: rank r has every ``world_size``-th from r on."""
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(self.num_rows, generator=generator).numpy() if self.training else None
        order = np.arange(self.num_rows) if order is None else order
        places = np.arange(self.num_rows, self.rows_per_rank * self.world_size)
        fillers = np.zeros(self.num_rows + len(places), np.bool_)
        fillers[self.num_rows :] = True
        repeated = order[places % self.num_rows]
        if self.lengths is None:
            return np.concatenate([order, repeated]), fillers
        lengths = np.asarray(self.lengths)
        if self.training:
            # Fillers stay at the end, or the order would depend on their number, which is the ranks'.
            return np.concatenate([self._grouped(order, lengths, generator), repeated]), fillers
        everything = np.concatenate([order, repeated])
        by_length = np.argsort(-lengths[everything], kind="stable")
        return everything[by_length], fillers[by_length]

    def _grouped(
        self, order: NDArray[np.int64], lengths: NDArray[np.int64], generator: torch.Generator
    ) -> NDArray[np.int64]:
        """The same rows in an order in which each group holds rows of similar length."""
        size = self.group_rows or self.world_size * self.batch_size
        windows = np.arange(len(order)) // (WINDOW_GROUPS * size)
        # By window, then the longest first; rows of one length stay in order.
        order = order[np.lexsort((-lengths[order], windows))]
        # Only full groups change places: a short one that came earlier would shift all that follow.
        num_full = len(order) // size
        places = torch.randperm(num_full, generator=generator).numpy()
        full = order[: num_full * size].reshape(num_full, size)[places]
        return np.concatenate([full.ravel(), order[num_full * size :]])


def batches(
    tokenized: TokenizedSet, plan: EpochPlan, rank: int, spec: CollateSpec, *, start: int = 0
) -> Iterator[Batch]:
    """The batches of one rank for one epoch, on the CPU. Each rank calls it with its own rank and the same plan.

    Args:
        tokenized: The set, equal on all ranks.
        plan: The epoch.
        rank: The calling rank.
        spec: Padding and the kind of model.
        start: Micro-batches to skip; they are not made.

    Yields:
        ``plan.num_batches - start`` batches.

    Raises:
        DataError: The plan was made for another number of rows.
    """
    require_rows(plan, tokenized)
    require_rank(rank, plan.world_size)
    for number in range(start, plan.num_batches):
        yield collate(row_refs(plan.micro_batch(number, rank)), tokenized, spec)


def steps(
    tokenized: TokenizedSet, plan: Plan, rank: int, spec: CollateSpec, *, start: int = 0
) -> Iterator[list[Batch]]:
    """The micro-batches of one rank for each step of an epoch, on the CPU; all ranks have equally many in each.

    Args:
        tokenized: The set, equal on all ranks.
        plan: The epoch, equal on all ranks.
        rank: The calling rank.
        spec: Padding and the kind of model.
        start: Steps to skip; their batches are not made.

    Yields:
        For ``plan.num_steps - start`` steps at least one batch each.

    Raises:
        DataError: The plan was made for another number of rows.
    """
    require_rows(plan, tokenized)
    for step in range(start, plan.num_steps):
        yield [collate(row_refs(places), tokenized, spec) for places in plan.step_places(step, rank)]


def require_rank(rank: int, world_size: int) -> None:
    """Raise when there is no such rank.

    Raises:
        DataError: There is none.
    """
    if not 0 <= rank < world_size:
        raise DataError(f"Rank {rank} has no rows: ranks go from 0 to {world_size - 1}.")


def require_rows(plan: Plan, tokenized: TokenizedSet) -> None:
    """Raise when a plan is for another set.

    Raises:
        DataError: It has another number of rows.
    """
    if plan.num_rows != len(tokenized):
        raise DataError(f"The plan is for {plan.num_rows} rows, the set has {len(tokenized)}.")


def row_refs(places: Places) -> list[RowRef]:
    """Rows of a micro-batch from arrays."""
    indices, fillers = places
    return [RowRef(index, filler) for index, filler in zip(indices.tolist(), fillers.tolist(), strict=True)]
