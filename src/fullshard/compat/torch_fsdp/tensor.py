"""The names of ``torch.distributed.tensor`` that scripts for FSDP2 use, for the shards of fullshard.

Such a script imports ``DTensor``, ``distribute_tensor`` and ``Shard`` from here, not from ``torch.distributed.tensor``.
torch's ``Shard(0)`` means equal chunks of rows. Ours are runs of rows or elements of any size: :class:`RaggedShard`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed import tensor as theirs
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from fullshard.core.comm import Mesh, settle
from fullshard.core.layout import Block
from fullshard.core.shards import Shard as Rows, run_of
from fullshard.errors import ConfigError
from fullshard.state.saving.shard_tensor import ShardTensor, UnsplitTensor, part_or_full

__all__ = [
    "DTensor",
    "DeviceMesh",
    "Partial",
    "Placement",
    "RaggedShard",
    "Replicate",
    "Shard",
    "distribute_tensor",
    "init_device_mesh",
]


class _AnyDTensor(type):
    def __instancecheck__(cls, one: Any) -> bool:
        return isinstance(one, (Rows, ShardTensor, UnsplitTensor, theirs.DTensor))

    def __getattr__(cls, name: str) -> Any:
        return getattr(theirs.DTensor, name)


class DTensor(metaclass=_AnyDTensor):
    """Matches distributed tensors in ``isinstance``: a shard, its part in a state dict, or torch's DTensor.

    Other attributes are those of torch's class.
    """

    @staticmethod
    def from_local(local_tensor: torch.Tensor, device_mesh: Any = None, placements: Any = None, **options: Any) -> Any:
        """Return torch's DTensor of a local tensor; any rank.

        Raises:
            ConfigError: ``placements`` are a parameter's, whose rows on this rank torch's class cannot describe.
        """
        if any(isinstance(place, RaggedShard) for place in placements or ()):
            raise ConfigError(
                "DTensor.from_local cannot take the placements of a sharded parameter: its ranks hold runs of rows of "
                "any size. Every rank calls distribute_tensor(full, p.device_mesh, p.placements) with the full tensor."
            )
        return theirs.DTensor.from_local(local_tensor, device_mesh, placements, **options)


@dataclass(frozen=True, eq=False)
class RaggedShard:
    """The placement of a tensor that is cut into runs of elements of any size, in the order of ranks.

    It equals ``Shard(0)``, which describes the dimension correctly but not the sizes.

    Attributes:
        mesh: The ranks that share the tensor, and those that hold replicas of it.
        elements: First and past-the-last element of this rank, in the flattened full tensor.
        dim: Always 0.
        block: If tensor parallelism divides the tensor, the block of it whose elements these are.
    """

    mesh: Mesh
    elements: tuple[int, int]
    dim: int = 0
    block: Block | None = None

    def is_shard(self, dim: int | None = None) -> bool:
        """Return whether the tensor is divided, along ``dim`` if that is given."""
        return dim in (None, 0)

    def is_replicate(self) -> bool:
        """Return False."""
        return False

    def is_partial(self, reduce_op: str | None = None) -> bool:
        """Return False."""
        return False

    def __eq__(self, other: object) -> bool:
        """Return whether ``other`` divides the first dimension too."""
        return isinstance(other, (RaggedShard, Shard)) and other.dim == 0

    def __hash__(self) -> int:
        """Return that of ``Shard(0)``."""
        return hash(Shard(0))

    def __repr__(self) -> str:
        """Show this rank's elements."""
        of = "" if self.block is None else f" of block {self.block.index} of {self.block.count}"
        return f"RaggedShard(elements {self.elements[0]} to {self.elements[1]}{of})"


def place_like(tensor: torch.Tensor, param: torch.Tensor, elements: tuple[int, int]) -> torch.Tensor:
    """Give a part, of ``elements``, the ``device_mesh`` and ``placements`` of the full tensor of ``param``."""
    if "placements" in vars(param) and isinstance(tensor, (ShardTensor, UnsplitTensor)):
        placements = (
            replace(place, elements=elements) if isinstance(place, RaggedShard) else place
            for place in vars(param)["placements"]
        )
        tensor.describe(vars(param)["device_mesh"], tuple(placements))
    return tensor


def distribute_tensor(
    tensor: torch.Tensor,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Any] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> torch.Tensor:
    """Return this rank's part of a full tensor, for ``load_state_dict``; every rank calls it.

    Args:
        tensor: The full tensor; the values of ``src_data_rank`` count.
        device_mesh: Mesh of the parameter or its part in a state dict.
        placements: Placements of the same. With torch's own placements, torch's function is called.
        src_data_rank: The rank, along each axis of the mesh, that has the values; None: each rank has them.

    Returns:
        A part as in ``model.state_dict()``.
    """
    place = next((one for one in placements or () if isinstance(one, RaggedShard)), None)
    if place is None:
        return theirs.distribute_tensor(tensor, device_mesh, placements, src_data_rank=src_data_rank)
    comm = place.mesh.shard_group
    full = tensor.detach().to(comm.device, copy=src_data_rank is not None).contiguous()
    for axis in (place.mesh.replica_group, comm):
        if src_data_rank is not None and axis.size > 1:
            work = axis.broadcast(full, src_data_rank)
            work.wait()
            settle(work)
    start, stop = place.elements
    flat = run_of(full, place.block, start, stop).clone()
    part = part_or_full(full.shape, start, flat, comm=comm if place.block is None else None, block=place.block)
    assert isinstance(part, (ShardTensor, UnsplitTensor))
    part.describe(device_mesh, tuple(placements or ()))
    return part
