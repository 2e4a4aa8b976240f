"""The reduce-scatter of a unit: from lanes with gradients to shards of gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fullshard.core.comm import DONE, Work, settle
from fullshard.core.engine.step.lane import Lane, predivisor


@dataclass
class PendingReduce:
    """A lane's reduce-scatter under way.

    Attributes:
        lane: The lane.
        shard: Receives this rank's slice of the sum; (shard_numel,), in the dtype in which gradients are summed.
        work: The collective, including the all-reduce across replicas.
        sent: The part of it during which other ranks read this rank's gradient.
        across: True if it includes the all-reduce across replicas.
    """

    lane: Lane
    shard: torch.Tensor
    work: Work
    sent: Work
    across: bool


def start_reduce(lanes: Sequence[Lane], *, across: bool) -> list[PendingReduce]:
    """Issue each trainable lane's reduce-scatter; ``across``: and the all-reduce over replicas, on a side stream."""
    pending: list[PendingReduce] = []
    for lane in lanes:
        if not lane.trainable:
            continue
        shard, work = lane.start_sum()
        inside = work or DONE
        if across and lane.mesh.replica_group.size > 1:
            work = _then_across(lane, shard, work)
        pending.append(PendingReduce(lane, shard, work or DONE, inside, across))
    return pending


def _then_across(lane: Lane, shard: torch.Tensor, inside: Work | None) -> Work:
    """All-reduce across replicas, after the reduce-scatter inside the shard group: 1/N of the gradient's bytes."""
    # The work keeps a reference until it was waited for: the side stream reads memory of the compute stream, and the
    # allocator would reuse it as soon as the last reference is gone.
    partial, lane.partial = lane.partial, None

    def work() -> None:
        if inside is not None:
            inside.wait()
        if partial is not None:
            shard.add_(partial)
        lane.mesh.replica_group.all_reduce(shard).wait()

    return lane.device.on_side_stream("replicate", work)


def finish_reduce(pending: PendingReduce, divide: float | None) -> torch.Tensor | None:
    """Wait for one lane's reduce-scatter, free its unsharded gradient and return the mean over all ranks.

    ``divide`` divides the sum over ranks; None: the number of ranks.

    Returns:
        This rank's shard of the gradient, (shard_numel,), zero in padding; None if replicas are not summed yet: then
        ``lane.partial`` holds the sum.
    """
    pending.work.wait()
    settle(pending.sent)
    lane, shard = pending.lane, pending.shard
    lane.drop_gradient()
    if not pending.across:
        lane.partial = shard if lane.partial is None else lane.partial.add_(shard)
        return None
    return shard.div_((divide or lane.mesh.size) / predivisor(lane.mesh, lane.dtypes.reduce))


def finish_partial(lane: Lane, divide: float | None) -> torch.Tensor | None:
    """Sum over replicas what earlier backwards left in ``lane.partial``; return None if there is nothing."""
    if lane.partial is None:
        return None
    shard, lane.partial = lane.partial, None
    lane.mesh.replica_group.all_reduce(shard).wait()
    return shard.div_((divide or lane.mesh.size) / predivisor(lane.mesh, lane.dtypes.reduce))
