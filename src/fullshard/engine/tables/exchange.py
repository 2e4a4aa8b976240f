"""How tokens travel: ids to the ranks that own their rows, rows back, and gradients of rows to their owners.

Bytes that a rank sends, for N ranks, L different rows looked up by it, width d, and b bytes an element: 8 (N-1) for the
counts, 8 L (N-1)/N for the ids, and L d b (N-1)/N for the rows, on average; backward sends as much for their gradients.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fullshard.comm import Comm, settle


@dataclass(frozen=True)
class Trip:
    """One lookup: which rows this rank asked for, and which rows it was asked for.

    Attributes:
        places: Of each id, the index of its row among those asked for; in the shape of the ids.
        asked: How many different rows this rank asked of each rank.
        answered: How many rows each rank asked of this one.
        wanted: Which ones, counted from this rank's first row, rank by rank; (sum(answered),), int64.
    """

    places: torch.Tensor
    asked: list[int]
    answered: list[int]
    wanted: torch.Tensor


def ask(comm: Comm, bounds: torch.Tensor, ids: torch.Tensor) -> Trip:
    """Send ids to the ranks that own their rows. Every rank of ``comm`` calls it.

    Args:
        comm: The ranks that share the table.
        bounds: Rank r owns rows ``bounds[r]`` to ``bounds[r + 1]``; (N + 1,), int64.
        ids: Rows to look up, any shape, int32 or int64; each is below the last bound.
    """
    rows, places = torch.unique(ids.long(), return_inverse=True)  # ascending: grouped by owner
    ends = torch.searchsorted(rows, bounds[1:])
    counts = torch.diff(ends, prepend=ends.new_zeros(1))
    replies = torch.empty_like(counts)
    _run(comm, replies.split(1), counts.split(1))
    asked, answered = counts.tolist(), replies.tolist()
    wanted = rows.new_empty(sum(answered))
    _run(comm, wanted.split(answered), rows.split(asked))
    return Trip(places, asked, answered, wanted - bounds[comm.rank])


def fetch(comm: Comm, trip: Trip, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the rows that this rank asked for, (sum(asked), d), in ``dtype``; ``rows`` are those it owns, (R, d)."""
    sent = rows.index_select(0, trip.wanted.to(rows.device)).to(trip.wanted.device, dtype)
    received = sent.new_empty(sum(trip.asked), rows.shape[1])
    _run(comm, received.split(trip.asked), sent.split(trip.answered))
    return received


def give_back(comm: Comm, trip: Trip, gradients: torch.Tensor) -> torch.Tensor:
    """Send gradients of rows, (sum(asked), d), to their owners; return those that arrive for ``trip.wanted``."""
    received = gradients.new_empty(sum(trip.answered), gradients.shape[1])
    _run(comm, received.split(trip.answered), gradients.split(trip.asked))
    return received


def _run(comm: Comm, received: tuple[torch.Tensor, ...], sent: tuple[torch.Tensor, ...]) -> None:
    work = comm.exchange(received, sent)
    work.wait()
    settle(work)  # what was sent is freed by the caller
