"""Two axes of ranks: those that share a unit's shards, and those that hold replicas of the same shard.

On several machines these may be the ranks of each machine, and those across machines.
"""

from __future__ import annotations

import datetime
import functools
import itertools
import os
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fullshard.core.comm.process import TIMEOUT_S, HostSum, comm_of_group
from fullshard.core.comm.protocol import DONE, Comm, ReduceOp, Work
from fullshard.core.comm.stack_probe import MACHINE_VARIABLE
from fullshard.core.policy import ShardingStrategy
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
        size: Number of ranks, over which gradients are averaged.
        rank: This rank's number among them.
        device: Device of the collectives' tensors.
    """

    def __init__(self, shard: Comm, replicate: Comm) -> None:
        """Combine the two groups that this rank belongs to."""
        self.shard_group = shard
        self.replica_group = replicate
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


def group_of(comm: Comm) -> object:
    """Return the process group or thread world that a communicator of several ranks is made of; else None."""
    return _group(comm)[2]


def _group(comm: Any) -> tuple[int, int, object]:
    """Return a group's identity: its size, this rank's place, and the underlying process group or thread world."""
    while hasattr(comm, "inner"):
        comm = comm.inner
    made_of = getattr(comm, "group", None) or getattr(comm, "world", None)
    return comm.size, comm.rank, made_of if comm.size > 1 else None


def identity_of(comm: Comm) -> str:
    """Return a text that is equal on the ranks of one group, and another for every other group; any rank, no message.

    Groups of one rank are alike, and so are simulated ones.
    """
    size, _, group = _group(comm)
    if isinstance(group, dist.ProcessGroup):
        return f"{group.group_name} {dist.get_process_group_ranks(group)}"
    return f"{size} ranks" if group is None else f"threads {id(group)}"


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
    if mesh is dist.GroupMember.NON_GROUP_MEMBER:
        raise ProcessGroupError(
            f"This rank, {dist.get_rank()}, is in none of the groups: torch's new_group returned no group here. Make "
            "groups so that each rank is in one."
        )
    if isinstance(mesh, dist.ProcessGroup):
        return None, comm_of_group(mesh, device)
    if isinstance(mesh, DeviceMesh) and mesh.ndim in (1, 2):
        groups = [comm_of_group(mesh.get_group(axis), device) for axis in range(mesh.ndim)]
        return (None, groups[0]) if mesh.ndim == 1 else (groups[0], groups[1])
    raise ProcessGroupError(
        "mesh must be None, a ProcessGroup, a DeviceMesh with 1 or 2 axes, a Comm, or a pair of groups or Comms; "
        f"got {mesh if isinstance(mesh, DeviceMesh) else type(mesh)}."
    )


def named_ranks(group: Any, device: torch.device | None) -> Any:
    """Return a Comm for an object that only has ``rank()`` and ``size()``, as in tests of wrapping; else ``group``."""
    described = callable(getattr(group, "rank", None)) and callable(getattr(group, "size", None))
    if not described or isinstance(group, (Comm, dist.ProcessGroup)):
        return group
    solo = SoloComm(device or torch.device("cpu"))
    return solo if group.size() == 1 else NamedRanks(group.rank(), group.size(), solo.device)


class NamedRanks:
    """Ranks that cannot be reached: modules can be sharded and inspected for them, as if all held the same values."""

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        """Describe rank ``rank`` of ``size``."""
        self.rank, self.size, self.device = rank, size, device

    def announce(self, what: str) -> None:
        """See :meth:`Comm.announce`: ignored."""

    def all_gather_object(self, value: Any) -> list[Any]:
        """See :meth:`Comm.all_gather_object`: this rank's value for every rank."""
        return [value] * self.size

    def _refuse(self, *_args: Any, **_kwargs: Any) -> Any:
        raise ProcessGroupError(
            f"The process group only has rank() and size(), so its {self.size} ranks cannot communicate: a model can "
            "be wrapped with it, but not run. Pass a group of torch.distributed."
        )

    all_gather = reduce_scatter = all_reduce = broadcast = gather = exchange = barrier = _refuse


