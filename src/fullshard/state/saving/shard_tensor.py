"""A tensor class for one rank's part, which torch's distributed checkpoints (DCP) write and read, and pickle holds."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import astuple
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from fullshard.core.comm import Comm
from fullshard.core.layout import Block, Box, StatePart, boxes_in
from fullshard.core.shards import gather_blocks, gather_full, rows_of
from fullshard.core.torch_private import plain_subclass
from fullshard.errors import ShardingError

_ABOUT = frozenset(
    {
        "device",
        "dtype",
        "shape",
        "layout",
        "ndim",
        "requires_grad",
        "requires_grad_",
        "is_meta",
        "size",
        "dim",
        "numel",
        "stride",
    }
)
"""Functions of the full tensor that are allowed; any other would read memory that does not exist."""

_PICKLED = (
    "A state dict with ShardTensors is pickled (torch.save): the file holds this rank's part only. Each rank must "
    "write a file of its own, and reads it back as the same rank of as many ranks. One file for all: "
    "torch.distributed.checkpoint.save, get_model_state_dict with full_state_dict=True, "
    "StateDictType.FULL_STATE_DICT (set_state_dict_type), or fullshard.save(model, directory)."
)

_MOVES = frozenset({"to", "cpu", "detach", "clone"})
"""Functions by which torch's getters offload each tensor, ``nn.Parameter`` takes it, and scripts keep a copy."""

_FILLS = frozenset({"fill_", "zero_"})


class _Ranks:
    """The ranks that share a tensor; copies of the tensor share it."""

    def __init__(self, comm: Comm | None) -> None:
        self.comm = comm
        self.described: dict[str, Any] = {}

    def __deepcopy__(self, memo: object) -> _Ranks:
        return self


class _Described:
    """The attributes by which a DTensor describes its ranks, if :meth:`describe` set them."""

    _ranks: _Ranks

    def describe(self, device_mesh: Any, placements: tuple[Any, ...]) -> None:
        """Set ``device_mesh`` and ``placements``."""
        self._ranks.described = {"device_mesh": device_mesh, "placements": placements}

    def __getattr__(self, name: str) -> Any:
        """Return one of the two; before :meth:`describe` there is no such attribute."""
        if name in ("device_mesh", "placements") and name in self._ranks.described:
            return self._ranks.described[name]
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}.")


