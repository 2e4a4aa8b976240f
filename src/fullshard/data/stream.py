"""Which rows each rank sees in which micro-batch, and the batches themselves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil

import torch

from fullshard.data.collate import Batch, CollateSpec, RowRef, collate
from fullshard.data.tokenize import TokenizedSet
from fullshard.errors import DataError

WINDOW_BATCHES = 50
"""Global batches whose rows are sorted by length together; more would leave less to chance."""


@dataclass(frozen=True)
class EpochPlan:
    """The rows of one epoch for every rank; arithmetic and a seed, so all ranks agree without talking.

    The order is that of ``torch.utils.data.DistributedSampler``: a permutation drawn from ``seed + epoch``, continued
    from its start until the world size divides it, dealt to the ranks in turn. All ranks have equally many
    micro-batches, of equal sizes.

    Given lengths, rows of similar length share a batch, which saves most of the padding. Training: within windows of
    50 global batches, taken from the same permutation, rows are sorted by length; then the batches are shuffled.
    Evaluation: all rows are sorted, the longest first, so that memory peaks at the start.

    Attributes:
        num_rows: Rows of the set.
        world_size: Number of ranks.
        batch_size: Rows of a micro-batch on one rank; the last of an epoch may have fewer.
        seed: Seed of the run.
        epoch: Number of the epoch, from 0.
        training: True: shuffled, and the repeated rows train like any other. False (evaluation): in order, and
            repeated rows are marked as fillers, so that every row counts exactly once.
        lengths: Length of each row of the set, to group rows by; None: rows are not grouped.
    """

    num_rows: int
    world_size: int
    batch_size: int
    seed: int = 0
    epoch: int = 0
    training: bool = True
    lengths: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        """Check the sizes.

        Raises:
            DataError: A size is not positive, or there are more or fewer lengths than rows.
        """
        for name in ("num_rows", "world_size", "batch_size"):
            if getattr(self, name) < 1:
                raise DataError(f"An epoch needs {name} of at least 1; got {getattr(self, name)}.")
        if self.lengths is not None and len(self.lengths) != self.num_rows:
            raise DataError(f"An epoch of {self.num_rows} rows needs as many lengths; got {len(self.lengths)}.")

    @property
    def rows_per_rank(self) -> int:
        """Rows of one rank, repeated rows included."""
        return ceil(self.num_rows / self.world_size)

    @property
    def num_batches(self) -> int:
        """Micro-batches of one rank."""
        return ceil(self.rows_per_rank / self.batch_size)

    def rank_rows(self, rank: int) -> list[RowRef]:
        """The rows of one rank, in order.

        Args:
            rank: From 0 to ``world_size - 1``.

        Returns:
            ``rows_per_rank`` rows.

        Raises:
            DataError: There is no such rank.
        """
        if not 0 <= rank < self.world_size:
            raise DataError(f"Rank {rank} has no rows: ranks go from 0 to {self.world_size - 1}.")
        return self._all_rows()[rank :: self.world_size]

    def micro_batches(self, rank: int) -> list[list[RowRef]]:
        """The rows of one rank, cut into micro-batches.

        Args:
            rank: From 0 to ``world_size - 1``.

        Returns:
            ``num_batches`` lists of rows.

        Raises:
            DataError: There is no such rank.
        """
        return _cut(self.rank_rows(rank), self.batch_size)

    def _all_rows(self) -> list[RowRef]:
        """The rows of all ranks: rank r has every ``world_size``-th from r on."""
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        if self.training:
            order = torch.randperm(self.num_rows, generator=generator).tolist()
        else:
            order = list(range(self.num_rows))
        rows = [
            RowRef(order[position % self.num_rows], filler=not self.training and position >= self.num_rows)
            for position in range(self.rows_per_rank * self.world_size)
        ]
        return rows if self.lengths is None else self._grouped(rows, self.lengths, generator)

    def _grouped(self, rows: list[RowRef], lengths: tuple[int, ...], generator: torch.Generator) -> list[RowRef]:
        """The same rows in an order in which each global batch holds rows of similar length."""

        def by_length(some: list[RowRef]) -> list[RowRef]:
            return sorted(some, key=lambda row: -lengths[row.index])

        if not self.training:
            return by_length(rows)
        global_batch = self.world_size * self.batch_size
        windows = _cut(rows, WINDOW_BATCHES * global_batch)
        global_batches = _cut([row for window in windows for row in by_length(window)], global_batch)
        # Only full batches change places: a short one that came earlier would shift what the ranks deal out.
        num_full = len(rows) // global_batch
        places = [*torch.randperm(num_full, generator=generator).tolist(), *range(num_full, len(global_batches))]
        return [row for place in places for row in global_batches[place]]


def _cut(rows: list[RowRef], size: int) -> list[list[RowRef]]:
    """Rows in consecutive pieces; the last may be shorter."""
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def batches(tokenized: TokenizedSet, plan: EpochPlan, rank: int, spec: CollateSpec) -> Iterator[Batch]:
    """The batches of one rank for one epoch, on the CPU. Each rank calls it with its own rank and the same plan.

    Args:
        tokenized: The set, equal on all ranks.
        plan: The epoch.
        rank: The calling rank.
        spec: Padding and the kind of model.

    Yields:
        ``plan.num_batches`` batches.

    Raises:
        DataError: The plan was made for another number of rows.
    """
    if plan.num_rows != len(tokenized):
        raise DataError(f"The plan is for {plan.num_rows} rows, the set has {len(tokenized)}.")
    for rows in plan.micro_batches(rank):
        yield collate(rows, tokenized, spec)
