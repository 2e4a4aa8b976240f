"""Writer of safetensors files that needs only one run of a tensor's elements at a time.

The container is 8 bytes (little-endian length of the header), a JSON header with each tensor's dtype, shape and byte
range, and the tensors' bytes without gaps. The header needs only names, shapes and dtypes, so it is written first, and
each run of elements goes to its place when it arrives, in any order. The library's own ``save_file`` takes all tensors
at once.
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from types import TracebackType

import torch

from fullshard.errors import CheckpointError
from fullshard.state.storage.backend import backend_of
from fullshard.state.storage.object_path import Place
from fullshard.state.storage.safetensors_reader import DTYPES

CODES = {dtype: code for code, dtype in DTYPES.items()}
"""The code of each torch dtype in a file's header."""

_PIECE_BYTES = 1 << 20
"""Bytes cast and written at once, which is all the memory that writing takes; also small enough for Ctrl-C."""


@dataclass(frozen=True)
class TensorSpec:
    """Name, shape and dtype of one stored tensor."""

    name: str  # its name in the file
    shape: tuple[int, ...]  # its full shape
    dtype: torch.dtype  # its dtype in the file

    @property
    def numel(self) -> int:
        """Number of elements of the full tensor."""
        return prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """Bytes of the tensor in the file."""
        return self.numel * self.dtype.itemsize


class _Written:
    """Elements of one tensor that have been written: intervals that neither overlap nor touch."""

    def __init__(self) -> None:
        self.edges: list[int] = []  # start, stop, start, stop, … ascending

    def add(self, start: int, stop: int) -> bool:
        """Add the elements ``start`` to ``stop``, at least one; return False if one of them was written already."""
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
        """Number of elements written."""
        return sum(self.edges[1::2]) - sum(self.edges[::2])


class SafetensorsWriter:
    """A safetensors file that is filled run by run; a context manager, on one rank.

    Leaving it without an error requires that every element of every tensor was written; the bytes are then on disk
    (fsync). After an error an incomplete file is left: write into an
    ``atomic_directory``. In an object store runs must arrive in the order of :func:`file_order`.
    """

    def __init__(self, path: Place, specs: Sequence[TensorSpec]) -> None:
        """Create the file at its full length and write the header.

        Args:
            path: File to create; its directory exists.
            specs: All tensors, each name once. Dtypes with larger elements come first in the file, so that every tensor
                is aligned to its element size.

        Raises:
            CheckpointError: A name occurs twice or a dtype has no safetensors code.
            OSError: The file system refused.
        """
        ordered = sorted(specs, key=file_order)
        header, starts, end = _header(ordered)
        self.path = path
        self._specs = {spec.name: spec for spec in ordered}
        self._starts = starts
        self._written = {name: _Written() for name in self._specs}
        self._file = backend_of(path).create(path, end)
        try:
            self._file.write_at(0, memoryview(header))
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> SafetensorsWriter:
        """Start writing."""
        return self

    def write_run(self, name: str, start: int, flat: torch.Tensor) -> None:
        """Write a run of one tensor's elements to its place, cast to its dtype in the file.

        Args:
            name: One of the names in the header.
            start: First element of the run, counted in the flattened tensor.
            flat: The elements, (run,), on any device, none of them written before; not kept. They are cast 1 MiB at a
                time, so no copy of the run is made.

        Raises:
            CheckpointError: The name is unknown, or elements are outside the tensor or were written before.
            OSError: The file system refused.
        """
        spec = self._specs.get(name)
        if spec is None:
            raise CheckpointError(
                f"{self.path.name}: tensor {name!r} was not announced; {len(self._specs)} others were."
            )
        stop = start + flat.numel()
        if flat.dim() != 1 or start < 0 or stop > spec.numel:
            raise CheckpointError(
                f"{self.path.name}: a run of shape {tuple(flat.shape)} from element {start} on does not fit tensor "
                f"{name!r} of shape {spec.shape} with {spec.numel} elements."
            )
        if flat.numel() and not self._written[name].add(start, stop):
            raise CheckpointError(
                f"{self.path.name}: some of the elements {start} to {stop} of tensor {name!r} were written before; "
                "each must be written once."
            )
        size = spec.dtype.itemsize
        step = _PIECE_BYTES // size
        for at in range(0, flat.numel(), step):
            piece = flat[at : at + step].detach().to(device="cpu", dtype=spec.dtype).contiguous()
            self._file.write_at(self._starts[name] + (start + at) * size, piece.view(torch.uint8).numpy().data)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the file; without an error, first flush it to disk.

        Raises:
            CheckpointError: Elements were never written.
            OSError: The file system refused.
        """
        try:
            if kind is None:
                self._check_complete()
                self._file.finish()
        finally:
            self._file.close()

    def _check_complete(self) -> None:
        """Raise unless every element has been written."""
        missing = [
            f"{name} ({self._written[name].count} of {spec.numel} elements)"
            for name, spec in self._specs.items()
            if self._written[name].count < spec.numel
        ]
        if missing:
            raise CheckpointError(
                f"{self.path.name}: {len(missing)} of {len(self._specs)} tensors were not written completely: "
                f"{', '.join(missing[:5])}{', …' if len(missing) > 5 else ''}."
            )


def file_order(spec: TensorSpec) -> int:
    """Return the key that sorts tensors as they are in a file: larger elements first, so that each is aligned."""
    return -spec.dtype.itemsize


def _header(specs: Sequence[TensorSpec]) -> tuple[bytes, dict[str, int], int]:
    """Return the header with its length in front, where each tensor starts in the file, and where the file ends."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offsets: dict[str, int] = {}
    offset = 0
    for spec in specs:
        code = CODES.get(spec.dtype)
        if code is None:
            raise CheckpointError(
                f"Tensor {spec.name!r} is {spec.dtype}, which the safetensors format cannot store; it stores "
                f"{', '.join(str(dtype).removeprefix('torch.') for dtype in CODES)}. Convert it to one of these "
                "(complex numbers: torch.view_as_real), or leave it out: register_buffer(..., persistent=False)."
            )
        if spec.name in entries:
            raise CheckpointError(f"Tensor {spec.name!r} occurs twice; a tied tensor must be written once.")
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
