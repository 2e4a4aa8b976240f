"""A rank's part of a tensor, described so that torch's distributed checkpoints (DCP) can write and read it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from fullshard.errors import ShardingError
from fullshard.layout import Box, StatePart, boxes

_ABOUT = frozenset(
    {"device", "dtype", "shape", "layout", "ndim", "requires_grad", "is_meta", "size", "dim", "numel", "stride"}
)
"""What may be asked of the whole; everything else would read memory that is not there."""


class ShardTensor(torch.Tensor):
    """A tensor of the whole's shape, without its memory, that tells DCP what this rank holds of it, and where.

    A shard is a run of rows or elements, uneven over ranks, which torch's DTensor cannot say. DCP asks any tensor that
    has three methods which boxes of the whole it holds; it writes and reads the memory of ``flat``.

    Attributes:
        flat: This rank's elements, 1-D, possibly none.
        start: The first of them, counted in the flattened whole.
        written: First and past-the-last element of the whole that this rank writes; others write what else it holds.
    """

    flat: torch.Tensor
    start: int
    written: tuple[int, int]

    @staticmethod
    def of(shape: Sequence[int], start: int, flat: torch.Tensor, written: tuple[int, int] | None = None) -> ShardTensor:
        """The elements ``flat``, (numel,), from element ``start`` on, of a whole of ``shape``; all are written or some.

        A run that is written but does not begin where ``flat`` does must end where it ends: its boxes are told apart
        by where they begin.
        """
        shard = flat.new_empty(()).expand(tuple(shape)).as_subclass(ShardTensor)
        shard.flat, shard.start = flat, start
        shard.written = (start, start + flat.numel()) if written is None else written
        return shard

    def is_part(self, start: int, stop: int) -> bool:
        """Whether it is the elements from ``start`` to ``stop`` of the flattened whole."""
        return (self.start, self.flat.numel()) == (start, stop - start)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse what reads or writes elements: the whole's are not here.

        Raises:
            ShardingError: It is anything but a question about shape, dtype or device.
        """
        name = getattr(func, "__name__", str(func))
        name = getattr(func.__self__, "__name__", name) if name == "__get__" else name
        if name in _ABOUT:
            return super().__torch_function__(func, types, args, kwargs or {})
        raise ShardingError(
            f"{name} of a ShardTensor: it is one rank's part of a tensor (in .flat), for torch.distributed.checkpoint. "
            "For whole tensors choose StateDictType.FULL_STATE_DICT (set_state_dict_type) before state_dict(), or use "
            "fullshard.full_state_dict(model)."
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
            "torch.distributed.checkpoint.save. For whole tensors choose StateDictType.FULL_STATE_DICT "
            "(set_state_dict_type), also before get_model_state_dict(full_state_dict=True), which cannot gather them; "
            "or call fullshard.save(model, directory)."
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


def part_or_whole(
    shape: Sequence[int], start: int, flat: torch.Tensor, written: tuple[int, int] | None = None
) -> torch.Tensor:
    """What DCP is given for the elements ``flat``, (numel,), from ``start`` on: it reads and writes their memory."""
    shape = torch.Size(shape)
    whole = flat.numel() == shape.numel() and written in (None, (0, flat.numel()))
    return flat.view(shape) if whole else ShardTensor.of(shape, start, flat, written)


def state_as_part(part: StatePart, value: torch.Tensor) -> torch.Tensor:
    """The same for a rank's part of a tensor of optimizer state."""
    return part_or_whole(part.shape, part.held[0], value.detach().view(-1), part.written)
