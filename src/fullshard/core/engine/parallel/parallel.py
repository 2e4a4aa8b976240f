"""What tensor parallelism made of a parameter: the rank's block, and torch's DTensor around it.

``parallelize_module`` and the like turn parameters into DTensors. Sharding takes the block of this rank, a plain
tensor, and cuts it into rows over the data parallel ranks. In forward the modules get a DTensor again, whose block is
the gathered memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from fullshard.core.comm import Mesh, comm_of_axis, grid_of, world_ranks
from fullshard.core.comm.torch_objects import dtensor_around
from fullshard.core.layout import Block
from fullshard.core.transformers_private import declared_ties
from fullshard.errors import ProcessGroupError, WrapError


class Parallel:
    """How tensor parallelism divides one parameter.

    Attributes:
        name: The parameter's, for messages.
        mesh: torch's DeviceMesh, with one axis.
        placements: torch's placements: one, a ``Shard`` or a ``Replicate``.
        shape: Shape of the full parameter.
        block: Which part of it this rank has; None if every rank has all of it.
        comm: The ranks of the mesh.
        values: This rank's block, a plain tensor, perhaps on the meta device, until :meth:`leave`.
    """

    def __init__(self, name: str, param: nn.Parameter) -> None:
        """Take ``param``, a DTensor, apart.

        Raises:
            WrapError: Its mesh has several axes, or it is divided in another way than into equal parts along one
                dimension.
        """
        dtensor: Any = param
        self.name, self.mesh, self.placements = name, dtensor.device_mesh, tuple(dtensor.placements)
        self.shape = tuple(param.shape)
        if self.mesh.ndim != 1:
            raise WrapError(
                f"{_described(name, dtensor)} on a mesh of {self.mesh.ndim} axes, {tuple(self.mesh.shape)}. fullshard "
                "takes parameters that are divided over one axis (tensor parallel) and shards them over others: leave "
                "out torch's own fully_shard, or divide over one axis."
            )
        self.block = _block_of(name, dtensor)
        self.values: torch.Tensor = dtensor.to_local().detach()
        if type(self.values) is not torch.Tensor:
            raise WrapError(
                f"{_described(name, dtensor)} around a {type(self.values).__name__}. fullshard takes DTensors around "
                "plain tensors: divide the model before its weights get another class, or leave that out."
            )
        self.comm = comm_of_axis(self.mesh, self.values.device)

    def leave(self, slots: Sequence[tuple[nn.Module, str]], param: nn.Parameter) -> None:
        """Register ``param`` in the DTensor's place, so that its memory is freed."""
        self.values = self.values.new_empty(0)
        for module, key in slots:
            module._parameters[key] = param

    def around(self, block: torch.Tensor) -> torch.Tensor:
        """Return a DTensor of the same memory as ``block``, in its shape; any rank, no communication."""
        return dtensor_around(block, self.mesh, self.placements, self.shape)

    def cut(self, full: torch.Tensor) -> torch.Tensor:
        """Return this rank's block of a full tensor: a view."""
        if self.block is None:
            return full
        at, size = (of(self.shape)[self.block.dim] for of in (self.block.offsets, self.block.shape))
        return full.narrow(self.block.dim, at, size)

    def block_of(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return this rank's block of a gradient; every rank of the mesh calls it.

        A gradient that is a sum over ranks, such as that of a norm whose rows are divided, is added up first.
        """
        if not hasattr(gradient, "placements"):
            return gradient
        dtensor: Any = gradient
        if tuple(dtensor.placements) != self.placements:
            dtensor = dtensor.redistribute(placements=self.placements)
        local = dtensor.to_local()
        return local.wait() if hasattr(local, "wait") else local


def _described(name: str, dtensor: Any) -> str:
    placed = ", ".join(map(str, dtensor.placements))
    return f"Parameter {name} {tuple(dtensor.shape)} is a DTensor placed ({placed})"


def _block_of(name: str, dtensor: Any) -> Block | None:
    """Return which part of a DTensor this rank has; None if all of it."""
    place, size, shape = dtensor.placements[0], dtensor.device_mesh.size(), tuple(dtensor.shape)
    if type(place).__name__ == "Replicate" or (type(place).__name__ == "Shard" and size == 1):
        return None
    if type(place).__name__ != "Shard":
        raise WrapError(
            f"{_described(name, dtensor)}. fullshard takes Replicate and Shard, in equal parts: place it so with "
            "redistribute before fully_shard."
        )
    if shape[place.dim] % size:
        raise WrapError(
            f"{_described(name, dtensor)} over {size} ranks: dimension {place.dim} of {shape[place.dim]} cannot be cut "
            f"into equal parts. Divide over a number of ranks that divides {shape[place.dim]}, or leave this parameter "
            "out of the plan."
        )
    return Block(place.dim % len(shape), dtensor.device_mesh.get_local_rank(), size)


def is_distributed(param: torch.Tensor) -> bool:
    """Return True if torch has divided a parameter over ranks, and fullshard has not taken it yet."""
    return hasattr(param, "placements") and not hasattr(param, "shard_meta")


def check_ties(root: nn.Module, every: Mesh) -> None:
    """Refuse parameters that the model's configuration ties and tensor parallelism has parted. Every rank calls it.

    A model from files with two tables has two, whatever its configuration says: they differ in their values.

    Raises:
        WrapError: Two parameters, of which one is a DTensor, have the same values and should be one; on every rank.
    """
    for path, module in root.named_modules():
        ties = declared_ties(module)
        held = dict(module.named_parameters(remove_duplicate=False)) if ties else {}
        for names in ties.items():
            one, other = (held.get(name) for name in names)
            if one is None or other is None or one is other or not (_is_divided(one) or _is_divided(other)):
                continue
            if all(every.all_gather_object(_may_be_equal(one, other))):
                first, second = (f"{path}.{name}" if path else name for name in names)
                raise WrapError(
                    f"{first} and {second} are one parameter by the model's configuration (tie_word_embeddings: true), "
                    "and dividing the model has made two of it, which would be trained apart. Call "
                    f"{type(module).__name__}.tie_weights() after parallelize_module, whose plan must divide both "
                    "along the same dimension, or neither. If they are two tables, set "
                    "config.tie_word_embeddings = False."
                )


def _is_divided(param: nn.Parameter) -> bool:
    return is_distributed(param) or getattr(vars(param).get("shard_meta"), "block", None) is not None


def _may_be_equal(one: nn.Parameter, other: nn.Parameter) -> bool:
    """Return False if two parameters have different shapes, or different values in what this rank has of both."""
    if any(hasattr(param, "shard_meta") or param.is_meta for param in (one, other)):
        return True  # sharded before, or without values
    if one.shape != other.shape:
        return False
    parts = [Parallel("", param) for param in (one, other) if is_distributed(param)]
    if len(parts) == 2 and None not in (blocks := [part.block for part in parts]) and blocks[0] != blocks[1]:
        return True
    mine, theirs = (
        param.detach() if not is_distributed(param) else Parallel("", param).values for param in (one, other)
    )
    for part in parts:  # of a full tensor, the part that this rank has of the other one
        mine, theirs = (part.cut(each) if each.shape == one.shape else each for each in (mine, theirs))
    return torch.equal(mine, theirs)


def everyone(ranks: Mesh, parallel: Parallel | None) -> Mesh:
    """Return all ranks that hold parts of a model: those that share shards and, if it is tensor parallel, blocks."""
    return ranks if parallel is None else Mesh(grid_of(ranks.shard_group, parallel.comm), ranks.replica_group)


def check_axes(parallels: Sequence[Parallel], ranks: Mesh) -> None:
    """Refuse parameters that are divided over ranks which would shard them too. Every rank calls it.

    Raises:
        ProcessGroupError: The two kinds of ranks have more than this rank in common, or the parameters are divided over
            different ranks.
    """
    if not parallels:
        return
    first = parallels[0]
    own, divided = world_ranks(ranks), first.mesh.mesh.flatten().tolist()
    other = next((one for one in parallels if one.mesh.mesh.flatten().tolist() != divided), None)
    if other is not None:
        raise ProcessGroupError(
            f"{first.name} is divided over ranks {divided} and {other.name} over "
            f"{other.mesh.mesh.flatten().tolist()}. fullshard takes one axis of tensor parallel ranks: divide both "
            "over the same."
        )
    if len(common := set(own) & set(divided)) > 1:
        raise ProcessGroupError(
            f"{first.name} is a DTensor over ranks {divided}, and fully_shard was asked to shard over ranks {own}: "
            f"{sorted(common)} are in both, so they have different parts of it and cannot share its rows. Make one "
            'mesh, init_device_mesh(device, (data, tensor), mesh_dim_names=("dp", "tp")), divide over mesh["tp"], and '
            'call fully_shard(model, mesh=mesh["dp"]); and leave out torch\'s own fully_shard and distributed_config= '
            "of from_pretrained."
        )
