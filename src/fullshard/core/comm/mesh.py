"""Two axes of ranks: those that share a unit's shards, and those that hold replicas of the same shard."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fullshard.core.comm.host_sum import HostSum
from fullshard.core.comm.process import comm_of_group
from fullshard.core.comm.protocol import DONE, Comm, ReduceOp, Work
from fullshard.core.comm.rounded import RoundedGroup
from fullshard.core.policy import Messages, ShardingStrategy
from fullshard.errors import ProcessGroupError


class SoloComm:
    """A group of one rank: a collective is at most a copy."""

    def __init__(self, device: torch.device) -> None:
        """Take tensors on ``device``."""
        self.rank, self.size, self.device = 0, 1, device

    def announce(self, what: str) -> None:
        """See :meth:`Comm.announce`: ignored, because there is no other rank."""

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor) -> Work:
        """See :meth:`Comm.all_gather`."""
        return _copy(full, shard)

    def reduce_scatter(self, shard: torch.Tensor, full: torch.Tensor) -> Work:
        """See :meth:`Comm.reduce_scatter`."""
        return _copy(shard, full)

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Work:
        """See :meth:`Comm.all_reduce`: nothing."""
        return DONE

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> Work:
        """See :meth:`Comm.broadcast`: nothing."""
        return DONE

    def gather(self, shard: torch.Tensor, full: torch.Tensor | None, target: int = 0) -> Work:
        """See :meth:`Comm.gather`."""
        return DONE if full is None else _copy(full, shard)

    def exchange(self, received: Sequence[torch.Tensor], sent: Sequence[torch.Tensor]) -> Work:
        """See :meth:`Comm.exchange`."""
        return _copy(received[0], sent[0])

    def all_gather_object(self, value: Any) -> list[Any]:
        """See :meth:`Comm.all_gather_object`."""
        return [value]

    def barrier(self) -> None:
        """See :meth:`Comm.barrier`: nothing."""


def _copy(target: torch.Tensor, source: torch.Tensor) -> Work:
    if target.data_ptr() != source.data_ptr():
        target.copy_(source)
    return DONE


class Mesh:
    """Ranks on two axes: ``size`` is the product of both sizes.

    Attributes:
        shard_group: The ranks that share each unit: units are gathered and reduce-scattered among them.
        replica_group: The ranks that hold replicas of this rank's shards: gradients are all-reduced among them.
        messages: Format that units' weights and gradients are rounded to inside the shard group; None: not rounded.
        lane_group: The shard group for units' gathers and reduces, which rounds their messages; used for nothing else.
        size: Number of ranks, over which gradients are averaged.
        rank: This rank's number among them.
        device: Device of the collectives' tensors.
    """

    def __init__(self, shard: Comm, replicate: Comm, messages: Messages | None = None) -> None:
        """Combine the two groups that this rank belongs to."""
        self.shard_group = shard
        self.replica_group = replicate
        self.messages: Messages | None = messages
        self.lane_group = shard if messages is None else RoundedGroup(shard, messages)
        self.size = replicate.size * shard.size
        self.rank = replicate.rank * shard.size + shard.rank
        self.device = shard.device
        self._host_sums: list[HostSum] | None = None
        self._knows_host_sums = False

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Work:
        """Reduce ``tensor`` over all ranks, in place: over one axis, then the other."""
        if self.replica_group.size == 1:
            return self.shard_group.all_reduce(tensor, op)
        self.shard_group.all_reduce(tensor, op).wait()
        return self.replica_group.all_reduce(tensor, op)

    def host_sum(self) -> HostSum | None:
        """Return what adds up a host tensor over all ranks, in place, and waits for no device; None if a rank cannot.

        Every rank calls it. The first call makes groups, and waits for the device once.
        """
        if not self._knows_host_sums:
            groups: list[Any] = [group for group in (self.shard_group, self.replica_group) if group.size > 1]
            made = [group.host_sum() if hasattr(group, "host_sum") else None for group in groups]
            can = all(self.all_gather_object(None not in made))
            self._host_sums = [add for add in made if add is not None] if can else None
            self._knows_host_sums = True
        return None if self._host_sums is None else partial(_add_over, self._host_sums)

    def sent_itemsize(self, dtype: torch.dtype) -> int:
        """Return the bytes of a number of ``dtype`` in units' gathers and reduces."""
        return self.lane_group.itemsize(dtype) if isinstance(self.lane_group, RoundedGroup) else dtype.itemsize

    def as_sent(self, shard: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Return a lane's ``shard``, (shard_numel,), as every rank has it after a gather in the dtype of ``like``."""
        cast = shard.to(like)
        return self.lane_group.rounded(cast) if isinstance(self.lane_group, RoundedGroup) else cast

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Overwrite ``tensor`` on all ranks with that of rank 0: over one axis, then the other. Blocks."""
        self.replica_group.broadcast(tensor).wait()
        self.shard_group.broadcast(tensor).wait()

    def announce(self, what: str) -> None:
        """Describe the purpose of the next collectives; reported when one does not complete."""
        self.shard_group.announce(what)
        self.replica_group.announce(what)

    @property
    def all_ranks(self) -> Any:
        """A group of all ranks for sums; with two axes it is the mesh itself, which has all-reduce but no gather."""
        if self.replica_group.size == 1:
            return self.shard_group
        return self.replica_group if self.shard_group.size == 1 else self

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return the picklable ``value`` of every rank, in rank order, on every rank. Blocks; not for the hot path."""
        by_replica = self.replica_group.all_gather_object(self.shard_group.all_gather_object(value))
        return [item for replica in by_replica for item in replica]


def _add_over(sums: Sequence[HostSum], tensor: torch.Tensor) -> None:
    for add in sums:
        add(tensor)


def same_ranks(one: Mesh, other: Mesh) -> bool:
    """Return True if two meshes consist of the same groups."""
    return same_group(one.shard_group, other.shard_group) and same_group(one.replica_group, other.replica_group)


def same_group(one: Comm, other: Comm) -> bool:
    """Return True if two communicators, perhaps of two models, have the same ranks."""
    return one is other or _group(one) == _group(other)


def _group(comm: Any) -> tuple[int, int, object]:
    """Return a group's identity: its size, this rank's place, and the underlying process group or thread world."""
    while hasattr(comm, "inner"):
        comm = comm.inner
    made_of = getattr(comm, "group", None) or getattr(comm, "world", None)
    return comm.size, comm.rank, made_of if comm.size > 1 else None


def group_behind(mesh: Mesh) -> object:
    """Return the underlying process group or thread world of a mesh: of its shards, or of replicas without shards."""
    comm = mesh.shard_group if mesh.shard_group.size > 1 else mesh.replica_group
    return _group(comm)[2] or comm


def as_mesh(mesh: object, strategy: ShardingStrategy, device: torch.device | None) -> Mesh:
    """Convert a user's mesh into a :class:`Mesh`.

    Args:
        mesh: None (the default process group), a ``ProcessGroup``, a ``Comm`` or a 1-D ``DeviceMesh`` for one axis; a
            2-D ``DeviceMesh`` or a pair of process groups or Comms, ``(replicate, shard)``, for two.
        strategy: One that does not shard replicates over the one axis, hybrid ones need two axes, the others shard
            over the last.
        device: Device of the sharded model; None: this rank's accelerator if the group can use it, else CPU.

    Raises:
        ProcessGroupError: There is no process group, or the mesh does not fit the strategy.
    """
    replicate, shard = _axes(mesh, device)
    if replicate is None and strategy.needs_two_axes:
        raise ProcessGroupError(
            f"{strategy.name} takes a mesh with 2 axes, (replicate, shard); this one has 1 with {shard.size} ranks. "
            "Make one with torch.distributed.init_device_mesh(device, (replicas, ranks_each)), or use FULL_SHARD."
        )
    if strategy.shards:
        return Mesh(shard, replicate or SoloComm(shard.device))
    if replicate is not None:
        raise ProcessGroupError(
            f"{strategy.name} replicates over all ranks and takes a mesh with 1 axis; this one has 2."
        )
    return Mesh(SoloComm(shard.device), shard)


def device_mesh_of(mesh: object, device: torch.device) -> DeviceMesh | None:
    """Return torch's DeviceMesh for an argument of :func:`as_mesh`; None for Comms and pairs."""
    if isinstance(mesh, DeviceMesh):
        return mesh
    group = dist.group.WORLD if mesh is None else mesh
    return DeviceMesh.from_group(group, device.type) if isinstance(group, dist.ProcessGroup) else None


def _axes(mesh: object, device: torch.device | None) -> tuple[Comm | None, Comm]:
    """Return the replicating axis, if any, and the sharding axis."""
    if isinstance(mesh, Comm):
        return None, mesh
    if isinstance(mesh, tuple) and len(mesh) == 2 and all(isinstance(axis, (Comm, dist.ProcessGroup)) for axis in mesh):
        replicate, shard = (axis if isinstance(axis, Comm) else comm_of_group(axis, device) for axis in mesh)
        return replicate, shard
    if mesh is None:
        if not dist.is_available() or not dist.is_initialized():
            raise ProcessGroupError(
                "fully_shard needs a process group, and none is initialised. Start the script with `fullshard "
                "launch` or torchrun, and call fullshard.init() or torch.distributed.init_process_group() first."
            )
        mesh = dist.group.WORLD
    if isinstance(mesh, dist.ProcessGroup):
        return None, comm_of_group(mesh, device)
    if isinstance(mesh, DeviceMesh) and mesh.ndim in (1, 2):
        groups = [comm_of_group(mesh.get_group(axis), device) for axis in range(mesh.ndim)]
        return (None, groups[0]) if mesh.ndim == 1 else (groups[0], groups[1])
    raise ProcessGroupError(
        "mesh must be None, a ProcessGroup, a DeviceMesh with 1 or 2 axes, a Comm, or a pair of groups or Comms; "
        f"got {mesh if isinstance(mesh, DeviceMesh) else type(mesh)}."
    )
