"""Communication of shards: full tensors, and partial results of reductions."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

import torch

from fullshard.core.comm import Comm, settle
from fullshard.errors import ShardingError

_here = threading.local()


@contextmanager
def some_ranks_only(where: str) -> Iterator[None]:
    """Refuse reductions and full tensors of shards inside: other ranks, which do not run this code, would be missed."""
    before, _here.where = getattr(_here, "where", None), where
    try:
        yield
    finally:
        _here.where = before


def _require_all_ranks(what: str) -> None:
    where = getattr(_here, "where", None)
    if where is not None:
        raise ShardingError(
            f"{what} needs every rank, but {where} runs only on the ranks that hold rows of the parameter: the others "
            "would be waited for. Use one optimizer after backward."
        )


def gather_full(comm: Comm, shape: Sequence[int], start: int, flat: torch.Tensor) -> torch.Tensor:
    """Gather a full tensor from the runs that ranks hold of it, on the device of collectives; every rank calls it.

    The ranks first exchange which runs they hold. Then each holder broadcasts its run; few ranks hold parts of a
    parameter.

    Args:
        comm: The ranks.
        shape: Shape of the full tensor.
        start: First element that this rank holds, counted in the flattened full tensor.
        flat: Its elements, (numel,), possibly none.
    """
    what = f"full_tensor() of shape {tuple(shape)}"
    _require_all_ranks(what)
    comm.announce(what)
    runs = torch.empty(2 * comm.size, dtype=torch.int64, device=comm.device)
    _all_gather(comm, runs, torch.tensor([start, start + flat.numel()], device=comm.device))
    full = torch.empty(prod(shape), dtype=flat.dtype, device=comm.device)
    done = 0
    for first, stop, rank in sorted((*run, rank) for rank, run in enumerate(runs.view(-1, 2).tolist())):
        first = max(first, done)  # several ranks may hold the same elements
        if first >= stop:
            continue
        piece = full[first:stop]
        if rank == comm.rank:
            piece.copy_(flat.detach()[first - start : stop - start])
        comm.announce(what)
        work = comm.broadcast(piece.view(torch.uint8), rank)
        work.wait()
        settle(work)
        done = stop
    return full.view(tuple(shape))


def _all_gather(comm: Comm, full: torch.Tensor, mine: torch.Tensor) -> None:
    """Fill ``full``, and return when other ranks have read ``mine``, so that the caller may drop it."""
    work = comm.all_gather(full, mine)
    work.wait()
    settle(work)


class _EveryPart(torch.autograd.Function):
    """The all-gather of partial results. Backward gives each rank the gradient of its own part."""

    @staticmethod
    def forward(ctx: Any, mine: torch.Tensor, comm: Comm, what: str) -> torch.Tensor:
        ctx.rank = comm.rank
        sent = mine.detach().to(comm.device).contiguous().reshape(-1)
        is_bool = sent.dtype == torch.bool
        sent = sent.view(torch.uint8) if is_bool else sent
        full = sent.new_empty(comm.size * sent.numel())
        _require_all_ranks(f"{what} of shards")
        comm.announce(f"{what} of shards")
        _all_gather(comm, full, sent)
        full = full.view(torch.bool) if is_bool else full
        return full.view(comm.size, *mine.shape).to(mine.device)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0][ctx.rank], None, None


def every_part(mine: torch.Tensor, comm: Comm, what: str) -> torch.Tensor:
    """Return the tensor ``mine`` of every rank, (size, *shape), the same on each; every rank calls it.

    Partial results are gathered and combined on each rank, not all-reduced: the bits are equal on all ranks, and a
    maximum keeps its nan.
    """
    return mine[None] if comm.size == 1 else _EveryPart.apply(mine, comm, what)
