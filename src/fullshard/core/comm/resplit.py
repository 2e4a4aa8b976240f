"""All-to-all with a gradient: a dimension that ranks hold in parts is joined, and another one is cut over them."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from fullshard.core.comm.protocol import Comm, settle

Range = tuple[int, int]


@dataclass(frozen=True)
class Split:
    """Which part of a dimension each rank holds.

    Attributes:
        dim: The dimension, from 0.
        ranges: First and last index, exclusive, of each rank's part; parts may be empty, and may overlap.
    """

    dim: int
    ranges: tuple[Range, ...]

    @property
    def total(self) -> int:
        """Length of the dimension that is split."""
        return max(stop for _, stop in self.ranges)

    def part(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        """Return a view of the part of ``rank`` in a tensor that holds the full dimension."""
        start, stop = self.ranges[rank]
        return tensor.narrow(self.dim, start, stop - start)

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the full dimension from each rank's part; where parts overlap, their sum."""
        if all(one[1] == other[0] for one, other in itertools.pairwise(self.ranges)):
            return torch.cat(list(parts), self.dim)
        shape = list(parts[0].shape)
        shape[self.dim] = self.total
        full = parts[0].new_zeros(shape)
        for rank, part in enumerate(parts):
            self.part(full, rank).add_(part)
        return full


def even_split(dim: int, total: int, ranks: int) -> Split:
    """Return a split into parts that differ by at most one; the first ranks have the longer ones."""
    each, more = divmod(total, ranks)
    starts = [rank * each + min(rank, more) for rank in range(ranks + 1)]
    return Split(dim, tuple(itertools.pairwise(starts)))


Change = tuple[Split, Split]
"""The split that a tensor has, and the one that it shall have."""


def resplit(
    comm: Comm, purpose: str, tensors: Sequence[torch.Tensor], changes: Sequence[Change]
) -> tuple[torch.Tensor, ...]:
    """Return ``tensors`` split along another dimension, in one exchange; every rank calls it, and its backward.

    Args:
        comm: The ranks that hold the parts.
        purpose: What the exchange is for, reported if it does not complete.
        tensors: Floating point, each with this rank's part of one dimension and all of the other.
        changes: For each tensor, the split that it has and the one that it shall have.

    Returns:
        For each tensor, all of the first dimension and this rank's part of the other. The gradient of what several
        ranks get is the sum of theirs.
    """
    return _Resplit.apply(comm, purpose, changes, *tensors)


class _Resplit(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, comm: Comm, purpose: str, changes: Sequence[Change], *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.comm, ctx.purpose, ctx.changes = comm, purpose, changes
        return _exchanged(comm, purpose, changes, tensors)

    @staticmethod
    @once_differentiable  # its exchange would be lost to a gradient of gradients
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        back = [(wanted, held) for held, wanted in ctx.changes]
        return None, None, None, *_exchanged(ctx.comm, f"{ctx.purpose}, backward", back, gradients)


def _exchanged(
    comm: Comm, purpose: str, changes: Sequence[Change], tensors: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    ranks = range(comm.size)
    # One message to each rank. Dtypes differ under autocast only, and the widest holds all values.
    dtype = functools.reduce(torch.promote_types, [tensor.dtype for tensor in tensors])
    shapes = [
        [_shape_of_part(tensor, change, rank, comm.rank) for tensor, change in zip(tensors, changes, strict=True)]
        for rank in ranks
    ]
    sizes = [[shape.numel() for shape in of_rank] for of_rank in shapes]
    sent = [
        torch.cat(
            [
                wanted.part(tensor, rank).to(dtype).reshape(-1)
                for tensor, (_, wanted) in zip(tensors, changes, strict=True)
            ]
        )
        for rank in ranks
    ]
    received = [sent[0].new_empty(sum(of_rank)) for of_rank in sizes]
    comm.announce(purpose)
    work = comm.exchange(received, sent)
    work.wait()
    settle(work)
    del sent
    pieces = [
        [piece.view(shape) for piece, shape in zip(flat.split(size), of_rank, strict=True)]
        for flat, size, of_rank in zip(received, sizes, shapes, strict=True)
    ]
    return tuple(
        held.join([pieces[rank][index] for rank in ranks]).to(tensor.dtype)
        for index, (tensor, (held, _)) in enumerate(zip(tensors, changes, strict=True))
    )


def _shape_of_part(tensor: torch.Tensor, change: Change, source: int, target: int) -> torch.Size:
    """Return the shape of what rank ``source`` sends of a tensor to rank ``target``."""
    held, wanted = change
    shape = list(tensor.shape)
    for split, rank in ((held, source), (wanted, target)):
        start, stop = split.ranges[rank]
        shape[split.dim] = stop - start
    return torch.Size(shape)


def take_part(comm: Comm, tensor: torch.Tensor, split: Split) -> torch.Tensor:
    """Return this rank's part of a tensor that every rank holds, in memory of its own.

    Its gradient is zero outside of the part: that of the full tensor is the sum over ranks.
    """
    # A view would keep the full tensor alive until backward.
    return split.part(tensor, comm.rank).clone(memory_format=torch.contiguous_format)


def sum_over(comm: Comm, purpose: str, term: torch.Tensor) -> torch.Tensor:
    """Return the sum of every rank's ``term``, 0-d; every rank calls it, and its backward.

    The gradient of a rank's term is the sum of those of all ranks' sums, which are taken to be equal.
    """
    return _Sum.apply(comm, purpose, term)


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, comm: Comm, purpose: str, term: torch.Tensor) -> torch.Tensor:
        ctx.ranks = comm.size
        total = term.detach().clone().reshape(1)
        comm.announce(purpose)
        comm.all_reduce(total).wait()
        return total[0]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return None, None, gradient * ctx.ranks
