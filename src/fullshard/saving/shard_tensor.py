"""A rank's part of a tensor, described so that torch's distributed checkpoints (DCP) can write and read it."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from fullshard.comm import Comm, settle
from fullshard.errors import ShardingError
from fullshard.layout import Box, StatePart, boxes

_ABOUT = frozenset(
    {"device", "dtype", "shape", "layout", "ndim", "requires_grad", "is_meta", "size", "dim", "numel", "stride"}
)
"""Functions of the full tensor that are allowed; any other would read memory that is not there."""

_MOVES = frozenset({"to", "cpu"})
"""Functions by which torch's state dict getters offload each tensor."""


class ShardTensor(torch.Tensor):
    """A tensor of the full shape, without its memory, that describes to DCP which part of it this rank holds.

    A shard is a run of rows or elements, uneven over ranks, which torch's DTensor cannot express. DCP asks any tensor
    with three certain methods which boxes of the full tensor it holds, and writes and reads the memory of ``flat``.

    Attributes:
        flat: This rank's elements, 1-D, possibly none.
        start: The first of them, counted in the flattened full tensor.
        written: First and past-the-last element that this rank writes; other ranks write the rest of ``flat``.
        comm: The ranks that share the tensor; None if not known.
    """

    flat: torch.Tensor
    start: int
    written: tuple[int, int]
    comm: Comm | None

    @staticmethod
    def of(
        shape: Sequence[int],
        start: int,
        flat: torch.Tensor,
        written: tuple[int, int] | None = None,
        comm: Comm | None = None,
    ) -> ShardTensor:
        """Make one of the elements ``flat``, (numel,), from element ``start`` on, of a full tensor of ``shape``.

        All elements are written, or the run ``written``. A run that does not begin where ``flat`` does must end where
        it ends: DCP identifies boxes by where they begin.
        """
        shard = flat.new_empty(()).expand(tuple(shape)).as_subclass(ShardTensor)
        shard.flat, shard.start, shard.comm = flat, start, comm
        shard.written = (start, start + flat.numel()) if written is None else written
        return shard

    def elements(self, name: str, held: tuple[int, int]) -> torch.Tensor:
        """Return ``flat`` if it is what this rank holds of ``name``: elements ``held[0]`` to ``held[1]``, or none.

        Raises:
            ShardingError: It is another rank's part, or from another number of ranks.
        """
        stop = self.start + self.flat.numel()
        if self.flat.numel() != held[1] - held[0] or (self.flat.numel() and self.start != held[0]):
            raise ShardingError(
                f"{name} has elements {self.start} to {stop}, but this rank holds {held[0]} to {held[1]}. Load a "
                "sharded state dict of other ranks by torch.distributed.checkpoint.load."
            )
        return self.flat

    def full_tensor(self) -> torch.Tensor:
        """Return the full tensor, on the device of collectives, without gradient; every rank that shares it calls it.

        Raises:
            ShardingError: The ranks that share it are not known.
        """
        if self.comm is None:
            raise ShardingError(
                f"{self!r:.60}… does not know the other ranks: take the tensor from a sharded model's state."
            )
        return gather_full(self.comm, self.shape, self.start, self.flat)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse functions of elements, most of which are on other ranks; ``to`` and ``cpu`` apply to ``flat``.

        Raises:
            ShardingError: The function is not about shape, dtype or device.
        """
        name = getattr(func, "__name__", str(func))
        name = getattr(func.__self__, "__name__", name) if name == "__get__" else name
        if name in _ABOUT:
            return super().__torch_function__(func, types, args, kwargs or {})
        if name in _MOVES and isinstance(args[0], ShardTensor):
            part = args[0]
            return ShardTensor.of(
                part.shape, part.start, func(part.flat, *args[1:], **(kwargs or {})), part.written, part.comm
            )
        raise ShardingError(
            f"{name} of a ShardTensor: it is one rank's part of a tensor (in .flat), for torch.distributed.checkpoint. "
            "Every rank can call its full_tensor(). For full models use get_model_state_dict with "
            "full_state_dict=True, StateDictType.FULL_STATE_DICT (set_state_dict_type) or fullshard.full_state_dict."
        )

    def __repr__(self, *, tensor_contents: object = None) -> str:
        """Show which elements of the full tensor are in ``flat``."""
        stop = self.start + self.flat.numel()
        return f"ShardTensor(elements {self.start} to {stop} of {tuple(self.shape)}, flat={self.flat})"

    def __reduce_ex__(self, protocol: object) -> Any:
        """Refuse to be pickled: ``torch.save`` of what looks like the full model would save one rank's part of it.

        Raises:
            ShardingError: Always.
        """
        raise ShardingError(
            f"{self!r:.60}… is one rank's part, and pickling (torch.save) would save only that. Write parts with "
            "torch.distributed.checkpoint.save. For full tensors use get_model_state_dict with full_state_dict=True, "
            "StateDictType.FULL_STATE_DICT (set_state_dict_type), full_tensor() of each on every rank, or "
            "fullshard.save(model, directory)."
        )

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.flat)
        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size(box.offsets)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=_chunk(box), properties=properties, size=self.size()),
            )
            for box in boxes(self.shape, *self.written)
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [_chunk(box) for box in self._boxes()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        box = next(box for box in (*boxes(self.shape, *self.written), *self._boxes()) if box.offsets == index.offset)
        return self.flat[box.start - self.start :][: box.numel].view(box.sizes)

    def _boxes(self) -> list[Box]:
        return boxes(self.shape, self.start, self.start + self.flat.numel())


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))


class UnsplitTensor(torch.Tensor):
    """A plain tensor of which this rank holds all elements, and other ranks perhaps none.

    It has a ``full_tensor()`` so that every rank can call it, whichever rank holds the elements.
    """

    comm: Comm
    # Results of operations on it are plain tensors.
    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]

    @staticmethod
    def of(full: torch.Tensor, comm: Comm) -> UnsplitTensor:
        """Return ``full`` as one that the ranks of ``comm`` share."""
        made = full.as_subclass(UnsplitTensor)
        made.comm = comm
        return made

    def full_tensor(self) -> torch.Tensor:
        """Return the full tensor; see :meth:`ShardTensor.full_tensor`."""
        flat = self.as_subclass(torch.Tensor).reshape(-1)
        return gather_full(self.comm, self.shape, 0, flat)

    def to(self, *args: Any, **kwargs: Any) -> UnsplitTensor:
        """Move or cast it; every rank can still call ``full_tensor()``."""
        return UnsplitTensor.of(self.as_subclass(torch.Tensor).to(*args, **kwargs), self.comm)

    def cpu(self, *args: Any, **kwargs: Any) -> UnsplitTensor:
        """Move it to the CPU; see :meth:`to`."""
        return UnsplitTensor.of(self.as_subclass(torch.Tensor).cpu(*args, **kwargs), self.comm)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self.as_subclass(torch.Tensor).clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle a plain tensor."""
        return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)


