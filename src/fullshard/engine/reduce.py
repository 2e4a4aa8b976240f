"""The reduce-scatter of a unit: takes lanes with gradients, returns shards of gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fullshard.comm import Mesh, Work
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


def start_reduce(mesh: Mesh, lanes: Sequence[LaneState]) -> list[PendingReduce]:
    """Issue the reduce-scatter of every trainable lane, with zeros where no gradient arrived."""
    pending: list[PendingReduce] = []
    for state in lanes:
        if not state.trainable:
            continue
        full = state.complete_gradient()
        # Of an unsharded lane the gradient is its own shard: nothing is copied.
        shard = full if mesh.shard.size == 1 else full.new_empty(state.lane.shard_numel)
        pending.append(PendingReduce(state, shard, mesh.shard.reduce_scatter(shard, full)))
    return pending


def finish_reduce(mesh: Mesh, pending: PendingReduce) -> torch.Tensor:
    """Wait for one lane's reduce-scatter, free its unsharded gradient and return the mean over all ranks.

    Where shards are replicated, the sums of the shard groups are all-reduced across them, 1/N of the gradient's bytes.

    Returns:
        This rank's shard of the gradient, (shard_numel,), zero in padding.
    """
    pending.work.wait()
    pending.state.drop_gradient()
    if mesh.replicate.size > 1:
        mesh.replicate.all_reduce(pending.shard).wait()
    return pending.shard.div_(mesh.size)
