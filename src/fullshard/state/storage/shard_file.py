"""One rank's runs of tensors (``Piece``), and the writer of its shard file, which returns the rank's part of the index.

In the file they are 1-D tensors of the safetensors format, with a checksum per block. Independent of the engine.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from fullshard.core.layout import Block, place_in_order
from fullshard.errors import CheckpointError
from fullshard.state.storage.index import SHARD_NAME, PieceEntry, TensorEntry
from fullshard.state.storage.object_path import Place
from fullshard.state.storage.rules import shown
from fullshard.state.storage.safetensors_file import SafetensorsWriter, TensorSpec, file_order

BLOCK_BYTES = 4 * 1024 * 1024
"""Bytes per checksum. A reader reads complete blocks, even if it needs only part of one: without a checksum per block
a range of elements could not be verified without reading the full file."""


@dataclass(frozen=True)
class Piece:
    """A run of the flattened elements of one named tensor, as one rank holds it.

    Every shard that the engine makes is such a run, of a tensor or of a block of it, so a checkpoint of any world size
    is a set of intervals, and loading into another world size is the intersection of intervals. Blocks of several
    columns are intervals of another order of the elements, :data:`fullshard.core.layout.Order`.
    """

    name: str  # the tensor's name, unique in the checkpoint, such as ``model/encoder.block.0.weight``
    shape: tuple[int, ...]  # shape of the full tensor; ``()`` for a scalar
    start: int  # first element, counted in the flattened full tensor
    tensor: torch.Tensor  # the elements, (stop - start,), contiguous, on any device. Written from, or read into
    block: Block | None = None  # whose elements are counted instead, if tensor parallelism divides the tensor

    @property
    def stop(self) -> int:
        """The element just past the run."""
        return self.start + self.tensor.numel()


@dataclass
class SavePlan:
    """The training state that one rank saves; together the ranks save each element once.

    Attributes:
        pieces: Runs of tensors, none empty, on any device.
        groups: Options of the optimizer's parameter groups as JSON holds them, with parameter names under ``params``.
        scalars: The optimizer's state other than tensors, by parameter name and key.
    """

    pieces: list[Piece] = field(default_factory=list)
    groups: list[dict[str, Any]] = field(default_factory=list)
    scalars: dict[str, dict[str, Any]] = field(default_factory=dict)


def shard_name(rank: int, world_size: int) -> str:
    """Return the name of a rank's file."""
    return f"shard-{rank:05d}-of-{world_size:05d}.safetensors"


def is_shard_name(name: str) -> bool:
    """Return whether a file's name is one that :func:`shard_name` returns."""
    return SHARD_NAME.fullmatch(name) is not None


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name without its module, such as ``float32``."""
    return str(dtype).removeprefix("torch.")


def dtype_of(entry: TensorEntry) -> torch.dtype:
    """Return the dtype that a tensor is stored in.

    Raises:
        CheckpointError: torch has no such dtype.
    """
    found = getattr(torch, entry.dtype, None)
    if not isinstance(found, torch.dtype):
        raise CheckpointError(
            f"The index has a tensor of dtype {shown(entry.dtype)}, which this version of torch lacks."
        )
    return found


def crc_of(block: torch.Tensor) -> int:
    """Return the CRC-32 of the bytes of a contiguous 1-D CPU tensor."""
    return zlib.crc32(block.view(torch.uint8).numpy().data)


def specs_of(pieces: Sequence[Piece]) -> dict[str, TensorSpec]:
    """Return the tensors of a shard file with these pieces, by name."""
    return {piece.name: TensorSpec(piece.name, (piece.tensor.numel(),), piece.tensor.dtype) for piece in pieces}


def write_shard_file(
    path: Place, pieces: Sequence[Piece], progress: Callable[[int], None], *, mapped: bool = False
) -> dict[str, TensorEntry]:
    """Write one rank's pieces and flush them to disk, with one block of additional memory.

    Args:
        path: File to create.
        pieces: Non-empty runs of tensors, each name once, on any device.
        progress: Called with the number of bytes written since the last call; may raise to give up.
        mapped: Whether the pieces are the file's own memory, by ``mapped_file``, so that nothing is left to write.

    Returns:
        This rank's part of the index.

    Raises:
        CheckpointError: A dtype cannot be stored.
        OSError: The file system refused.
    """
    specs = specs_of(pieces)
    # In the file's order, so that it can be streamed. The names in the index keep the order of the pieces.
    ordered = sorted(pieces, key=lambda piece: file_order(specs[piece.name]))
    entries: dict[str, TensorEntry] = {}
    with nullcontext() if mapped else SafetensorsWriter(path, list(specs.values())) as writer:
        for piece in ordered:
            per_block = BLOCK_BYTES // piece.tensor.dtype.itemsize
            crcs = []
            for start in range(0, piece.tensor.numel(), per_block):
                block = piece.tensor[start : start + per_block].cpu()
                crcs.append(crc_of(block))
                if writer is not None:
                    writer.write_run(piece.name, start, block)
                progress(block.nbytes)
            order, first = place_in_order(piece.shape, piece.block)
            entry = PieceEntry(path.name, first + piece.start, first + piece.stop, tuple(crcs))
            entries[piece.name] = TensorEntry(dtype_name(piece.tensor.dtype), piece.shape, (entry,), order)
    return {piece.name: entries[piece.name] for piece in pieces}