def gather_full(comm: Comm, shape: Sequence[int], start: int, flat: torch.Tensor) -> torch.Tensor:
    """Gather a full tensor from the runs that ranks hold of it, on the device of collectives; every rank calls it.

    The ranks first exchange which runs they hold. Then each holder broadcasts its run; few ranks hold parts of a
    parameter.

    Args:
        comm: The ranks.
        shape: Shape of the full tensor.
        start: First element that this rank holds, counted in the flattened full tensor.
        flat: Its elements, (numel,), possibly none.
    """
    what = f"full_tensor() of shape {tuple(shape)}"
    comm.announce(what)
    runs = torch.empty(2 * comm.size, dtype=torch.int64, device=comm.device)
    comm.all_gather(runs, torch.tensor([start, start + flat.numel()], device=comm.device)).wait()
    full = torch.empty(prod(shape), dtype=flat.dtype, device=comm.device)
    done = 0
    for first, stop, rank in sorted((*run, rank) for rank, run in enumerate(runs.view(-1, 2).tolist())):
        first = max(first, done)  # several ranks may hold the same
        if first >= stop:
            continue
        piece = full[first:stop]
        if rank == comm.rank:
            piece.copy_(flat.detach()[first - start : stop - start])
        comm.announce(what)
        work = comm.broadcast(piece.view(torch.uint8), rank)
        work.wait()
        settle(work)
        done = stop
    return full.view(tuple(shape))


def part_or_full(
    shape: Sequence[int],
    start: int,
    flat: torch.Tensor,
    written: tuple[int, int] | None = None,
    comm: Comm | None = None,
) -> torch.Tensor:
    """Return the tensor by which DCP reads and writes the memory of ``flat``, (numel,), from element ``start`` on.

    With ``comm``, the ranks that share the tensor, it has a ``full_tensor()`` on each of them.
    """
    shape = torch.Size(shape)
    if flat.numel() < shape.numel() or written not in (None, (0, flat.numel())):
        return ShardTensor.of(shape, start, flat, written, comm)
    if comm is None:
        return flat.view(shape)
    return UnsplitTensor.of(flat.view(shape), comm)


def state_as_part(part: StatePart, value: torch.Tensor, comm: Comm | None = None) -> torch.Tensor:
    """Return the same as :func:`part_or_full` for a rank's part of a tensor of optimizer state."""
    return part_or_full(part.shape, part.held[0], value.detach().view(-1), part.written, comm)
