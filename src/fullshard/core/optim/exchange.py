"""Pieces of uneven sizes exchanged between ranks: any number from any rank to any other, all in one collective."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from fullshard.core.comm import Comm, settle


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
