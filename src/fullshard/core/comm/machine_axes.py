"""The two mesh axes of several machines: shards inside each machine, replicas across machines."""

from __future__ import annotations

import datetime
import functools
import itertools
import os
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist

from fullshard.core.comm.mesh import SoloComm
from fullshard.core.comm.process import TIMEOUT_S, comm_of_group
from fullshard.core.comm.protocol import Comm
from fullshard.core.comm.whereabouts import MACHINE_VARIABLE
from fullshard.errors import ProcessGroupError


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
    inside = [list(range(first, first + here)) for first in range(0, comm.size, here)]
    across = [list(range(place, comm.size, here)) for place in range(here)]
    return _split(comm, across), _split(comm, inside)


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
