"""All-to-all with a gradient: a dimension that ranks hold in parts is joined, and another one is cut over them."""

from __future__ import annotations

import functools
import itertools
import weakref
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


class Resplit:
    """The exchanges by which a group of ranks splits tensors along other dimensions.

    Attributes:
        comm: The ranks that hold the parts.
        count: Exchanges so far, on this rank.
    """

    def __init__(self, comm: Comm) -> None:
        """Exchange over ``comm``; any rank."""
        self.comm, self.count = comm, 0
        # By it graphs of the compiler know it. Shapes are this rank's, and ranks share the compiler's cache on disk.
        self._number = next(_numbers) << 32 | comm.rank
        _numbered[self._number] = self

    def __call__(
        self, purpose: str, tensors: Sequence[torch.Tensor], changes: Sequence[Change]
    ) -> tuple[torch.Tensor, ...]:
        """Return ``tensors`` split along another dimension, in one exchange; every rank calls it, and its backward.

        Args:
            purpose: What the exchange is for, reported if it does not complete.
            tensors: Floating point, each with this rank's part of one dimension and all of the other.
            changes: For each tensor, the split that it has and the one that it shall have.

        Returns:
            For each tensor, all of the first dimension and this rank's part of the other. The gradient of what several
            ranks get is the sum of theirs.
        """
        if torch.compiler.is_compiling():
            splits = [split for change in changes for split in change]
            numbers = [number for split in splits for number in (split.dim, *itertools.chain(*split.ranges))]
            return tuple(_resplit(list(tensors), self._number, numbers, purpose))
        return _Resplit.apply(self, purpose, changes, *tensors)

    def run(self, purpose: str, tensors: Sequence[torch.Tensor], changes: Sequence[Change]) -> tuple[torch.Tensor, ...]:
        """Do it, without a gradient."""
        self.count += 1
        return _exchanged(self.comm, purpose, changes, tensors)

    def decoded(self, numbers: Sequence[int]) -> list[Change]:
        """Return the changes that a graph has as numbers."""
        each = 1 + 2 * self.comm.size
        splits = [
            Split(dim, tuple(zip(bounds[::2], bounds[1::2], strict=True)))
            for dim, *bounds in (numbers[start : start + each] for start in range(0, len(numbers), each))
        ]
        return list(zip(splits[::2], splits[1::2], strict=True))


_numbers = itertools.count()
_numbered: weakref.WeakValueDictionary[int, Resplit] = weakref.WeakValueDictionary()


class _Resplit(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, resplit: Resplit, purpose: str, changes: Sequence[Change], *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.resplit, ctx.purpose, ctx.changes = resplit, purpose, changes
        return resplit.run(purpose, tensors, changes)

    @staticmethod
    @once_differentiable  # its exchange would be lost to a gradient of gradients
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        back = [(wanted, held) for held, wanted in ctx.changes]
        return None, None, None, *ctx.resplit.run(f"{ctx.purpose}, backward", gradients, back)


_SCHEMA = "(Tensor[] tensors, int number, int[] changes, str purpose) -> Tensor[]"


@torch.library.custom_op("fullshard::resplit", mutates_args=(), schema=_SCHEMA)
def _resplit(tensors: list[torch.Tensor], number: int, changes: list[int], purpose: str) -> list[torch.Tensor]:
    """Exchange inside of a graph, which holds the changes as numbers."""
    resplit = _numbered[number]
    return list(resplit.run(purpose, tensors, resplit.decoded(changes)))


@_resplit.register_fake
def _(tensors: list[torch.Tensor], number: int, changes: list[int], purpose: str) -> list[torch.Tensor]:
    resplit, made = _numbered[number], []
    for tensor, (held, wanted) in zip(tensors, resplit.decoded(changes), strict=True):
        start, stop = wanted.ranges[resplit.comm.rank]
        shape = list(tensor.shape)
        shape[held.dim], shape[wanted.dim] = held.total, stop - start
        made.append(tensor.new_empty(shape))
    return made


def _note_changes(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    _, ctx.number, ctx.changes, ctx.purpose = inputs


def _backward(ctx: Any, gradients: list[torch.Tensor]) -> tuple[Any, ...]:
    each = len(ctx.changes) // (2 * len(gradients))
    splits = [ctx.changes[start : start + each] for start in range(0, len(ctx.changes), each)]
    back = [number for held, wanted in zip(splits[::2], splits[1::2], strict=True) for number in (*wanted, *held)]
    return _resplit(gradients, ctx.number, back, f"{ctx.purpose}, backward"), None, None, None


_resplit.register_autograd(_backward, setup_context=_note_changes)


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
