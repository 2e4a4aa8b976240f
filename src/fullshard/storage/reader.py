"""Reader of runs of tensors in a sharded checkpoint, whatever runs its writers had."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from fullshard.errors import CheckpointError, StoreError
from fullshard.storage.index import Index, PieceEntry, TensorEntry
from fullshard.storage.object_path import Place
from fullshard.storage.piece import Piece
from fullshard.storage.safetensors_reader import SafetensorsFile
from fullshard.storage.shard_file import BLOCK_BYTES, crc_of, dtype_of
from fullshard.storage.store import instead_of


class CheckpointReader:
    """Fills pieces from a checkpoint's files and checks every block it touches; on one rank, no communication.

    A block that is entirely inside the target and of the target's dtype is read in place; others pass through a buffer
    of one block.
    """

    def __init__(self, path: Place, index: Index) -> None:
        """Read from the checkpoint directory ``path``."""
        self.path = path
        self.index = index
        self._files: dict[str, SafetensorsFile] = {}

    def entry(self, name: str) -> TensorEntry:
        """Look up a tensor in the index.

        Raises:
            CheckpointError: There is no such tensor.
        """
        if name not in self.index.tensors:
            raise CheckpointError(f"{self.path} has no tensor {name!r} among its {len(self.index.tensors)}.")
        return self.index.tensors[name]

    def read(self, piece: Piece) -> None:
        """Fill ``piece.tensor`` with its elements of the stored tensor, cast if the dtypes differ.

        Raises:
            CheckpointError: There is no such tensor, it has another shape, or a file is damaged; ``piece.tensor`` may
                be partly overwritten.
        """
        entry = self.entry(piece.name)
        if entry.shape != piece.shape:
            raise CheckpointError(f"{self.path}: {piece.name} has shape {entry.shape}; {piece.shape} was requested.")
        for stored in entry.pieces:
            if stored.start < piece.stop and piece.start < stored.stop:
                self._read_overlap(entry, stored, piece)

    def read_all(self, pieces: Iterable[Piece]) -> None:
        """Fill many pieces as :meth:`read` does; from an object store, several blocks at the same time.

        Raises:
            CheckpointError: As for :meth:`read`.
        """
        for piece in sorted(pieces, key=lambda piece: (piece.name, piece.start)):
            self.read(piece)

    def _read_overlap(self, entry: TensorEntry, stored: PieceEntry, piece: Piece) -> None:
        """Read the elements that ``piece`` and ``stored`` have in common, one block of ``stored`` at a time."""
        dtype = dtype_of(entry)
        per_block = BLOCK_BYTES // dtype.itemsize
        low, high = max(stored.start, piece.start), min(stored.stop, piece.stop)
        direct = piece.tensor.dtype == dtype and piece.tensor.device.type == "cpu"
        for number in range((low - stored.start) // per_block, (high - 1 - stored.start) // per_block + 1):
            first = stored.start + number * per_block
            last = min(first + per_block, stored.stop)
            target = piece.tensor[max(first, low) - piece.start : min(last, high) - piece.start]
            if direct and target.numel() == last - first:
                self._read_block(piece.name, stored, number, target)
            else:
                block = torch.empty(last - first, dtype=dtype)
                self._read_block(piece.name, stored, number, block)
                target.copy_(block[max(first, low) - first : min(last, high) - first])

    def _read_block(self, name: str, stored: PieceEntry, number: int, out: torch.Tensor) -> None:
        """Read one complete block and compare its checksum."""
        start = number * (BLOCK_BYTES // out.dtype.itemsize)
        file = self._file(stored.file)
        if name not in file.tensors:
            raise self._damage(f"{file.path} lacks {name!r}, which the index lists in it: they are from two saves.")
        try:
            file.read(name, start, out)
        except StoreError:
            raise
        except CheckpointError as error:
            raise self._damage(str(error)) from error
        found = crc_of(out)
        if number >= len(stored.crcs) or found != stored.crcs[number]:
            expected = f"{stored.crcs[number]:08x}" if number < len(stored.crcs) else "nothing"
            low, high = start * out.dtype.itemsize, (start + out.numel()) * out.dtype.itemsize
            raise self._damage(
                f"{self.path / stored.file} is damaged: block {number} of {name} (bytes {low:,} to {high:,} of it) has "
                f"checksum {found:08x}, expected {expected}. `fullshard verify {self.path}` lists all damage."
            )

    def _file(self, name: str) -> SafetensorsFile:
        if name not in self._files:
            try:
                self._files[name] = SafetensorsFile(self.path / name)
            except StoreError:
                raise
            except CheckpointError as error:
                raise self._damage(str(error)) from error
        return self._files[name]

    def _damage(self, text: str) -> CheckpointError:
        """Return the error, with the checkpoint to use instead."""
        return CheckpointError(f"{text} {instead_of(self.path)}")
