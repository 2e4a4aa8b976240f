"""One rank's state of one step in two files: the bytes of its tensors, and a manifest with their checksums.

The bytes are mapped into the rank's memory and belong to the machine: a SIGKILL of the rank leaves them. The manifest
is removed before the first byte changes and appears by a rename after the last one, so a rank that is killed in between
leaves no snapshot there; the other buffer of the rank still has the one before.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from fullshard.state.storage import SMALL, parse_bounded, read_bounded, require_sealed, seal

MANIFEST_NAME, BYTES_NAME = "manifest.json", "state.bin"

_FORMAT = 4
"""Of the manifest and of what ``plain`` holds; after an update under a running launcher, another one is no snapshot."""

_ALIGNED = 64
"""Each tensor starts at a multiple of this many bytes, which suits every dtype."""

_ROW = 1024
"""Words of 8 bytes in a row of the checksum; a file has a whole number of rows."""

_MADV_POPULATE_READ = 22  # linux/mman.h

_CHECKSUM_ROWS = 8192
"""Rows per operation of the checksum: 64 MiB."""

Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class SnapshotHeader:
    """Everything of a snapshot but its tensors; JSON holds it."""

    step: int  # optimizer steps taken
    rank: int  # the rank whose state it is
    world_size: int  # number of ranks
    attempt: int  # the attempt that wrote it
    serial: int  # its number in that attempt, the same on every rank
    every: int  # steps from it to the next one
    # what a snapshot cost then, how long its writing took, and how long a step, in seconds; None: not measured yet
    pace: Sequence[float] | None = None
    values: Mapping[str, Any] = field(default_factory=dict)  # the program's own values
    plain: Mapping[str, Any] = field(default_factory=dict)  # state other than tensors: options, numbers

    @property
    def key(self) -> tuple[int, int, int]:
        """A key that is equal on all ranks for snapshots of the same moment; later moments have greater keys."""
        return self.attempt, self.serial, self.step


@dataclass(frozen=True)
class Snapshot:
    """One rank's complete snapshot, verified."""

    directory: Path  # directory of its files
    described: SnapshotHeader
    tensors: Mapping[str, torch.Tensor]  # by name, flat, views of the file: copy what must outlive the next snapshot


class SnapshotBuffer:
    """Room for one snapshot of one rank; written by that rank, read by it or its replacement."""

    def __init__(self, directory: Path) -> None:
        """Use the files in ``directory``, which is made at the first write."""
        self.directory = directory
        self._layout: list[tuple[str, torch.dtype, int]] = []
        self._views: dict[str, torch.Tensor] = {}
        self._buffer: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of its file that this process maps as a tensor."""
        return 0 if self._buffer is None else self._buffer.nbytes

    def write(
        self, tensors: Mapping[str, torch.Tensor], copy: Callable[[Pairs], Callable[[], None]]
    ) -> Callable[[SnapshotHeader], None]:
        """Replace the content by ``tensors``, flat and on any device; ``copy`` starts copying pairs (target, source).

        Returns:
            A function for another thread, which waits for the copies and completes the snapshot. ``tensors`` may
            change at once: operations issued later on their device come after the copies.

        Raises:
            OSError: The file system refused, such as for want of memory.
        """
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        (self.directory / MANIFEST_NAME).unlink(missing_ok=True)
        views = self._room([(name, tensor.dtype, tensor.numel()) for name, tensor in tensors.items()])
        ready = copy([(views[name], tensor) for name, tensor in tensors.items() if tensor.numel()])
        layout, buffer = self._layout, self._buffer
        assert buffer is not None, "made by _room"

        def seal_it(described: SnapshotHeader) -> None:
            ready()
            stored = [[name, str(dtype).removeprefix("torch."), numel] for name, dtype, numel in layout]
            whole = {
                **asdict(described),
                "format": _FORMAT,
                "tensors": stored,
                "nbytes": buffer.numel(),
                "sums": checksum(buffer),
            }
            self._publish(seal(json.dumps(whole, separators=(",", ":"))).encode())

        return seal_it

    def store(self, manifest: bytes, nbytes: int, fill: Callable[[memoryview], Any]) -> None:
        """Replace the content by a snapshot of another machine, whose bytes ``fill`` writes.

        Raises:
            OSError: The file system refused, or ``fill`` did.
        """
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        (self.directory / MANIFEST_NAME).unlink(missing_ok=True)
        buffer = _mapped(self.directory / BYTES_NAME, nbytes, make=True)
        fill(buffer.numpy().data)
        self._publish(manifest)

    def _publish(self, manifest: bytes) -> None:
        temporary = self.directory / f"{MANIFEST_NAME}.tmp"
        temporary.write_bytes(manifest)
        # Not flushed to disk: snapshots survive the death of a process, not of a machine.
        os.replace(temporary, self.directory / MANIFEST_NAME)

    def read(self) -> Snapshot | None:
        """Return the stored snapshot after comparing its checksums; None if there is none or it is damaged."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            whole = self._manifest()
            layout = [(name, getattr(torch, dtype), numel) for name, dtype, numel in whole["tensors"]]
            buffer = _mapped(self.directory / BYTES_NAME, whole["nbytes"], make=False)
            if checksum(buffer) != whole["sums"]:
                return None
            return Snapshot(self.directory, _described(whole), _views(layout, buffer))
        return None

    def described(self) -> SnapshotHeader | None:
        """Return the description of the stored snapshot without reading its bytes; None if there is none."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            return _described(self._manifest())
        return None

    def _manifest(self) -> dict[str, Any]:
        content = read_bounded(self.directory / MANIFEST_NAME, SMALL.nbytes)
        require_sealed(content, needed=True)
        whole = parse_bounded(content, SMALL)
        if whole["format"] != _FORMAT:
            raise ValueError("a snapshot of another version")
        return whole

    def _room(self, layout: list[tuple[str, torch.dtype, int]]) -> dict[str, torch.Tensor]:
        """Return host memory for tensors of a layout; the last one's if equal, because its pages exist already."""
        if layout != self._layout:
            self._views, self._buffer = {}, None  # unmapped before the file's length changes
            self._buffer = _mapped(self.directory / BYTES_NAME, _ends(layout)[-1], make=True)
            self._views, self._layout = _views(layout, self._buffer), layout
        return self._views


