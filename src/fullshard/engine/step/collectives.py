"""The all-gather and the reduce-scatter of a unit: they take lanes and know no parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fullshard.comm import DONE, Mesh, Work, settle
from fullshard.engine.step.buffers import PermanentBuffer
from fullshard.engine.step.lane import Lane


def start_gather(lanes: Sequence[Lane]) -> list[Work]:
    """Issue the all-gather of every lane.

    The shard is cast straight into this rank's slice of the gathered buffer (one pass over 1/N of the unit, from host
    memory where it is offloaded), and the collective runs in place: what arrives is where the parameters' views look.

    Returns:
        One work a lane that is sharded; the buffers may be read when all are done.
    """
    works: list[Work] = []
    for lane in lanes:
        if isinstance(lane.full, PermanentBuffer):
            continue
        lane.full.take()
        comm = lane.mesh.shard_group
        low, high = lane.layout.shard_bounds(comm.rank)
        mine = lane.full.alias[low:high]
        # To the device first: a cast on the host would go through memory that is not page-locked.
        mine.copy_(lane.shard.to(mine.device, non_blocking=True))
        works.append(comm.all_gather(lane.full.alias, mine))
    return works


@dataclass
class PendingReduce:
    """A lane's reduce-scatter under way.

    Attributes:
        lane: The lane.
        shard: Receives this rank's slice of the sum; (shard_numel,), in the dtype that ranks' gradients are added in.
        work: The collective.
        sent: The part of it that other ranks take this rank's gradient from.
        across: Whether it ends with the all-reduce across replicas.
    """

    lane: Lane
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


def start_reduce(lanes: Sequence[Lane], *, across: bool) -> list[PendingReduce]:
    """Issue the reduce-scatter of every trainable lane, with zeros where no gradient arrived.

    Args:
        lanes: The unit's lanes.
        across: Whether replicas add up theirs as well, on a stream of their own.
    """
    pending: list[PendingReduce] = []
    for lane in lanes:
        if not lane.trainable:
            continue
        mesh, full = lane.mesh, lane.complete_gradient()
        divisor = predivisor(mesh, full.dtype)
        if divisor != 1.0:
            full.div_(divisor)
        if mesh.shard_group.size == 1:
            # The gradient of an unsharded lane is its own shard: nothing is copied.
            shard, work = full.to(lane.dtypes.reduce_sum), None
        else:
            shard = full.new_empty(lane.layout.shard_numel, dtype=lane.dtypes.reduce_sum)
            work = mesh.shard_group.reduce_scatter(shard, full)
        inside = work or DONE
        if across and mesh.replica_group.size > 1:
            work = _then_across(lane, shard, work)
        pending.append(PendingReduce(lane, shard, work or DONE, inside, across))
    return pending


def _then_across(lane: Lane, shard: torch.Tensor, inside: Work | None) -> Work:
    """After the reduce-scatter inside the shard group, the all-reduce across replicas: 1/N of the gradient's bytes."""
    # Held by the work until it was waited for: this memory is the compute stream's, and a side stream reads it.
    partial, lane.partial = lane.partial, None

    def work() -> None:
        if inside is not None:
            inside.wait()
        if partial is not None:
            shard.add_(partial)
        lane.mesh.replica_group.all_reduce(shard).wait()

    return lane.device.aside("replicate", work)


def finish_reduce(pending: PendingReduce, divide: float | None) -> torch.Tensor | None:
    """Wait for one lane's reduce-scatter, free its unsharded gradient and return the mean over all ranks.

    Args:
        pending: What :func:`start_reduce` returned.
        divide: What the sum over ranks is divided by; None: their number.

    Returns:
        This rank's shard of the gradient, (shard_numel,), zero in padding; None when replicas have not added up
        theirs: the sum is kept in ``lane.partial``.
    """
    pending.work.wait()
    settle(pending.sent)
    lane, shard = pending.lane, pending.shard
    reduced_in = lane.dtypes.reduce
    lane.drop_gradient()
    if not pending.across:
        lane.partial = shard if lane.partial is None else lane.partial.add_(shard)
        return None
    return shard.div_((divide or lane.mesh.size) / predivisor(lane.mesh, reduced_in))


def finish_partial(lane: Lane, divide: float | None) -> torch.Tensor | None:
    """Add up across replicas what earlier backwards left in ``lane.partial``; None where nothing was left."""
    if lane.partial is None:
        return None
    shard, lane.partial = lane.partial, None
    lane.mesh.replica_group.all_reduce(shard).wait()
    return shard.div_((divide or lane.mesh.size) / predivisor(lane.mesh, lane.dtypes.reduce))
