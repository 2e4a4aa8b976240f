"""A group of two axes: ranks that share blocks of tensors, times ranks that have different blocks (tensor parallel)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fullshard.core.comm.mesh import Mesh, group_of
from fullshard.core.comm.process import comm_of_group
from fullshard.core.comm.protocol import DONE, Comm, ReduceOp, Work, settle
from fullshard.errors import InvariantError


class GridComm:
    """All ranks that hold parts of a tensor which two axes divide; every rank of both axes calls each method.

    Ranks are numbered block by block. It has what sums, comparisons and saves need: parameters are gathered and reduced
    inside one axis.

    Attributes:
        shards: The ranks that share one block.
        blocks: The ranks that have the other blocks, one of each.
        group: Tells two grids of the same ranks from others.
    """

    def __init__(self, shards: Comm, blocks: Comm) -> None:
        """Combine the two groups that this rank belongs to."""
        self.shards, self.blocks = shards, blocks
        self.size, self.device = shards.size * blocks.size, shards.device
        self.rank = blocks.rank * shards.size + shards.rank
        self.group = (group_of(shards), group_of(blocks))

    def announce(self, what: str) -> None:
        """See :meth:`Comm.announce`."""
        self.shards.announce(what)
        self.blocks.announce(what)

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor) -> Work:
        """See :meth:`Comm.all_gather`; blocks."""
        mine = full.view(self.blocks.size, -1)[self.blocks.rank]
        _finished(self.shards.all_gather(mine, shard))
        _finished(self.blocks.all_gather(full, mine))
        return DONE

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Work:
        """See :meth:`Comm.all_reduce`: over one axis, then the other."""
        self.shards.all_reduce(tensor, op).wait()
        return self.blocks.all_reduce(tensor, op)

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> Work:
        """See :meth:`Comm.broadcast`: inside each block, then from the block of ``source``."""
        block, place = divmod(source, self.shards.size)
        _finished(self.shards.broadcast(tensor, place))
        return self.blocks.broadcast(tensor, block)

    def gather(self, shard: torch.Tensor, full: torch.Tensor | None, target: int = 0) -> Work:
        """See :meth:`Comm.gather`: every rank of the target's place receives its block's."""
        block, place = divmod(target, self.shards.size)
        here = self.shards.rank == place
        mine = shard.new_empty(self.shards.size * shard.numel()) if here else None
        _finished(self.shards.gather(shard, mine, place))
        return DONE if mine is None else self.blocks.gather(mine, full, block)

    def reduce_scatter(self, shard: torch.Tensor, full: torch.Tensor) -> Work:
        """Refuse: the ranks that share a block do it."""
        raise InvariantError("a grid of ranks reduce-scatters nothing")

    def exchange(self, received: Sequence[torch.Tensor], sent: Sequence[torch.Tensor]) -> Work:
        """Refuse: nothing needs it."""
        raise InvariantError("a grid of ranks exchanges nothing")

    def all_gather_object(self, value: Any) -> list[Any]:
        """See :meth:`Comm.all_gather_object`."""
        by_block = self.blocks.all_gather_object(self.shards.all_gather_object(value))
        return [one for block in by_block for one in block]

    def barrier(self) -> None:
        """See :meth:`Comm.barrier`."""
        self.shards.barrier()
        self.blocks.barrier()


def _finished(work: Work) -> None:
    work.wait()
    settle(work)


@functools.lru_cache(maxsize=16)
def grid_of(shards: Comm, blocks: Comm) -> GridComm:
    """Return the grid of two groups; the same object for the same groups, which tells parameters of one model alike."""
    return GridComm(shards, blocks)


def comm_of_axis(axis: DeviceMesh, device: torch.device) -> Comm:
    """Return the Comm of an axis of torch's DeviceMesh; the same object in each call, which numbers its messages.

    Args:
        axis: A DeviceMesh with one axis.
        device: Where its tensors are; if that is the meta device, they are expected on this rank's of the mesh.
    """
    if device.type == "meta":
        device = torch.empty(0, device=axis.device_type).device
    return _comm_of(axis.get_group(), device)


@functools.lru_cache(maxsize=16)
def _comm_of(group: dist.ProcessGroup, device: torch.device) -> Comm:
    return comm_of_group(group, device)


def world_ranks(ranks: Mesh) -> list[int]:
    """Return the numbers of ``ranks`` in the default process group; every one of them calls it."""
    return ranks.all_gather_object(dist.get_rank())