class ShardTensor(_Described, torch.Tensor):
    """A tensor of the full shape without its memory, which describes to DCP the part that this rank holds.

    A shard is a run of rows or elements, uneven over ranks, which torch's DTensor cannot express. DCP asks any tensor
    with three certain methods which boxes of the full tensor it holds, and writes and reads the memory of ``flat``.

    Attributes:
        flat: This rank's elements, 1-D, possibly none.
        start: The first of them, counted in the flattened full tensor.
        written: First and past-the-last element that this rank writes; other ranks write the rest of ``flat``.
        block: If tensor parallelism divides the tensor, the block of it whose elements ``start`` and ``written`` count.
        place: Number of the rank whose part it is and of the ranks that share the tensor, also after it was pickled;
            None if not known.
    """

    flat: torch.Tensor
    start: int
    written: tuple[int, int]
    block: Block | None
    place: tuple[int, int] | None
    _ranks: _Ranks

    @staticmethod
    def of(
        shape: Sequence[int],
        start: int,
        flat: torch.Tensor,
        written: tuple[int, int] | None = None,
        comm: Comm | None = None,
        block: Block | None = None,
    ) -> ShardTensor:
        """Create one from the elements ``flat``, (numel,), starting at element ``start`` of a full tensor of ``shape``.

        All elements are written, or the run ``written``. A run that does not begin where ``flat`` does must end where
        it ends: DCP identifies boxes by where they begin.
        """
        shard = flat.new_empty(()).expand(tuple(shape)).as_subclass(ShardTensor)
        shard.flat, shard.start, shard.block, shard._ranks = flat, start, block, _Ranks(comm)
        shard.place = None if comm is None else (comm.rank, comm.size)
        shard.written = (start, start + flat.numel()) if written is None else written
        return shard

    @property
    def comm(self) -> Comm | None:
        """The ranks that share the tensor; None if not known."""
        return self._ranks.comm

    def elements(
        self, name: str, held: tuple[int, int], comm: Comm | None = None, block: Block | None = None
    ) -> torch.Tensor:
        """Return ``flat`` if it is what this rank, of ``comm``, holds of ``name``: elements from ``held[0]`` on.

        Raises:
            ShardingError: It is another rank's part, or from another number of ranks.
        """
        stop = self.start + self.flat.numel()
        other = self.flat.numel() != held[1] - held[0] or (self.flat.numel() and self.start != held[0])
        if other or self.block != block:
            here = None if comm is None else (comm.rank, comm.size)
            raise ShardingError(
                f"{name} has elements {self.start} to {stop}{_of(self.block)}{_of_rank(self.place)}, but this rank"
                f"{_of_rank(here)} holds {held[0]} to {held[1]}{_of(block)}. A rank's part loads on the same rank of "
                "as many ranks with the same units. For other ranks write it with torch.distributed.checkpoint.save, "
                "and load that."
            )
        return self.flat

    def full_tensor(self) -> torch.Tensor:
        """Return the full tensor, on the device of collectives, without gradient; every rank that shares it calls it.

        Raises:
            ShardingError: The ranks that share it are not known.
        """
        if self.comm is None:
            raise ShardingError(
                f"{self!r:.60}… was loaded or copied and cannot reach the other ranks. "
                "Take it from the sharded model's state dict."
            )
        if self.block is not None:
            return gather_blocks(self.comm, self.shape, self.block, self.start, self.flat)
        return gather_full(self.comm, self.shape, self.start, self.flat)

    def to_local(self) -> torch.Tensor:
        """Return this rank's rows, (rows here, *rest), of the same memory; a run of elements, 1-D, if it cuts a row."""
        shape = tuple(self.shape if self.block is None else self.block.shape(self.shape))[1:]
        row = math.prod(shape)
        if row == 0 or self.start % row or self.flat.numel() % row:
            return self.flat
        return self.flat.view(-1, *shape)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """Copy this rank's part, as ``clone()`` does: scripts keep the best weights as a deep copy of a state dict."""
        memo[id(self)] = copied = self.clone()
        return copied

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse functions of elements, most of which are on other ranks; copies, moves and fills use ``flat``.

        ``data_ptr`` is 0 and ``new_empty`` makes one without elements: ``dcp.async_save`` copies a tensor without
        memory by ``new_empty`` and its attributes, ``flat`` among them.

        Raises:
            ShardingError: The function is not about shape, dtype or device.
        """
        name = getattr(func, "__name__", str(func))
        name = getattr(func.__self__, "__name__", name) if name == "__get__" else name
        if name in _ABOUT:
            return super().__torch_function__(func, types, args, kwargs or {})
        if name in _MOVES and isinstance(args[0], ShardTensor):
            part = args[0]
            flat = func(part.flat, *args[1:], **(kwargs or {}))
            moved = _placed(ShardTensor.of(part.shape, part.start, flat, part.written, block=part.block), part.place)
            moved._ranks = part._ranks
            return moved
        if name in _FILLS:
            func(args[0].flat, *args[1:], **(kwargs or {}))
            return args[0]
        if name == "data_ptr":
            return 0
        if name == "new_empty" and tuple(args[1]) == tuple(args[0].shape):
            flat = args[0].flat.new_empty(0, **(kwargs or {}))
            return ShardTensor.of(args[1], args[0].start, flat, block=args[0].block)
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
        """Pickle this rank's part and its place, but not the other ranks; rank 0 warns that it is a part."""
        if self.place is not None and self.place[0] == 0:
            warnings.warn(_PICKLED, stacklevel=2)
        # A clone of a view: pickling one would write all of the memory that it is a view of.
        flat = self.flat if self.flat.untyped_storage().nbytes() == self.flat.nbytes else self.flat.clone()
        return unpickled_part, (
            tuple(self.shape),
            self.start,
            flat,
            tuple(self.written),
            self.place,
            self.block and astuple(self.block),
        )

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.flat)
        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size(box.offsets)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=_chunk(box), properties=properties, size=self.size()),
            )
            for box in boxes_in(self.shape, self.block, *self.written)
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [_chunk(box) for box in self._boxes()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        written = boxes_in(self.shape, self.block, *self.written)
        box = next(box for box in (*written, *self._boxes()) if box.offsets == index.offset)
        return self.flat[box.start - self.start :][: box.numel].view(box.sizes)

    def _boxes(self) -> list[Box]:
        return boxes_in(self.shape, self.block, self.start, self.start + self.flat.numel())


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))


