"""One rank's file of a sharded checkpoint: its runs as 1-D tensors in a safetensors file, with a checksum per block."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import torch

from fullshard.errors import CheckpointError
from fullshard.state.storage.index import SHARD_NAME, PieceEntry, TensorEntry
from fullshard.state.storage.object_path import Place
from fullshard.state.storage.piece import Piece
from fullshard.state.storage.rules import shown
from fullshard.state.storage.safetensors_writer import SafetensorsWriter, TensorSpec, file_order

BLOCK_BYTES = 4 * 1024 * 1024
"""Bytes per checksum. A reader reads complete blocks, even if it needs only part of one: without a checksum per block
a range of elements could not be verified without reading the full file."""


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


def write_shard_file(path: Place, pieces: Sequence[Piece], progress: Callable[[int], None]) -> dict[str, TensorEntry]:
    """Write one rank's pieces and flush them to disk, with one block of additional memory.

    Args:
        path: File to create.
        pieces: Non-empty runs of tensors, each name once, on any device.
        progress: Called with the number of bytes written since the last call; may raise to give up.

    Returns:
        This rank's part of the index.

    Raises:
        CheckpointError: A dtype cannot be stored.
        OSError: The file system refused.
    """
    specs = {piece.name: TensorSpec(piece.name, (piece.tensor.numel(),), piece.tensor.dtype) for piece in pieces}
    # In the file's order, so that it can be streamed. The names in the index keep the order of the pieces.
    ordered = sorted(pieces, key=lambda piece: file_order(specs[piece.name]))
    entries: dict[str, TensorEntry] = {}
    with SafetensorsWriter(path, list(specs.values())) as writer:
        for piece in ordered:
            per_block = BLOCK_BYTES // piece.tensor.dtype.itemsize
            crcs = []
            for start in range(0, piece.tensor.numel(), per_block):
                block = piece.tensor[start : start + per_block].cpu()
                crcs.append(crc_of(block))
                writer.write_run(piece.name, start, block)
                progress(block.nbytes)
            entry = PieceEntry(path.name, piece.start, piece.stop, tuple(crcs))
            entries[piece.name] = TensorEntry(dtype_name(piece.tensor.dtype), piece.shape, (entry,))
    return {piece.name: entries[piece.name] for piece in pieces}
