"""Exchanges between ranks: pieces of uneven sizes, and small values all-reduced among the owners of each parameter.

Each parameter has its own owners, and no two need to have the same. One all-to-all exchange serves all of them: a rank
sends to another one only values of parameters that both own. Process groups for each run of owners would be hundreds of
communicators at a thousand ranks; an all-reduce over all ranks would send every value to every rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from fullshard.core.comm import Comm, settle
from fullshard.core.comm.protocol import ReduceOp


class PieceExchange:
    """Pieces of tensors on their way to other ranks.

    Every rank of the group makes one, also with nothing to send or receive, and waits for it.

    Attributes:
        received: Each piece by the rank that sent it and its key, flat; to be read after :meth:`wait`.
    """

    def __init__(
        self,
        comm: Comm,
        sent: Mapping[int, Sequence[torch.Tensor]],
        awaited: Mapping[int, Mapping[int, int]],
        dtype: torch.dtype,
        what: str,
    ) -> None:
        """Start the exchange.

        Args:
            comm: The ranks.
            sent: By receiving rank, the flat pieces for it, on the device of ``comm``.
            awaited: By sending rank, the number of elements of each piece by key, in the order in which they are sent.
            dtype: Dtype of all pieces, the same on every rank.
            what: What is exchanged, for messages.
        """
        none = torch.empty(0, dtype=dtype, device=comm.device)
        self.received: dict[tuple[int, int], torch.Tensor] = {}
        buffers: list[torch.Tensor] = []
        for rank in range(comm.size):
            numels = awaited.get(rank, {})
            buffers.append(none.new_empty(sum(numels.values())))
            pieces = buffers[-1].split(list(numels.values())) if numels else ()
            self.received.update(zip(((rank, key) for key in numels), pieces, strict=True))
        # Kept until the other ranks have read it.
        given = [sent.get(rank) or [none] for rank in range(comm.size)]
        self._sent = [torch.cat(list(pieces)) if len(pieces) > 1 else pieces[0] for pieces in given]
        comm.announce(what)
        self._work = comm.exchange(buffers, self._sent)

    def wait(self) -> None:
        """Return when :attr:`received` may be read."""
        self._work.wait()

    def settle(self) -> None:
        """Return when the other ranks have read what this one sent; after :meth:`wait`."""
        settle(self._work)
        self._sent.clear()


@dataclass(frozen=True)
class OwnerValue:
    """This rank's term of a value that the owners of a parameter reduce."""

    owners: range  # the ranks that hold parts of the parameter, consecutive and at least two
    value: torch.Tensor  # this rank's term, contiguous, on the device of the collectives; overwritten by the result


class OwnerReduce:
    """An all-reduce of each value among its owners, under way.

    Every rank of the group starts one and waits for it at the same place among its collectives, also with no value:
    ranks that own nothing in common wait for no data of each other, but the collectives of a group are numbered.
    """

    def __init__(
        self,
        comm: Comm,
        values: Sequence[OwnerValue],
        what: str,
        *,
        op: ReduceOp = "sum",
        at_once: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Send this rank's terms to the other owners.

        Args:
            comm: The ranks among which the parameters are sharded.
            values: The values that this rank owns, in an order that any two ranks have in common.
            what: What is reduced, for messages.
            op: How the terms of the owners are combined.
            at_once: True: each owner sends all of its term to each other one, (k - 1) times the values in one exchange;
                fit for single numbers. False: each owner reduces a slice of its own and sends that back,
                2 (k - 1) / k times the values in two exchanges.
            dtype: Dtype of all values, the same on every rank, also on one that has none.
        """
        self.values = values
        self._comm = comm
        self._what = what
        self._op: ReduceOp = op
        self._at_once = at_once
        self._dtype = dtype
        # For each value, the slice that each owner reduces, in rank order.
        self._slices = [
            [one.value.view(-1)] * len(one.owners)
            if at_once
            else list(one.value.view(-1).tensor_split(len(one.owners)))
            for one in values
        ]
        # By other owner, the slices that it reduces, and those that this rank reduces of the same values.
        self._theirs: dict[int, dict[int, torch.Tensor]] = {}
        self._mine: dict[int, dict[int, torch.Tensor]] = {}
        for index, one in enumerate(values):
            for rank in one.owners:
                if rank != comm.rank:
                    self._theirs.setdefault(rank, {})[index] = self._slice_of(index, rank)
                    self._mine.setdefault(rank, {})[index] = self._slice_of(index, comm.rank)
        self._terms = self._exchange(sent=self._theirs, like=self._mine)

    def wait(self) -> None:
        """Overwrite each value by the result; terms are combined in rank order, so that all owners get equal bits."""
        self._terms.wait()
        self._terms.settle()  # before the slices that were sent are overwritten
        for index, one in enumerate(self.values):
            mine = self._slice_of(index, self._comm.rank)
            received = self._terms.received
            stacked = torch.stack([mine if r == self._comm.rank else received[r, index] for r in one.owners])
            mine.copy_(stacked.sum(0) if self._op == "sum" else stacked.amax(0))
        if self._at_once:
            return
        results = self._exchange(sent=self._mine, like=self._theirs)
        results.wait()
        results.settle()
        for (rank, index), part in results.received.items():
            self._slice_of(index, rank).copy_(part)

    def _slice_of(self, index: int, rank: int) -> torch.Tensor:
        return self._slices[index][rank - self.values[index].owners.start]

    def _exchange(
        self, sent: dict[int, dict[int, torch.Tensor]], like: dict[int, dict[int, torch.Tensor]]
    ) -> PieceExchange:
        """Send each rank the slices ``sent``, and receive from it as many elements as ``like`` has."""
        pieces = {rank: list(slices.values()) for rank, slices in sent.items()}
        numels = {rank: {index: part.numel() for index, part in slices.items()} for rank, slices in like.items()}
        return PieceExchange(self._comm, pieces, numels, self._dtype, self._what)


class PooledOwnerReduce:
    """A sum of one flat value of each of many split parameters; values with the same owners are sent as one."""

    def __init__(
        self,
        comm: Comm,
        values: Sequence[tuple[range, torch.Tensor]],
        dtype: torch.dtype,
        what: str,
        *,
        at_once: bool = False,
    ) -> None:
        """Send this rank's terms to the other owners; every rank of the group calls it.

        Args:
            comm: The ranks among which the parameters are sharded.
            values: Owners of each split parameter that this rank owns part of, and its term, (n,), on any device; in
                an order that any two ranks have in common.
            dtype: Dtype that values are sent and added in, the same on every rank.
            what: What is reduced, for messages.
            at_once: See :class:`OwnerReduce`.
        """
        self._values = values
        self._groups: dict[range, list[int]] = {}
        for index, (owners, _) in enumerate(values):
            self._groups.setdefault(owners, []).append(index)
        pooled = [
            OwnerValue(owners, torch.cat([values[index][1].to(comm.device, dtype) for index in indices]))
            for owners, indices in self._groups.items()
        ]
        self._reduce = OwnerReduce(comm, pooled, what, at_once=at_once, dtype=dtype)

    def wait(self) -> list[torch.Tensor]:
        """Return the totals in the order of the values, each with the dtype and on the device of this rank's term."""
        self._reduce.wait()
        totals = [value for _, value in self._values]
        for indices, one in zip(self._groups.values(), self._reduce.values, strict=True):
            sizes = [totals[index].numel() for index in indices]
            for index, total in zip(indices, one.value.split(sizes), strict=True):
                totals[index] = total.to(totals[index])
        return totals
