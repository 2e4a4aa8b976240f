"""The safetensors container, written by ourselves so that a run of a tensor's elements at a time is enough.

The container is 8 bytes (little-endian length of the header), a JSON header with each tensor's dtype, shape and byte
range, and the tensors' bytes without gaps. The header needs names, shapes and dtypes only, so it goes first, and each
run of elements is written to its place when it arrives, in any order. The library's own ``save_file`` wants all tensors
at once.
"""

from __future__ import annotations

import json
import os
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType

import torch

from fullshard.errors import CheckpointError
from fullshard.storage.dtypes import CODES

_PIECE_BYTES = 1 << 20
"""What is cast and written at once: all the memory that writing takes; small pieces also let Ctrl-C in between."""


@dataclass(frozen=True)
class TensorSpec:
    """What the header says about one tensor.

    Attributes:
        name: Key in the file.
        shape: Its full shape.
        dtype: Its dtype in the file.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """Elements of the whole tensor."""
        return prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """Bytes of the tensor in the file."""
        return self.numel * self.dtype.itemsize


class _Written:
    """Which elements of one tensor have been written: intervals that neither overlap nor touch."""

    def __init__(self) -> None:
        self.edges: list[int] = []  # start, stop, start, stop, … ascending

    def add(self, start: int, stop: int) -> bool:
        """Note the elements from ``start`` to ``stop``, at least one; False if one of them was there already."""
        place = bisect_right(self.edges, start)
        if place % 2 or place != bisect_left(self.edges, stop):
            return False
        joins_left = place > 0 and self.edges[place - 1] == start
        joins_right = place < len(self.edges) and self.edges[place] == stop
        own = [edge for edge, joins in ((start, joins_left), (stop, joins_right)) if not joins]
        self.edges[place - joins_left : place + joins_right] = own
        return True

    @property
    def count(self) -> int:
        """Elements written."""
        return sum(self.edges[1::2]) - sum(self.edges[::2])


class SafetensorsWriter:
    """A safetensors file that is filled run by run; a context manager, on one rank.

    On leaving without an error every element of every tensor must have been written, and the bytes are on the disk
    (fsync). What is left behind after an error is not a whole file: write into an
    :func:`~fullshard.storage.atomic_directory`.
    """

    def __init__(self, path: Path, specs: Sequence[TensorSpec]) -> None:
        """Create the file, give it its full length and write the header.

        Args:
            path: File to create; its directory exists.
            specs: All tensors, each name once. In the file, dtypes with larger elements come first, so that every
                tensor is aligned to its element size.

        Raises:
            CheckpointError: A name occurs twice or a dtype has no safetensors code.
            OSError: The file system refused.
        """
        ordered = sorted(specs, key=lambda spec: -spec.dtype.itemsize)
        header, starts, end = _header(ordered)
        self.path = path
        self._specs = {spec.name: spec for spec in ordered}
        self._starts = starts
        self._written = {name: _Written() for name in self._specs}
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        try:
            os.truncate(self._descriptor, end)
            _write_at(self._descriptor, 0, memoryview(header))
        except BaseException:
            os.close(self._descriptor)
            raise

    def __enter__(self) -> SafetensorsWriter:
        """Start writing."""
        return self

    def write_run(self, name: str, start: int, flat: torch.Tensor) -> None:
        """Write a run of one tensor's elements to its place, cast to the dtype the header gives it.

        Args:
            name: One of the names in the header.
            start: First element of the run, counted in the flattened tensor.
            flat: The elements, (run,), on any device, none of them written before; not kept. They are cast in pieces of
                1 MiB, so that no copy of the run is made.

        Raises:
            CheckpointError: The name is unknown, or elements lie outside the tensor or were written before.
            OSError: The file system refused.
        """
        spec = self._specs.get(name)
        if spec is None:
            raise CheckpointError(f"{self.path.name}: tensor {name!r} is none of the {len(self._specs)} announced.")
        stop = start + flat.numel()
        if flat.dim() != 1 or start < 0 or stop > spec.numel:
            raise CheckpointError(
                f"{self.path.name}: a run of shape {tuple(flat.shape)} from element {start} on does not fit tensor "
                f"{name!r}, announced with shape {spec.shape}, {spec.numel} elements."
            )
        if flat.numel() and not self._written[name].add(start, stop):
            raise CheckpointError(
                f"{self.path.name}: elements {start} to {stop} of tensor {name!r} came a second time, all or some of "
                "them; each is written once."
            )
        size = spec.dtype.itemsize
        step = _PIECE_BYTES // size
        for at in range(0, flat.numel(), step):
            piece = flat[at : at + step].detach().to(device="cpu", dtype=spec.dtype).contiguous()
            _write_at(self._descriptor, self._starts[name] + (start + at) * size, piece.view(torch.uint8).numpy().data)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the file; without an error, first put it on the disk.

        Raises:
            CheckpointError: Elements were never written.
            OSError: The file system refused.
        """
        try:
            if kind is None:
                self._check_whole()
                os.fsync(self._descriptor)
        finally:
            os.close(self._descriptor)

    def _check_whole(self) -> None:
        """Raise unless every element has been written."""
        missing = [
            f"{name} ({self._written[name].count} of {spec.numel} elements)"
            for name, spec in self._specs.items()
            if self._written[name].count < spec.numel
        ]
        if missing:
            raise CheckpointError(
                f"{self.path.name}: {len(missing)} of {len(self._specs)} tensors were not written whole: "
                f"{', '.join(missing[:5])}{', …' if len(missing) > 5 else ''}."
            )


def _header(specs: Sequence[TensorSpec]) -> tuple[bytes, dict[str, int], int]:
    """Header bytes with the length in front, where in the file each tensor starts, and where the file ends."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offsets: dict[str, int] = {}
    offset = 0
    for spec in specs:
        code = CODES.get(spec.dtype)
        if code is None:
            raise CheckpointError(
                f"Tensor {spec.name!r} is {spec.dtype}, which the safetensors format cannot hold; it holds "
                f"{', '.join(str(dtype).removeprefix('torch.') for dtype in CODES)}. Convert it to one of these "
                "(complex numbers: torch.view_as_real), or leave it out: register_buffer(..., persistent=False)."
            )
        if spec.name in entries:
            raise CheckpointError(f"Tensor {spec.name!r} is announced twice; a tied tensor is written once.")
        offsets[spec.name] = offset
        entries[spec.name] = {
            "dtype": code,
            "shape": list(spec.shape),
            "data_offsets": [offset, offset + spec.size_bytes],
        }
        offset += spec.size_bytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data starts at a multiple of 8
    data_start = 8 + len(text)
    header = len(text).to_bytes(8, "little") + text
    return header, {name: data_start + at for name, at in offsets.items()}, data_start + offset


def _write_at(descriptor: int, position: int, data: memoryview) -> None:
    """Write all of ``data`` at ``position``; a single call may write less than it was given."""
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], position + done)
