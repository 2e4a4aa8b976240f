"""The reduce-scatter of a unit: takes lanes with gradients, returns shards of gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fullshard.comm import DONE, Mesh, Work, settle
from fullshard.engine.lane import LaneState


@dataclass
class PendingReduce:
    """A lane's reduce-scatter under way.

    Attributes:
        state: The lane.
        shard: Receives this rank's slice of the sum; (shard_numel,), in the dtype that ranks' gradients are added in.
        work: The collective.
        sent: The part of it that other ranks take this rank's gradient from.
        across: Whether it ends with the all-reduce across replicas.
    """

    state: LaneState
    shard: torch.Tensor
    work: Work
    sent: Work
    across: bool


def predivisor(mesh: Mesh, dtype: torch.dtype) -> float:
    """What float16 gradients are divided by before they are added up: the power of two next to sqrt(ranks).

    Sums of 65,504 and more overflow float16; dividing by all ranks first would lose small gradients instead, so half of
    the division is done before the sum and half after it. A power of two is exact.
    """
    return 2.0 ** round(0.5 * (mesh.size.bit_length() - 1)) if dtype == torch.float16 else 1.0


def start_reduce(lanes: Sequence[LaneState], *, across: bool) -> list[PendingReduce]:
    """Issue the reduce-scatter of every trainable lane, with zeros where no gradient arrived.

    Args:
        lanes: The unit's lanes.
        across: Whether replicas add up theirs as well, on a stream of their own.
    """
    pending: list[PendingReduce] = []
    for state in lanes:
        if not state.trainable:
            continue
        mesh, full = state.mesh, state.complete_gradient()
        divisor = predivisor(mesh, full.dtype)
        if divisor != 1.0:
            full.div_(divisor)
        if mesh.shard.size == 1:
            # The gradient of an unsharded lane is its own shard: nothing is copied.
            shard, work = full.to(state.dtypes.reduce_sum), None
        else:
            shard = full.new_empty(state.lane.shard_numel, dtype=state.dtypes.reduce_sum)
            work = mesh.shard.reduce_scatter(shard, full)
        inside = work or DONE
        if across and mesh.replicate.size > 1:
            work = _then_across(state, shard, work)
        pending.append(PendingReduce(state, shard, work or DONE, inside, across))
    return pending


def _then_across(state: LaneState, shard: torch.Tensor, inside: Work | None) -> Work:
    """After the reduce-scatter inside the shard group, the all-reduce across replicas: 1/N of the gradient's bytes."""
    # Held by the work until it was waited for: this memory is the compute stream's, and a side stream reads it.
    partial, state.partial = state.partial, None

    def work() -> None:
        if inside is not None:
            inside.wait()
        if partial is not None:
            shard.add_(partial)
        state.mesh.replicate.all_reduce(shard).wait()

    return state.device.aside("replicate", work)


def finish_reduce(pending: PendingReduce, divide: float | None) -> torch.Tensor | None:
    """Wait for one lane's reduce-scatter, free its unsharded gradient and return the mean over all ranks.

    Args:
        pending: What :func:`start_reduce` returned.
        divide: What the sum over ranks is divided by; None: their number.

    Returns:
        This rank's shard of the gradient, (shard_numel,), zero in padding; None when replicas have not added up
        theirs: the sum is kept in ``state.partial``.
    """
    pending.work.wait()
    settle(pending.sent)
    state, shard = pending.state, pending.shard
    reduced_in = state.dtypes.reduce
    state.drop_gradient()
    if not pending.across:
        state.partial = shard if state.partial is None else state.partial.add_(shard)
        return None
    return shard.div_((divide or state.mesh.size) / predivisor(state.mesh, reduced_in))


def finish_partial(state: LaneState, divide: float | None) -> torch.Tensor | None:
    """Add up across replicas what earlier backwards left in ``state.partial``; None where nothing was left."""
    if state.partial is None:
        return None
    shard, state.partial = state.partial, None
    state.mesh.replicate.all_reduce(shard).wait()
    return shard.div_((divide or state.mesh.size) / predivisor(state.mesh, state.dtypes.reduce))