def machine_axes(comm: Comm, ranks_each: int | None = None) -> tuple[Comm, Comm]:
    """Split the ranks of a run into shard groups (each machine) and replica groups (across machines).

    Every rank calls it. The number of ranks of a machine is ``LOCAL_WORLD_SIZE``, which launchers set, or that of
    ranks with the same ``FULLSHARD_MACHINE``.

    Args:
        comm: All ranks, numbered machine by machine, as launchers number them.
        ranks_each: Ranks of each machine if the environment does not set it; None: all are on one machine.

    Returns:
        The ranks that hold replicas of this rank's shards, and those that it shares shards with: ``(replicate,
        shard)``, which ``fully_shard`` accepts as a mesh.

    Raises:
        ProcessGroupError: Machines have different numbers of ranks; on every rank, with the same text.
    """
    return axes_of(comm, _ranks_here(comm, ranks_each))


def machines_of_world(device: torch.device | None) -> tuple[Comm, Comm]:
    """Return :func:`machine_axes` of the default process group; on every rank. Later calls return the same groups.

    Args:
        device: Device of the collectives' tensors; None: this rank's accelerator if the group can use it, else CPU.

    Raises:
        ProcessGroupError: There is no process group, or machines have different numbers of ranks.
    """
    if not dist.is_initialized():
        raise ProcessGroupError(
            "Sharding inside each machine needs a process group, and none is initialised. Call fullshard.init() or "
            "torch.distributed.init_process_group() first."
        )
    world: Any = dist.group.WORLD
    return _axes_once(world, device, _ranks_here(comm_of_group(world, device), None))


@functools.lru_cache(maxsize=4)
def _axes_once(world: Any, device: torch.device | None, here: int) -> tuple[Comm, Comm]:
    """Return the axes from a cache, because all units of a model must use the same groups."""
    return axes_of(comm_of_group(world, device), here)


def _ranks_here(comm: Comm, ranks_each: int | None) -> int:
    """Return the number of ranks of each machine, the same on every rank."""
    here = min(int(os.environ.get("LOCAL_WORLD_SIZE", ranks_each or comm.size)), comm.size)
    numbers, names = zip(*comm.all_gather_object((here, os.environ.get(MACHINE_VARIABLE))), strict=True)
    if any(names):
        return _ranks_of_named(names)
    if len(set(numbers)) > 1 or comm.size % here:
        raise ProcessGroupError(
            "A hybrid strategy needs the same number of ranks on each machine; LOCAL_WORLD_SIZE (or ranks_each) is "
            f"{' and '.join(map(str, sorted(set(numbers))))}, of {comm.size} ranks in all. Start equally many on each "
            "machine, use FULL_SHARD, or set the groups yourself (a 2-D device mesh)."
        )
    return here


def _ranks_of_named(names: Sequence[str | None]) -> int:
    """Return the number of ranks of each machine, from the machines' names in rank order."""
    runs = [(name, len(list(same))) for name, same in itertools.groupby(names)]
    numbers = {number for _, number in runs}
    if len(numbers) > 1 or len({name for name, _ in runs}) < len(runs):
        raise ProcessGroupError(
            "A hybrid strategy needs the same number of ranks on each machine, numbered machine by machine; "
            f"{MACHINE_VARIABLE} is, in rank order: {', '.join(name or '(not set)' for name in names)}. Set it so, or "
            "not at all."
        )
    return numbers.pop()


def axes_of(comm: Comm, here: int) -> tuple[Comm, Comm]:
    """Return the replica group and the shard group of this rank, ``here`` consecutive ranks; every rank calls it."""
    across = [list(range(place, comm.size, here)) for place in range(here)]
    return _split(comm, across), neighbours(comm, here)


def neighbours(comm: Comm, each: int) -> Comm:
    """Return this rank's group of ``each`` consecutive ranks, a divisor of their number; every rank calls it."""
    return _split(comm, [list(range(first, first + each)) for first in range(0, comm.size, each)])


def _split(comm: Any, groups: list[list[int]]) -> Comm:
    """Return this rank's group among ``groups``; every rank makes every group, because torch requires it."""
    if hasattr(comm, "split"):  # ranks as threads, and the simulated ranks of a dry run
        return comm.split(groups)
    timeout = datetime.timedelta(seconds=TIMEOUT_S)
    members = [[dist.get_global_rank(comm.group, rank) for rank in ranks] for ranks in groups]
    made = [dist.new_group(ranks, timeout=timeout) for ranks in members]
    mine = next(index for index, ranks in enumerate(groups) if comm.rank in ranks)
    if len(groups[mine]) == 1:
        return SoloComm(comm.device)
    return comm_of_group(cast("dist.ProcessGroup", made[mine]), comm.device)
