"""The other ranks of a plan: their collectives send nothing, and a ``Ledger`` notes the kind and bytes of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fullshard.core.comm import DONE, Comm, RecordingComm, SoloComm, Work
from fullshard.core.comm.protocol import ReduceOp


class PlannedComm:
    """Rank ``rank`` of ``size`` ranks of which only this one runs, as if all had its values."""

    def __init__(self, rank: int, size: int, device: torch.device, issue: Callable[[], Work] = lambda: DONE) -> None:
        """Take part as ``rank``; tensors are on ``device``, and ``issue`` returns a collective's result."""
        self.rank, self.size, self.device = rank, size, device
        self._issue = issue

    def announce(self, what: str) -> None:
        """See :meth:`Comm.announce`: ignored."""

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor) -> Work:
        """See :meth:`Comm.all_gather`: whole numbers are those of this rank, which the engine reads; the rest stays."""
        if not shard.is_floating_point():
            full.view(self.size, -1).copy_(shard.view(1, -1))
        return self._issue()

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Work:
        """See :meth:`Comm.all_reduce`: the result if all ranks had equal values, which checks of agreement read."""
        if op == "sum":
            tensor.mul_(self.size)
        return self._issue()

    def _without_values(self, *_given: Any, **_by_name: Any) -> Work:
        return self._issue()

    reduce_scatter = broadcast = gather = _without_values

    def exchange(self, received: Sequence[torch.Tensor], sent: Sequence[torch.Tensor]) -> Work:
        """See :meth:`Comm.exchange`: whole numbers, such as ids of rows, are this rank's requests to itself."""
        own = sent[self.rank]
        for target in received if not own.is_floating_point() else ():
            if target.numel() == own.numel():
                target.copy_(own)
        return self._issue()

    def all_gather_object(self, value: Any) -> list[Any]:
        """See :meth:`Comm.all_gather_object`: this rank's value for every rank."""
        return [value] * self.size

    def barrier(self) -> None:
        """See :meth:`Comm.barrier`: returns at once."""


class Ledger:
    """Communicators of one planned rank, which record all of its collectives.

    Attributes:
        world: All ranks.
        note: Called with a collective's kind, the bytes that this rank sends, and the world's ranks that take part;
            returns the work to wait for.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        device: torch.device = torch.device("cpu"),  # noqa: B008 (it cannot change)
    ) -> None:
        """Be ``rank`` of ``size`` ranks on ``device``."""
        self.device = device
        self.comms: list[RecordingComm] = []
        self.note: Callable[[str, int, range], Work] = self.ignore
        self.world = self.recorded(rank, range(size))

    @staticmethod
    def ignore(kind: str, sent_bytes: int, ranks: range) -> Work:
        """Ignore a collective."""
        return DONE

    def recorded(self, rank: int, ranks: range) -> Comm:
        """Return a communicator of ``ranks`` that records what is issued and passes it to :attr:`note`.

        A group of one rank sends nothing.
        """
        comm = _Splitting(self, rank, ranks)
        self.comms.append(comm)
        return comm

    def clear(self) -> None:
        """Forget the recorded collectives."""
        for comm in self.comms:
            comm.entries.clear()

    def sent(self) -> dict[str, tuple[int, int]]:
        """Return for each kind of collective the number issued and the bytes that this rank sent."""
        entries = [entry for comm in self.comms if comm.size > 1 for entry in comm.entries]
        kinds = sorted({entry.collective for entry in entries})
        by_kind = {kind: [entry.sent_bytes for entry in entries if entry.collective == kind] for kind in kinds}
        return {kind: (len(sent), sum(sent)) for kind, sent in by_kind.items()}


class _Splitting(RecordingComm):
    """A recorded communicator that can be split into groups, whose collectives are recorded too."""

    def __init__(self, ledger: Ledger, rank: int, ranks: range) -> None:
        device, several = ledger.device, len(ranks) > 1
        super().__init__(PlannedComm(rank, len(ranks), device, self._issue) if several else SoloComm(device))
        self._ledger, self._ranks = ledger, ranks

    def _issue(self) -> Work:
        entry = self.entries[-1]  # recorded just before the collective is issued
        return self._ledger.note(entry.collective, entry.sent_bytes, self._ranks)

    def split(self, groups: list[list[int]]) -> Comm:
        """Return this rank's group among ``groups``."""
        mine = next(ranks for ranks in groups if self.rank in ranks)
        apart = self._ranks.step * (mine[1] - mine[0] if len(mine) > 1 else 1)
        first = self._ranks[mine[0]]
        return self._ledger.recorded(mine.index(self.rank), range(first, first + apart * len(mine), apart))
