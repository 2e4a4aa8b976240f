"""The two axes of ranks that the machines make: shards inside each machine, copies across machines."""

from __future__ import annotations

import datetime
import functools
import os
from typing import Any, cast

import torch
import torch.distributed as dist

from fullshard.comm.mesh import SoloComm
from fullshard.comm.process import TIMEOUT_S, comm_of_group
from fullshard.comm.protocol import Comm
from fullshard.errors import ProcessGroupError


def machine_axes(comm: Comm, ranks_each: int | None = None) -> tuple[Comm, Comm]:
    """Cross the ranks of each machine with the machines; on every rank together, with all ranks of the run.

    How many ranks a machine has is said by ``LOCAL_WORLD_SIZE``, which launchers set.

    Args:
        comm: All ranks, numbered machine by machine, as launchers number them.
        ranks_each: Ranks of each machine where the environment does not say; None: all are on one machine.

    Returns:
        The ranks that hold copies of this rank's shards, and those that it shares shards with: ``(replicate, shard)``,
        which ``fully_shard`` takes as a mesh.

    Raises:
        ProcessGroupError: Machines have different numbers of ranks; on every rank, with the same text.
    """
    return _axes(comm, _ranks_here(comm, ranks_each))


def machines_of_world(device: torch.device | None) -> tuple[Comm, Comm]:
    """:func:`machine_axes` of the default process group; on every rank. Later calls return the same groups.

    Args:
        device: What the collectives take tensors on; None: this rank's accelerator if the group can use it, else CPU.

    Raises:
        ProcessGroupError: There is no process group, or machines have different numbers of ranks.
    """
    if not dist.is_initialized():
        raise ProcessGroupError(
            "To shard inside each machine a process group is needed, and none is initialised. Call fullshard.init() or "
            "torch.distributed.init_process_group() first."
        )
    world: Any = dist.group.WORLD
    return _axes_once(world, device, _ranks_here(comm_of_group(world, device), None))


@functools.lru_cache(maxsize=4)
def _axes_once(world: Any, device: torch.device | None, here: int) -> tuple[Comm, Comm]:
    """The groups are made once: units of one model must have the same ones."""
    return _axes(comm_of_group(world, device), here)


def _ranks_here(comm: Comm, ranks_each: int | None) -> int:
    """How many ranks each machine has, the same on every rank."""
    here = min(int(os.environ.get("LOCAL_WORLD_SIZE", ranks_each or comm.size)), comm.size)
    numbers = comm.all_gather_object(here)
    if len(set(numbers)) > 1 or comm.size % here:
        raise ProcessGroupError(
            "A hybrid strategy needs equally many ranks on each machine; ranks are told "
            f"{', '.join(map(str, sorted(set(numbers))))} a machine, of {comm.size} in all. "
            "Start equally many everywhere, use FULL_SHARD, or name the groups yourself (a 2-D device mesh)."
        )
    return here


def _axes(comm: Comm, here: int) -> tuple[Comm, Comm]:
    """The replicating and the sharding group of this rank, with ``here`` ranks on each machine."""
    inside = [list(range(first, first + here)) for first in range(0, comm.size, here)]
    across = [list(range(place, comm.size, here)) for place in range(here)]
    return _split(comm, across), _split(comm, inside)


def _split(comm: Any, groups: list[list[int]]) -> Comm:
    """This rank's part of ``comm``; every rank makes every group, as torch asks for."""
    if hasattr(comm, "split"):  # ranks that are threads, or are not there
        return comm.split(groups)
    timeout = datetime.timedelta(seconds=TIMEOUT_S)
    members = [[dist.get_global_rank(comm.group, rank) for rank in ranks] for ranks in groups]
    made = [dist.new_group(ranks, timeout=timeout) for ranks in members]
    mine = next(index for index, ranks in enumerate(groups) if comm.rank in ranks)
    if len(groups[mine]) == 1:
        return SoloComm(comm.device)
    return comm_of_group(cast("dist.ProcessGroup", made[mine]), comm.device)