def _described(whole: Mapping[str, Any]) -> SnapshotHeader:
    return SnapshotHeader(**{name: whole[name] for name in SnapshotHeader.__dataclass_fields__})


def nbytes_of(tensors: Mapping[str, torch.Tensor]) -> int:
    """Return the bytes of the file that holds these tensors."""
    return _ends([(name, tensor.dtype, tensor.numel()) for name, tensor in tensors.items()])[-1]


def checksum(buffer: torch.Tensor) -> list[int]:
    """Return two sums over the bytes of a file: of its words, and of its rows weighted by their position.

    A flipped bit changes the first sum, exchanged rows the second. CRC-32 of the same bytes takes longer, on the
    cores that CPU ranks compute on.
    """
    words = buffer.view(torch.int64).view(-1, _ROW)
    total = placed = torch.zeros((), dtype=torch.int64)
    for start in range(0, len(words), _CHECKSUM_ROWS):
        rows = words[start : start + _CHECKSUM_ROWS].sum(1)
        total = total + rows.sum()
        placed = placed + (rows * torch.arange(start + 1, start + 1 + len(rows))).sum()
    return [int(total), int(placed)]


def checksums(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Return the :func:`checksum` of flat tensors of any dtype and device; a part at a time is in host memory."""
    tensors, row = list(tensors), 8 * _ROW
    longest = max((one.numel() * one.itemsize for one in tensors), default=0)
    buffer = torch.empty(min(_CHECKSUM_ROWS, -(-longest // row)) * row, dtype=torch.uint8)
    total = placed = 0
    for place, one in enumerate((one for one in tensors if one.numel()), start=1):
        for part in one.detach().view(torch.uint8).split(max(1, buffer.numel())):
            padded = buffer[: -(-part.numel() // row) * row]
            padded[: part.numel()].copy_(part)
            padded[part.numel() :] = 0
            sums = checksum(padded)
            total, placed = total + sums[0], 31 * placed + place * sums[1]  # detects parts that are exchanged
    return [total % (1 << 62), placed % (1 << 62)]


def _ends(layout: Sequence[tuple[str, torch.dtype, int]]) -> list[int]:
    """Return where each tensor starts, and the length of the file."""
    starts = [0]
    for _, dtype, numel in layout:
        starts.append(starts[-1] + -(-numel * dtype.itemsize // _ALIGNED) * _ALIGNED)
    row = 8 * _ROW
    starts[-1] = max(1, -(-starts[-1] // row)) * row
    return starts


def _views(layout: Sequence[tuple[str, torch.dtype, int]], buffer: torch.Tensor) -> dict[str, torch.Tensor]:
    starts = _ends(layout)
    return {
        name: buffer[start : start + numel * dtype.itemsize].view(dtype)
        for (name, dtype, numel), start in zip(layout, starts, strict=False)
    }


def _mapped(path: Path, nbytes: int, *, make: bool) -> torch.Tensor:
    """Return the bytes of a file as a tensor, uint8; with ``make``, of exactly this length and backed by memory.

    Raises:
        OSError: The file system refused.
        ValueError: The file has another length.
    """
    descriptor = os.open(path, os.O_RDWR | (os.O_CREAT if make else 0), 0o600)
    try:
        if make:
            os.ftruncate(descriptor, nbytes)
            # Allocate all pages here: a page that is missing at the first write would be a SIGBUS instead of an error.
            os.posix_fallocate(descriptor, 0, nbytes)
        elif os.fstat(descriptor).st_size != nbytes:
            raise ValueError(f"{path} has {os.fstat(descriptor).st_size:,} bytes instead of {nbytes:,}")
        memory = mmap.mmap(descriptor, nbytes)
        if make:
            # A fault for every page of a new mapping took 98 ms of a copy of 363 MB that otherwise took 20; this, 32.
            with contextlib.suppress(OSError, ValueError):  # older than Linux 5.14, or not Linux
                memory.madvise(_MADV_POPULATE_READ)
        return torch.frombuffer(memory, dtype=torch.uint8)
    finally:
        os.close(descriptor)
