"""Which rows each rank sees in which micro-batch, and the batches themselves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil

import torch

from fullshard.data.collate import Batch, CollateSpec, RowRef, collate
from fullshard.data.tokenize import TokenizedSet
from fullshard.errors import DataError

WINDOW_GROUPS = 50
"""Groups whose rows are sorted by length together; more would leave less to chance."""


@dataclass(frozen=True)
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
    """

    num_rows: int
    world_size: int
    batch_size: int
    seed: int = 0
    epoch: int = 0
    training: bool = True
    lengths: tuple[int, ...] | None = None
    group_rows: int | None = None

    def __post_init__(self) -> None:
        """Check the sizes.

        Raises:
            DataError: A size is not positive, or there are more or fewer lengths than rows.
        """
        for name in ("num_rows", "world_size", "batch_size", "group_rows"):
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
        rows = [RowRef(index) for index in order]
        places = range(self.num_rows, self.rows_per_rank * self.world_size)
        fillers = [RowRef(order[place % self.num_rows], filler=True) for place in places]
        if self.lengths is None:
            return rows + fillers
        if self.training:
            # Fillers stay at the end, or the order would depend on their number, which is the ranks'.
            return self._grouped(rows, self.lengths, generator) + fillers
        return _by_length(rows + fillers, self.lengths)

    def _grouped(self, rows: list[RowRef], lengths: tuple[int, ...], generator: torch.Generator) -> list[RowRef]:
        """The same rows in an order in which each group holds rows of similar length."""
        size = self.group_rows or self.world_size * self.batch_size
        windows = _cut(rows, WINDOW_GROUPS * size)
        groups = _cut([row for window in windows for row in _by_length(window, lengths)], size)
        # Only full groups change places: a short one that came earlier would shift all that follow.
        num_full = len(rows) // size
        places = [*torch.randperm(num_full, generator=generator).tolist(), *range(num_full, len(groups))]
        return [row for place in places for row in groups[place]]


def _by_length(rows: list[RowRef], lengths: tuple[int, ...]) -> list[RowRef]:
    """The longest first; rows of one length stay in order."""
    return sorted(rows, key=lambda row: -lengths[row.index])


def _cut(rows: list[RowRef], size: int) -> list[list[RowRef]]:
    """Rows in consecutive pieces; the last may be shorter."""
    return [rows[start : start + size] for start in range(0, len(rows), size)]


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
    if plan.num_rows != len(tokenized):
        raise DataError(f"The plan is for {plan.num_rows} rows, the set has {len(tokenized)}.")
    for rows in plan.micro_batches(rank)[start:]:
        yield collate(rows, tokenized, spec)
