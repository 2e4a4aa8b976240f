"""torch's own objects, for users' code that was written for torch's FSDP."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fullshard.core.comm.mesh import group_of
from fullshard.core.comm.protocol import Comm
from fullshard.core.policy import MixedPrecision


class CommMesh:
    """Stands for torch's DeviceMesh with one axis where ranks are not a process group: threads, a plan, one rank.

    Attributes:
        ndim: 1.
    """

    ndim = 1

    def __init__(self, comm: Comm) -> None:
        """Describe the ranks of ``comm``."""
        self._comm = comm

    def size(self, mesh_dim: int | None = None) -> int:
        """Return the number of ranks."""
        return self._comm.size

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        """Return this rank's place."""
        return self._comm.rank

    def get_group(self, mesh_dim: int | str | None = None) -> PlannedGroup | CommGroup:
        """Return what stands for their process group."""
        kind: Any = PlannedGroup if dist.is_initialized() else None
        return CommGroup(self._comm) if kind is None else kind(self._comm.rank, self._comm.size)


class PlannedGroup(dist.ProcessGroup):
    """A group of a plan's ranks beside real ones: torch's collectives, which torchao's float8 calls, take no stand-in.

    It has no backend: tensors of a plan, which have no values, do not get so far.
    """

    @property
    def group_name(self) -> str:
        """The default group's, by which torch finds a group."""
        return dist.group.WORLD.group_name  # type: ignore[union-attr]


class CommGroup:
    """Stands for torch's ProcessGroup: tells how many ranks there are, and has no collectives."""

    def __init__(self, comm: Comm) -> None:
        """Describe the ranks of ``comm``."""
        self._comm = comm

    def size(self) -> int:
        """Return the number of ranks."""
        return self._comm.size

    def rank(self) -> int:
        """Return this rank's place."""
        return self._comm.rank


def torch_mesh(comm: Comm, device: torch.device) -> DeviceMesh | CommMesh:
    """Return the ranks of ``comm`` as torch's DeviceMesh with one axis; any rank, no communication with others."""
    group = group_of(comm)
    if comm.size == 1 and dist.is_initialized():
        group = _group_of_one(dist.group.WORLD)
    return _mesh_once(group, device.type) if isinstance(group, dist.ProcessGroup) else CommMesh(comm)


@functools.lru_cache(maxsize=1)
def _group_of_one(world: Any) -> Any:
    """Return a process group of this rank alone: classes call torch's collectives on it."""
    return world if world.size() == 1 else dist.new_group([dist.get_rank()], use_local_synchronization=True)


@functools.lru_cache(maxsize=4)
def _mesh_once(group: Any, device_type: str) -> DeviceMesh:
    return DeviceMesh.from_group(group, device_type)


def dtensor_around(block: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Any], shape: Sequence[int]) -> Any:
    """Return a DTensor of the same memory as ``block``, this rank's part; any rank, no communication, no autograd."""
    from torch.distributed.tensor import DTensor  # noqa: PLC0415 (only for models whose owner has imported it)

    strides = torch.empty(tuple(shape), device="meta").stride()
    with torch.no_grad():
        return DTensor.from_local(block, mesh, placements, run_check=False, shape=torch.Size(shape), stride=strides)


def torch_policy(precision: MixedPrecision) -> Any:
    """Return torch's MixedPrecisionPolicy for ``precision``."""
    # Half a second, for the few classes that ask for it.
    from torch.distributed.fsdp import MixedPrecisionPolicy  # noqa: PLC0415

    names = (precision.param, precision.reduce, precision.output)
    param, reduce, output = (None if name is None else getattr(torch, name) for name in names)
    return MixedPrecisionPolicy(param, reduce, output, precision.cast_forward_inputs)
