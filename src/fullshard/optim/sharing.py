"""Small values of parameters that are split across ranks, added up among exactly the ranks that hold parts of them.

Each parameter has its own group of ranks, and no two need to be the same. One all-to-all exchange serves them all: a
rank sends to another one only what is of a parameter that both hold.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from fullshard.comm import Comm, Work, settle
from fullshard.comm.protocol import ReduceOp


@dataclass(frozen=True)
class Shared:
    """A value that the ranks which hold a parameter add up.

    Attributes:
        owners: Those ranks, consecutive and at least two.
        value: What this rank has of it, contiguous; the sum when it is done.
    """

    owners: range
    value: torch.Tensor


class Sharing:
    """Values on their way to being added up.

    Every rank of the group starts one and waits for it, at the same place among its collectives, also with no value:
    ranks that do share wait for nobody else's data, but collectives are counted alike.
    """

    def __init__(
        self,
        comm: Comm,
        values: Sequence[Shared],
        what: str,
        *,
        op: ReduceOp = "sum",
        at_once: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Send this rank's values to the other owners.

        Args:
            comm: The ranks among which the parameters are sharded.
            values: This rank's, in an order that any two ranks have in common; only of parameters that it owns part of.
            what: For people, what is shared.
            op: How values of the ranks are put together.
            at_once: Whether each owner sends all to each other one, (k - 1) times the values in one exchange; fit for
                single numbers. Else each sums a slice of its own and sends that back: 2 (k - 1) / k times the values,
                in two exchanges.
            dtype: Of all values, the same on every rank, also on one that has none.
        """
        self.comm = comm
        self.values = values
        self.what = what
        self.op: ReduceOp = op
        self.at_once = at_once
        self.dtype = dtype
        # For each value, each owner's slice of it, in rank order.
        self._slices = [
            [one.value.view(-1)] * len(one.owners)
            if at_once
            else list(one.value.view(-1).tensor_split(len(one.owners)))
            for one in values
        ]
        self._common = [
            [index for index, one in enumerate(values) if rank in one.owners] if rank != comm.rank else []
            for rank in range(comm.size)
        ]
        self._received, self._work = self._swap(
            lambda rank, index: self._slice_of(index, rank), lambda rank, index: self._slice_of(index, comm.rank)
        )

    def wait(self) -> None:
        """Put the values of all owners together, in rank order, so that each of them has the very same result."""
        settle_after(self._work)
        for index, one in enumerate(self.values):
            mine = self._slice_of(index, self.comm.rank)
            terms = [mine if rank == self.comm.rank else self._received[rank][index] for rank in one.owners]
            stacked = torch.stack(terms)
            mine.copy_(stacked.sum(0) if self.op == "sum" else stacked.amax(0))
        if self.at_once:
            return
        received, work = self._swap(
            lambda rank, index: self._slice_of(index, self.comm.rank), lambda rank, index: self._slice_of(index, rank)
        )
        settle_after(work)
        for rank, parts in enumerate(received):
            for index, part in parts.items():
                self._slice_of(index, rank).copy_(part)

    def _slice_of(self, index: int, rank: int) -> torch.Tensor:
        return self._slices[index][rank - self.values[index].owners.start]

    def _swap(
        self,
        given: Callable[[int, int], torch.Tensor],
        awaited: Callable[[int, int], torch.Tensor],
    ) -> tuple[list[dict[int, torch.Tensor]], Work]:
        """Send each rank ``given(rank, index)`` of the values that both have, and await as much of ``awaited``.

        Returns:
            What comes from each rank by the index of the value, to be read when the work is done.
        """
        sent, received, parts = [], [], []
        for rank, indices in enumerate(self._common):
            pieces = [given(rank, index).to(self.comm.device) for index in indices]
            sizes = [awaited(rank, index).numel() for index in indices]
            none = torch.empty(0, dtype=self.dtype, device=self.comm.device)
            sent.append(torch.cat(pieces) if pieces else none)
            received.append(torch.empty(sum(sizes), dtype=self.dtype, device=self.comm.device) if sizes else none)
            parts.append(dict(zip(indices, received[-1].split(sizes), strict=True)) if sizes else {})
        self.comm.announce(self.what)
        work = self.comm.exchange(received, sent)
        self._sent = sent  # alive until the others have it
        return parts, work


def settle_after(work: Work) -> None:
    """Wait until a collective is done here, and until other ranks have taken what this one gave."""
    work.wait()
    settle(work)