def _of(block: Block | None) -> str:
    return "" if block is None else f" of {block}"


def _of_rank(place: tuple[int, int] | None) -> str:
    return "" if place is None else f" (rank {place[0]} of {place[1]})"


def _placed(part: ShardTensor, place: tuple[int, int] | None) -> ShardTensor:
    part.place = place
    return part


def unpickled_part(
    shape: tuple[int, ...],
    start: int,
    flat: torch.Tensor,
    written: tuple[int, int],
    place: tuple[int, int] | None,
    block: tuple[int, int, int] | None = None,
) -> ShardTensor:
    """Return the part that was pickled; it does not know the other ranks. Called by unpicklers."""
    of_block = None if block is None else Block(*block)
    return _placed(ShardTensor.of(shape, start, flat, written, block=of_block), place)


torch.serialization.add_safe_globals([unpickled_part])  # for torch.load(weights_only=True)


class UnsplitTensor(_Described, torch.Tensor):
    """A plain tensor of which this rank holds all elements, and other ranks perhaps none.

    It has a ``full_tensor()`` so that every rank can call it, whichever rank holds the elements.
    """

    _ranks: _Ranks
    # Results of operations on it are plain tensors.
    __torch_function__ = plain_subclass  # pyright: ignore[reportAssignmentType]

    @staticmethod
    def of(full: torch.Tensor, comm: Comm) -> UnsplitTensor:
        """Return ``full`` as a tensor shared by the ranks of ``comm``."""
        made = full.as_subclass(UnsplitTensor)
        made._ranks = _Ranks(comm)
        return made

    @property
    def comm(self) -> Any:
        """The ranks that share the tensor."""
        return self._ranks.comm

    def full_tensor(self) -> torch.Tensor:
        """Return the full tensor; see :meth:`ShardTensor.full_tensor`."""
        flat = self.as_subclass(torch.Tensor).reshape(-1)
        return gather_full(self.comm, self.shape, 0, flat)

    def to_local(self) -> torch.Tensor:
        """Return all elements as a plain tensor of the same memory: this rank has them."""
        return self.as_subclass(torch.Tensor)

    def to(self, *args: Any, **kwargs: Any) -> UnsplitTensor:
        """Move or cast it; every rank can still call ``full_tensor()``."""
        return self._like(self.as_subclass(torch.Tensor).to(*args, **kwargs))

    def cpu(self, *args: Any, **kwargs: Any) -> UnsplitTensor:
        """Move it to the CPU; see :meth:`to`."""
        return self._like(self.as_subclass(torch.Tensor).cpu(*args, **kwargs))

    def detach(self) -> UnsplitTensor:
        """Detach it; see :meth:`to`."""
        return self._like(self.as_subclass(torch.Tensor).detach())

    def clone(self, *args: Any, **kwargs: Any) -> UnsplitTensor:
        """Copy it; see :meth:`to`."""
        return self._like(self.as_subclass(torch.Tensor).clone(*args, **kwargs))

    def _like(self, full: torch.Tensor) -> UnsplitTensor:
        made = full.as_subclass(UnsplitTensor)
        made._ranks = self._ranks
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self.as_subclass(torch.Tensor).clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle a plain tensor."""
        return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)


def part_or_full(
    shape: Sequence[int],
    start: int,
    flat: torch.Tensor,
    written: tuple[int, int] | None = None,
    comm: Comm | None = None,
    block: Block | None = None,
) -> torch.Tensor:
    """Return the tensor by which DCP reads and writes the memory of ``flat``, (numel,), from element ``start`` on.

    With ``comm``, the ranks that share the tensor, it has a ``full_tensor()`` on each of them.
    """
    shape, flat = torch.Size(shape), rows_of(flat)
    if flat.numel() < shape.numel() or written not in (None, (0, flat.numel())):
        return ShardTensor.of(shape, start, flat, written, comm, block)
    if comm is None:
        return flat.view(shape)
    return UnsplitTensor.of(flat.view(shape), comm)


def state_as_part(part: StatePart, value: torch.Tensor, comm: Comm | None = None) -> torch.Tensor:
    """Convert as :func:`part_or_full` does, for a rank's part of a tensor of optimizer state."""
    return part_or_full(part.shape, part.held[0], rows_of(value).view(-1), part.written, comm, part.block)
