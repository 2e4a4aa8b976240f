"""Exchange of tokens: ids are sent to the ranks that own their rows, rows come back, gradients go to the owners.

A rank sends, for N ranks, L distinct rows that it looks up, width d, and b bytes an element: 8 (N-1) for the
counts, 8 L (N-1)/N for the ids, and L d b (N-1)/N for the rows, on average; backward sends as much for their gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from fullshard.core.engine.tables.rows import TableRows


@dataclass(frozen=True)
class Trip:
    """One lookup: the rows this rank asked for, and the rows it was asked for.

    Attributes:
        places: For each id, the index of its row among those asked for; in the shape of the ids.
        asked: Number of distinct rows that this rank asked of each rank.
        answered: Number of rows that each rank asked of this one.
        wanted: Those rows, counted from this rank's first row, ordered by asking rank; (sum(answered),), int64.
    """

    places: torch.Tensor
    asked: list[int]
    answered: list[int]
    wanted: torch.Tensor


def ask(table: TableRows, ids: torch.Tensor) -> Trip:
    """Send ids to the ranks that own their rows. Every rank that shares the table calls it.

    Args:
        table: The table.
        ids: Rows to look up, any shape, int32 or int64; each is a row of the table.
    """
    rows, places = torch.unique(ids.long(), return_inverse=True)  # ascending: grouped by owner
    ends = torch.searchsorted(rows, table.bounds[1:])
    counts = torch.diff(ends, prepend=ends.new_zeros(1))
    replies = torch.empty_like(counts)
    _run(table, replies.split(1), counts.split(1))
    asked, answered = counts.tolist(), replies.tolist()
    wanted = rows.new_empty(sum(answered))
    _run(table, wanted.split(answered), rows.split(asked))
    return Trip(places, asked, answered, wanted - table.bounds[table.comm.rank])


def fetch(table: TableRows, trip: Trip) -> torch.Tensor:
    """Return the rows that this rank asked for, (sum(asked), d), in the compute dtype."""
    rows = table.rows
    sent = rows.index_select(0, trip.wanted.to(rows.device)).to(trip.wanted.device)
    received = sent.new_empty(sum(trip.asked), rows.shape[1])
    _run(table, received.split(trip.asked), sent.split(trip.answered))
    return received


def give_back(table: TableRows, trip: Trip, gradients: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Start sending gradients of rows, (sum(asked), d), to their owners.

    Returns:
        A function that waits for the gradients of ``trip.wanted`` and returns them.
    """
    received = gradients.new_empty(sum(trip.answered), gradients.shape[1])
    work = table.comm.exchange(received.split(trip.answered), gradients.split(trip.asked))

    def arrived(_sent: torch.Tensor = gradients) -> torch.Tensor:  # keeps the buffer alive until others have read it
        table.wait(work)
        return received

    return arrived


def _run(table: TableRows, received: tuple[torch.Tensor, ...], sent: tuple[torch.Tensor, ...]) -> None:
    table.wait(table.comm.exchange(received, sent))
