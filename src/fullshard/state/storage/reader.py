"""Reader of runs of tensors in a sharded checkpoint, whatever runs its writers had."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from typing import TypeVar

import torch

from fullshard.core.layout import boxes_in_order, common, place_in_order
from fullshard.errors import CheckpointError
from fullshard.state.storage.backend import backend_of
from fullshard.state.storage.index import Index, PieceEntry, TensorEntry
from fullshard.state.storage.object_path import Place
from fullshard.state.storage.safetensors_file import SafetensorsFile
from fullshard.state.storage.shard_file import BLOCK_BYTES, Piece, crc_of, dtype_of
from fullshard.state.storage.store import or_instead_of

T = TypeVar("T")


@dataclass(frozen=True)
class _Wanted:
    """Wanted elements of a stored block: of one box of the tensor."""

    target: torch.Tensor  # where they go, in the box's shape
    skip: int  # elements of the block before the stored box that they are in
    sizes: tuple[int, ...]  # of that box
    part: tuple[slice, ...]  # which part of it they are

    def copy_from(self, block: torch.Tensor) -> None:
        """Fill the target from the block's content."""
        self.target.copy_(block[self.skip : self.skip + prod(self.sizes)].view(self.sizes)[self.part])


@dataclass(frozen=True)
class _Block:
    """One stored block, and which of its elements are wanted."""

    name: str  # of the tensor
    stored: PieceEntry  # the run it is a block of
    number: int  # its number in that run
    numel: int  # elements in it
    dtype: torch.dtype  # their dtype in the file
    wanted: list[_Wanted]


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

    def read(self, *pieces: Piece) -> None:
        """Fill the tensor of each piece with its elements of the stored tensor, cast if the dtypes differ.

        From an object store several blocks are fetched at the same time, because each one waits for the network.

        Raises:
            CheckpointError: There is no such tensor, it has another shape, or a file is damaged; tensors may be partly
                overwritten. Or the checkpoint has only another rank's elements; nothing is overwritten.
        """
        for piece in pieces if self.index.part is not None else ():
            self._require_held(piece)
        blocks = (block for piece in pieces for block in self._blocks(piece))
        for block, content in _ahead(self._fetch, blocks, backend_of(self.path).fetches):
            if content is not None:
                for one in block.wanted:
                    one.copy_from(content)

    def _require_held(self, piece: Piece) -> None:
        """Check that the rank that wrote the checkpoint alone held all elements of a piece."""
        entry, (order, first) = self.entry(piece.name), place_in_order(piece.shape, piece.block)
        low, high, held = first + piece.start, first + piece.stop, entry.pieces[0]
        if low < high and (order != entry.order or not held.start <= low < high <= held.stop):
            raise CheckpointError(
                f"{self.path} does not fit the model: this rank holds elements {low:,} to {high:,} of {piece.name}, "
                f"and the snapshot has {held.start:,} to {held.stop:,}{'' if order == entry.order else ' of a block'}. "
                "Shard the model as before."
            )

    def _blocks(self, piece: Piece) -> Iterator[_Block]:
        """Yield the stored blocks that have elements of a piece."""
        entry = self.entry(piece.name)
        if entry.shape != piece.shape:
            raise CheckpointError(f"{self.path}: {piece.name} has shape {entry.shape}; {piece.shape} was requested.")
        dtype = dtype_of(entry)
        per_block = BLOCK_BYTES // dtype.itemsize
        order, first = place_in_order(piece.shape, piece.block)
        low, high = first + piece.start, first + piece.stop
        # In the same order a run is one box, of a tensor of one dimension. In others the boxes tell what is common.
        same = order == entry.order
        shape, orders = ((entry.numel,), (None, None)) if same else (entry.shape, (order, entry.order))
        own = boxes_in_order(shape, orders[0], low, high)
        views = [piece.tensor[box.start - low :][: box.numel].view(box.sizes) for box in own]
        low, high = (low, high) if same else (0, entry.numel)
        for stored in entry.pieces:
            last = min(stored.stop, high) - stored.start
            for number in range((max(stored.start, low) - stored.start) // per_block, -(-last // per_block)):
                start = stored.start + number * per_block
                stop = min(start + per_block, stored.stop)
                wanted = [
                    _Wanted(view[parts[0]], box.start - start, box.sizes, parts[1])
                    for box in boxes_in_order(shape, orders[1], start, stop)
                    for mine, view in zip(own, views, strict=True)
                    if (parts := common(mine, box)) is not None
                ]
                if wanted:
                    self._file(stored.file)  # opened here, not by several threads at the same time
                    yield _Block(piece.name, stored, number, stop - start, dtype, wanted)

    def _fetch(self, block: _Block) -> tuple[_Block, torch.Tensor | None]:
        """Read one block: directly into its target if all of it is wanted in one place, else return its content."""
        target = block.wanted[0].target
        whole = target.numel() == block.numel and target.dtype == block.dtype and target.device.type == "cpu"
        into = target.view(-1) if whole and target.is_contiguous() else None
        content = torch.empty(block.numel, dtype=block.dtype) if into is None else into
        self._read_block(block.name, block.stored, block.number, content)
        return block, content if into is None else None

    def _read_block(self, name: str, stored: PieceEntry, number: int, out: torch.Tensor) -> None:
        """Read one complete block and compare its checksum."""
        start = number * (BLOCK_BYTES // out.dtype.itemsize)
        file = self._file(stored.file)
        with or_instead_of(self.path):
            if name not in file.tensors:
                raise CheckpointError(
                    f"{file.path} lacks {name!r}, which the index lists in it: they are from two saves."
                )
            file.read(name, start, out)
            found = crc_of(out)
            if number < len(stored.crcs) and found == stored.crcs[number]:
                return
            expected = f"{stored.crcs[number]:08x}" if number < len(stored.crcs) else "nothing"
            low, high = start * out.dtype.itemsize, (start + out.numel()) * out.dtype.itemsize
            raise CheckpointError(
                f"{self.path / stored.file} is damaged: block {number} of {name} (bytes {low:,} to {high:,} of it) has "
                f"checksum {found:08x}, expected {expected}. `fullshard verify {self.path}` lists all damage."
            )

    def _file(self, name: str) -> SafetensorsFile:
        if name not in self._files:
            with or_instead_of(self.path):
                self._files[name] = SafetensorsFile(self.path / name)
        return self._files[name]


def _ahead(fetch: Callable[[_Block], T], blocks: Iterator[_Block], most: int) -> Iterator[T]:
    """Yield ``fetch`` of each block in order, with at most ``most`` of them under way."""
    if most == 1:
        yield from map(fetch, blocks)
        return
    with ThreadPoolExecutor(most, thread_name_prefix="fullshard-fetch") as threads:
        under_way: deque[Future[T]] = deque()
        for block in blocks:
            under_way.append(threads.submit(fetch, block))
            if len(under_way) >= most:
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()
