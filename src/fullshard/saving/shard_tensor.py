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
"""What may be asked of the whole; everything else would read memory that is not there."""


_MOVES = frozenset({"to", "cpu"})
"""What torch's getters of state dicts do with each tensor to offload it."""


class ShardTensor(torch.Tensor):
    """A tensor of the whole's shape, without its memory, that tells DCP what this rank holds of it, and where.

    A shard is a run of rows or elements, uneven over ranks, which torch's DTensor cannot say. DCP asks any tensor that
    has three methods which boxes of the whole it holds; it writes and reads the memory of ``flat``.

    Attributes:
        flat: This rank's elements, 1-D, possibly none.
        start: The first of them, counted in the flattened whole.
        written: First and past-the-last element of the whole that this rank writes; others write what else it holds.
        comm: The ranks that hold the whole between them, where that is known.
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
        """The elements ``flat``, (numel,), from element ``start`` on, of a whole of ``shape``; all are written or some.

        A run that is written but does not begin where ``flat`` does must end where it ends: its boxes are told apart
        by where they begin.
        """
        shard = flat.new_empty(()).expand(tuple(shape)).as_subclass(ShardTensor)
        shard.flat, shard.start, shard.comm = flat, start, comm
        shard.written = (start, start + flat.numel()) if written is None else written
        return shard

    def elements(self, name: str, held: tuple[int, int]) -> torch.Tensor:
        """``flat``, where it is what a rank holds: elements ``held[0]`` to ``held[1]`` of ``name``, or it holds none.

        Raises:
            ShardingError: It is another rank's part, or one of another number of ranks.
        """
        stop = self.start + self.flat.numel()
        if self.flat.numel() != held[1] - held[0] or (self.flat.numel() and self.start != held[0]):
            raise ShardingError(
                f"{name} has elements {self.start} to {stop} here where this rank holds {held[0]} to {held[1]}: a "
                "sharded state dict of other ranks comes through torch.distributed.checkpoint.load."
            )
        return self.flat

    def full_tensor(self) -> torch.Tensor:
        """The whole, on the device of collectives, without gradient; every rank that shares it calls it.

        Raises:
            ShardingError: It is not known who shares it.
        """
        if self.comm is None:
            raise ShardingError(f"{self!r:.60}… does not know the other ranks: take it from a sharded model's state.")
        return gather_whole(self.comm, self.shape, self.start, self.flat)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse what reads or writes elements: the whole's are not here. ``to`` and ``cpu`` move or cast the part.

        Raises:
            ShardingError: It is anything but a question about shape, dtype or device.
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
            "The whole is its full_tensor(), which every rank calls; whole models are get_model_state_dict with "
            "full_state_dict=True, StateDictType.FULL_STATE_DICT (set_state_dict_type) or fullshard.full_state_dict."
        )

    def __repr__(self, *, tensor_contents: object = None) -> str:
        """What of the whole it is; the elements are in ``flat``."""
        stop = self.start + self.flat.numel()
        return f"ShardTensor(elements {self.start} to {stop} of {tuple(self.shape)}, flat={self.flat})"

    def __reduce_ex__(self, protocol: object) -> Any:
        """Refuse to be pickled: ``torch.save`` of what looks like the whole model would keep one rank's part of it.

        Raises:
            ShardingError: Always.
        """
        raise ShardingError(
            f"{self!r:.60}… is one rank's part, and pickling (torch.save) would keep that only. Write parts with "
            "torch.distributed.checkpoint.save. For whole tensors use get_model_state_dict with full_state_dict=True, "
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


class WholeTensor(torch.Tensor):
    """A plain tensor of which this rank holds all elements, and other ranks perhaps none.

    It has a ``full_tensor()``, so that every rank can call that, whoever holds what.
    """

    comm: Comm
    # What is computed of it is a plain tensor.
    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]

    @staticmethod
    def of(whole: torch.Tensor, comm: Comm) -> WholeTensor:
        """``whole``, whose elements the ranks of ``comm`` share."""
        made = whole.as_subclass(WholeTensor)
        made.comm = comm
        return made

    def full_tensor(self) -> torch.Tensor:
        """As :meth:`ShardTensor.full_tensor`."""
        flat = self.as_subclass(torch.Tensor).reshape(-1)
        return gather_whole(self.comm, self.shape, 0, flat)

    def to(self, *args: Any, **kwargs: Any) -> WholeTensor:
        """As a part's, moved or cast, so that every rank can still call ``full_tensor()``."""
        return WholeTensor.of(self.as_subclass(torch.Tensor).to(*args, **kwargs), self.comm)

    def cpu(self, *args: Any, **kwargs: Any) -> WholeTensor:
        """As :meth:`to`."""
        return WholeTensor.of(self.as_subclass(torch.Tensor).cpu(*args, **kwargs), self.comm)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self.as_subclass(torch.Tensor).clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle a plain tensor."""
        return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)


def gather_whole(comm: Comm, shape: Sequence[int], start: int, flat: torch.Tensor) -> torch.Tensor:
    """A whole tensor from the runs that ranks hold of it, on the device of collectives; every rank calls it.

    Who holds what is asked first. Then each holder sends its run to its place: a parameter lies with few ranks.

    Args:
        comm: The ranks.
        shape: Of the whole.
        start: First element that this rank holds, counted in the flattened whole.
        flat: Its elements, (numel,), possibly none.
    """
    what = f"full_tensor() of shape {tuple(shape)}"
    comm.announce(what)
    runs = torch.empty(2 * comm.size, dtype=torch.int64, device=comm.device)
    comm.all_gather(runs, torch.tensor([start, start + flat.numel()], device=comm.device)).wait()
    whole = torch.empty(prod(shape), dtype=flat.dtype, device=comm.device)
    done = 0
    for first, stop, rank in sorted((*run, rank) for rank, run in enumerate(runs.view(-1, 2).tolist())):
        first = max(first, done)  # several ranks may hold the same
        if first >= stop:
            continue
        piece = whole[first:stop]
        if rank == comm.rank:
            piece.copy_(flat.detach()[first - start : stop - start])
        comm.announce(what)
        work = comm.broadcast(piece.view(torch.uint8), rank)
        work.wait()
        settle(work)
        done = stop
    return whole.view(tuple(shape))


def part_or_whole(
    shape: Sequence[int],
    start: int,
    flat: torch.Tensor,
    written: tuple[int, int] | None = None,
    comm: Comm | None = None,
) -> torch.Tensor:
    """What DCP is given for the elements ``flat``, (numel,), from ``start`` on: it reads and writes their memory.

    With ``comm``, the ranks that hold the whole between them, it has a ``full_tensor()`` on each of them.
    """
    shape = torch.Size(shape)
    if flat.numel() < shape.numel() or written not in (None, (0, flat.numel())):
        return ShardTensor.of(shape, start, flat, written, comm)
    if comm is None:
        return flat.view(shape)
    return WholeTensor.of(flat.view(shape), comm)


def state_as_part(part: StatePart, value: torch.Tensor, comm: Comm | None = None) -> torch.Tensor:
    """The same for a rank's part of a tensor of optimizer state."""
    return part_or_whole(part.shape, part.held[0], value.detach().view(-1), part.written, comm)
