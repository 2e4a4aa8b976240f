"""The protocol through which every other room communicates with other ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import torch

ReduceOp = Literal["sum", "max"]


class Work(Protocol):
    """A collective that was issued and may still be running."""

    def wait(self) -> None:
        """Return when the result may be read: by the CPU on CPU, by the current stream on CUDA."""
        ...


@runtime_checkable
class Comm(Protocol):
    """A group of ranks and the collectives that they run together.

    Every method is called by every rank of the group, in the same order. Collectives take buffers, start, and return a
    :class:`Work`; the caller keeps the buffers alive and unchanged until ``wait()``, and changes or frees the buffers
    that it sent (the shard of an all-gather, the full buffer of a reduce-scatter) only after :func:`settle`.

    Attributes:
        rank: This process's (or thread's) place in the group, from 0.
        size: Number of ranks in the group.
        device: Device of the collectives' tensors.
    """

    rank: int
    size: int
    device: torch.device

    def announce(self, what: str) -> None:
        """Describe the purpose of the next collectives, until the next call; reported if one does not complete.

        Ranks that announce different purposes for an all-gather, reduce-scatter, broadcast or gather are in different
        collectives: they exchange nothing and an error is raised. In an all-reduce, an exchange of objects or a barrier
        they still meet, because ranks use these to find out whether they agree. The call is cheap: make it before every
        collective.

        Args:
            what: The purpose, such as ``"all-gather of unit blocks.3"``.
        """
        ...

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor) -> Work:
        """Fill ``full`` (size * S elements) with every rank's ``shard`` (S elements, same dtype) in rank order.

        ``shard`` may be this rank's own slice of ``full``; then nothing is copied locally.
        """
        ...

    def reduce_scatter(self, shard: torch.Tensor, full: torch.Tensor) -> Work:
        """Sum ``full`` (size * S elements) over ranks; ``shard`` (S elements) receives slice ``rank``.

        If the dtype of ``shard`` is wider, values are sent in that of ``full`` and added in that of ``shard``.
        """
        ...

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Work:
        """Reduce ``tensor`` over ranks, in place, on every rank."""
        ...

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> Work:
        """Overwrite ``tensor`` on every rank with that of rank ``source``."""
        ...

    def gather(self, shard: torch.Tensor, full: torch.Tensor | None, target: int = 0) -> Work:
        """Fill ``full`` (size * S elements, given on rank ``target`` only) with every rank's ``shard`` (S elements)."""
        ...

    def exchange(self, received: Sequence[torch.Tensor], sent: Sequence[torch.Tensor]) -> Work:
        """Send each rank ``r`` the tensor ``sent[r]``, and fill ``received[r]`` with the one it sends to this rank.

        Args:
            received: One contiguous tensor for each rank, of as many elements as that rank sends here.
            sent: One contiguous tensor for each rank; all of both are of one dtype. Empty ones cost nothing.
        """
        ...

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return the picklable ``value`` of every rank, in rank order, on every rank. Blocks; not for the hot path.

        Raises:
            MismatchError: Ranks call it in different functions of fullshard; on every rank, with the same text.
        """
        ...

    def barrier(self) -> None:
        """Return when every rank has called it."""
        ...


def settle(work: Work) -> None:
    """Return when other ranks have read what this one sent in a collective; ``work`` was waited for.

    Most implementations have sent it by then. Works of ranks that read each other's memory have a method ``settle``.
    """
    taken = getattr(work, "settle", None)
    if taken is not None:
        taken()


def hides_messages(comm: Comm) -> bool:
    """Return True if collectives of ``comm`` proceed while this rank computes; False if waiting for one does the work.

    Groups without the method do the work while waiting. Every rank calls it, like a collective.
    """
    ask = getattr(comm, "hides_messages", None)
    return ask is not None and ask()


class DoneWork:
    """Work that was finished when it was issued."""

    def wait(self) -> None:
        """Return at once."""


DONE = DoneWork()
