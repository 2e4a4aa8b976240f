"""Collectives of ranks that read each other's memory, with no message: see :mod:`fullshard.core.comm.peer_memory`.

Small ones are no exception. By messages, an all-gather of 8 kB took 0.1 ms to issue in a step of two ranks on two cores
and up to 5 ms where gloo's thread took the processor from a rank; a step with 27 collectives was 18 % longer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from fullshard.core.comm.peer_memory import PeerMemory

Poll = Callable[[int, Callable[[], int | None]], int]
"""Returns a rank's answer as soon as there is one."""


@dataclass(frozen=True)
class Joined:
    """A collective that this rank has joined.

    Attributes:
        memory: Access to the other ranks' memory.
        number: Its number, and that of its second step, which is one more; the same on every rank.
        waiting: Returns a context that yields a :data:`Poll`, and raises the errors of a wait.
    """

    memory: PeerMemory
    number: int
    waiting: Callable[[], AbstractContextManager[Poll]]

    def read(self, peers: Iterable[int], code: int, read: Callable[[int, int], None], step: int = 0) -> None:
        """Call ``read(rank, address)`` for each peer as soon as it has offered data, and publish that this is done."""
        number = self.number + step
        with self.waiting() as poll:
            for peer in peers:
                read(peer, poll(peer, partial(self.memory.find, peer, number, code)))
        self.memory.has_read(number)

    def settle(self, peers: Iterable[int], step: int = 0) -> None:
        """Return when the peers have read what this rank offered."""
        number = self.number + step
        with self.waiting() as poll:
            for peer in peers:
                # A rank that has ended reads nothing any more.
                with contextlib.suppress(ProcessLookupError):
                    poll(peer, partial(self.memory.was_read, peer, number))


class PeerMemoryWork:
    """A collective in which each rank reads other ranks' data once."""

    def __init__(
        self,
        joined: Joined,
        code: int,
        offered: Sequence[torch.Tensor],
        sources: Sequence[int],
        readers: Sequence[int],
        read: Callable[[int, int], None],
    ) -> None:
        """Offer the address of the first of ``offered``; they are kept until ``readers`` have read them.

        ``read(rank, address)`` reads the data of each of ``sources``, in this order.
        """
        self._joined = joined
        self._code = code
        self._offered = offered
        self._sources = sources
        self._readers = readers
        self._read: Callable[[int, int], None] | None = read
        joined.memory.offer(joined.number, code, offered[0].data_ptr())

    def wait(self) -> None:
        """See :meth:`fullshard.core.comm.protocol.Work.wait`.

        Raises:
            MismatchError: Ranks are in different collectives.
            ProcessGroupError: Another rank ended, or did not join within the group's timeout.
        """
        read, self._read = self._read, None
        if read is not None:
            self._joined.read(self._sources, self._code, read)

    def settle(self) -> None:
        """See :func:`fullshard.core.comm.protocol.settle`."""
        if self._offered:
            self._joined.settle(self._readers)
            self._offered = ()


class PeerMemoryAllReduce:
    """An all-reduce in place. Once it was waited for, the other ranks have read this rank's values too."""

    def __init__(
        self,
        joined: Joined,
        codes: tuple[int, int],
        flat: torch.Tensor,
        slices: Sequence[torch.Tensor],
        rank: int,
        combine: Callable[[torch.Tensor, torch.Tensor], Any],
    ) -> None:
        """Offer ``flat``, one-dimensional; ``combine`` adds a term to a total in place.

        Args:
            joined: The collective.
            codes: Its code, and that of its second step.
            flat: This rank's values.
            slices: The part of ``flat`` that each rank reduces, and then offers to the others in the second step; or
                all of it for each rank, and there is no second step.
            rank: This rank.
            combine: Adds a term to a total in place.
        """
        self._joined: Joined | None = joined
        self._codes = codes
        self._flat = flat
        self._slices = slices
        self._rank = rank
        self._peers = [peer for peer in range(len(slices)) if peer != rank]
        self._combine = combine
        joined.memory.offer(joined.number, codes[0], flat.data_ptr())

    def wait(self) -> None:
        """See :meth:`PeerMemoryWork.wait`."""
        joined, self._joined = self._joined, None
        if joined is None:
            return
        mine = self._slices[self._rank]
        offset = mine.data_ptr() - self._flat.data_ptr()
        terms = [mine if rank == self._rank else torch.empty_like(mine) for rank in range(len(self._slices))]
        joined.read(self._peers, self._codes[0], lambda peer, at: joined.memory.read(peer, at + offset, terms[peer]))
        # In the order of ranks, so that each rank gets the same bits; this rank's values are not to change yet.
        total, other = (terms[1], terms[0]) if self._rank == 0 else (terms[0], terms[1])
        for term in (other, *terms[2:]):
            self._combine(total, term)
        joined.settle(self._peers)  # before the values that were offered are overwritten
        mine.copy_(total)
        if mine.numel() == self._flat.numel():
            return
        joined.memory.offer(joined.number + 1, self._codes[1], mine.data_ptr())
        joined.read(
            self._peers, self._codes[1], lambda peer, at: joined.memory.read(peer, at, self._slices[peer]), step=1
        )
        joined.settle(self._peers, step=1)
