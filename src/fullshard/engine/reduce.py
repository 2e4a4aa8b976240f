"""The reduce-scatter of a unit: takes lanes with gradients, returns shards of gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fullshard.comm import Comm, Work
from fullshard.engine.lane import LaneState


@dataclass
class PendingReduce:
    """A lane's reduce-scatter under way.

    Attributes:
        state: The lane.
        shard: Receives this rank's slice of the sum, then of the mean; (shard_numel,), the lane's reduce dtype.
        work: The collective.
    """

    state: LaneState
    shard: torch.Tensor
    work: Work


def start_reduce(comm: Comm, lanes: Sequence[LaneState]) -> list[PendingReduce]:
    """Issue the reduce-scatter of every trainable lane, with zeros where no gradient arrived."""
    pending: list[PendingReduce] = []
    for state in lanes:
        if not state.trainable:
            continue
        full = state.complete_gradient()
        shard = torch.empty(state.lane.shard_numel, dtype=full.dtype, device=full.device)
        pending.append(PendingReduce(state, shard, comm.reduce_scatter(shard, full)))
    return pending


def finish_reduce(comm: Comm, pending: PendingReduce) -> torch.Tensor:
    """Wait for one lane's reduce-scatter, free its unsharded gradient and return the mean over ranks.

    Returns:
        This rank's shard of the gradient, (shard_numel,), zero in padding.
    """
    pending.work.wait()
    pending.state.drop_gradient()
    return pending.shard.div_(comm.size)
