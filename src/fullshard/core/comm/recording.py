"""A communicator that lists the collectives issued through it, in their order, with the bytes of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fullshard.core.comm.protocol import Comm, ReduceOp, Work, hides_messages


@dataclass(frozen=True)
class LedgerEntry:
    """One collective as this rank issued it."""

    # ``all_gather``, ``reduce_scatter``, ``all_reduce``, ``broadcast``, ``gather``, ``exchange``, ``all_gather_object``
    # or ``barrier``
    collective: str
    sent_bytes: int  # bytes this rank must send under the cheapest known algorithm; 0 for objects and barriers


class RecordingComm:
    """A :class:`Comm` that forwards every collective to another one and records it."""

    def __init__(self, inner: Comm) -> None:
        """Record the collectives of ``inner``."""
        self.inner = inner
        self.rank, self.size, self.device = inner.rank, inner.size, inner.device
        self.entries: list[LedgerEntry] = []

    def _note(self, collective: str, sent_bytes: int = 0) -> None:
        self.entries.append(LedgerEntry(collective, sent_bytes))

    @property
    def names(self) -> list[str]:
        """The collectives in the order they were issued."""
        return [entry.collective for entry in self.entries]

    @property
    def sent_bytes(self) -> int:
        """Bytes sent by all entries."""
        return sum(entry.sent_bytes for entry in self.entries)

    def announce(self, what: str) -> None:
        """See :meth:`Comm.announce`."""
        self.inner.announce(what)

    def hides_messages(self) -> bool:
        """See :func:`fullshard.core.comm.protocol.hides_messages`."""
        return hides_messages(self.inner)

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor) -> Work:
        """See :meth:`Comm.all_gather`."""
        self._note("all_gather", shard.nbytes * (self.size - 1))
        return self.inner.all_gather(full, shard)

    def reduce_scatter(self, shard: torch.Tensor, full: torch.Tensor) -> Work:
        """See :meth:`Comm.reduce_scatter`."""
        self._note("reduce_scatter", full.nbytes // self.size * (self.size - 1))
        return self.inner.reduce_scatter(shard, full)

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Work:
        """See :meth:`Comm.all_reduce`."""
        self._note("all_reduce", 2 * tensor.nbytes * (self.size - 1) // self.size)
        return self.inner.all_reduce(tensor, op)

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> Work:
        """See :meth:`Comm.broadcast`."""
        self._note("broadcast", tensor.nbytes if self.rank == source else 0)
        return self.inner.broadcast(tensor, source)

    def gather(self, shard: torch.Tensor, full: torch.Tensor | None, target: int = 0) -> Work:
        """See :meth:`Comm.gather`."""
        self._note("gather", 0 if self.rank == target else shard.nbytes)
        return self.inner.gather(shard, full, target)

    def exchange(self, received: Sequence[torch.Tensor], sent: Sequence[torch.Tensor]) -> Work:
        """See :meth:`Comm.exchange`."""
        self._note("exchange", sum(part.nbytes for rank, part in enumerate(sent) if rank != self.rank))
        return self.inner.exchange(received, sent)

    def all_gather_object(self, value: Any) -> list[Any]:
        """See :meth:`Comm.all_gather_object`."""
        self._note("all_gather_object")
        return self.inner.all_gather_object(value)

    def barrier(self) -> None:
        """See :meth:`Comm.barrier`."""
        self._note("barrier")
        self.inner.barrier()
