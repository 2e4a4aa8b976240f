"""One untrusted safetensors file, read by element ranges, and a writer that needs only one run of elements at a time.

The container is 8 bytes (little-endian length of the header), a JSON header with each tensor's dtype, shape and byte
range, and the tensors' bytes without gaps. The header is checked before anything else is read, and written first: it
needs only names, shapes and dtypes, and each run of elements goes to its place when it arrives, in any order.

The library's own reader maps the file, and every page of the mapping that a slice touches counts as the process's
memory until it is unmapped: twice what is needed. Here ``preadv`` reads the bytes into place. The library's own
``save_file`` takes all tensors at once.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any

import torch
from annotated_types import Len
from typing_extensions import TypedDict

from fullshard.errors import CheckpointError
from fullshard.state.storage.backend import Ranges, backend_of
from fullshard.state.storage.object_path import Place
from fullshard.state.storage.rules import Count, check, rule, shown

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""The torch dtype of each code in a file's header."""

HEADER_LIMIT_BYTES = 100_000_000
"""Longest header that is accepted; the library's own limit."""

STAGING_BYTES = 16 << 20
"""Largest host buffer for elements that are converted or copied to another device."""

_REMEDY = "The file is damaged or was not copied completely: fetch or save it again."
# Linux reads at most 0x7ffff000 bytes a call; smaller pieces also let Ctrl-C through in between.
_READ_BYTES = 64 << 20


class _Entry(TypedDict, closed=True):
    """One tensor in a header."""

    dtype: Annotated[str, rule(f"known are {', '.join(DTYPES)}", DTYPES.__contains__)]
    shape: list[Count]
    data_offsets: Annotated[list[Count], Len(2, 2)]


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a file, as its header describes it."""

    shape: tuple[int, ...]  # its full shape
    dtype: torch.dtype  # its dtype in the file
    offset: int  # its first byte, counted from the start of the file


class SafetensorsFile:
    """A file with a checked header, read by runs of elements; each rank opens its own.

    The file is opened for each read, so nothing has to be closed. A file that was replaced in between is detected.

    Attributes:
        path: The file.
        tensors: Its tensors, by name.
    """

    def __init__(self, path: Place) -> None:
        """Read and check the header.

        Raises:
            CheckpointError: The file cannot be read, or its header contradicts itself or the file's size.
        """
        self.path = path
        self._staging: torch.Tensor | None = None
        self._identity: tuple[Any, ...] | None = None
        with self._opened() as file:
            self._identity = file.identity
            self.tensors = _parse(path, *_read_header(path, file), file.size)

    def read(self, name: str, start: int, out: torch.Tensor) -> None:
        """Fill ``out`` with a run of the elements of a tensor, straight from the file if nothing is converted.

        Args:
            name: Name of the tensor.
            start: First element, counted in the flattened tensor.
            out: (numel,), contiguous, on any device; of the stored dtype, or both are floating.

        Raises:
            CheckpointError: The file changed since its header was read, ends early, or cannot be read.
        """
        stored = self.tensors[name]
        position = stored.offset + start * stored.dtype.itemsize
        with self._opened() as file:
            if file.identity != self._identity:
                raise CheckpointError(
                    f"{self.path} changed while it was being read. Load it again when it is complete."
                )
            if out.device.type == "cpu" and out.dtype == stored.dtype:
                self._fill(file, position, out.detach().view(torch.uint8))
                torch.autograd.graph.increment_version(
                    out
                )  # preadv writes without torch's knowledge; autograd detects changes by version
                return
            itemsize = stored.dtype.itemsize
            step = STAGING_BYTES // itemsize
            for low in range(0, out.numel(), step):
                part = out[low : low + step]
                piece = self._stage(part.numel() * itemsize)
                self._fill(file, position + low * itemsize, piece)
                with torch.no_grad():
                    part.copy_(piece.view(stored.dtype))

    def _stage(self, nbytes: int) -> torch.Tensor:
        """Return the first ``nbytes`` of the one reused buffer."""
        if self._staging is None:
            self._staging = torch.empty(STAGING_BYTES, dtype=torch.uint8)
        return self._staging[:nbytes]

    def _fill(self, file: Ranges, position: int, out: torch.Tensor) -> None:
        """Read bytes from ``position`` on into ``out``, uint8 on the CPU; a single system call may read less."""
        view = out.numpy().data
        done = 0
        while done < len(view):
            count = file.read_into(view[done : done + _READ_BYTES], position + done)
            if count == 0:
                raise CheckpointError(
                    f"{self.path} ends at byte {position + done:,}, inside a tensor that ends at byte "
                    f"{position + len(view):,}. {_REMEDY}"
                )
            done += count

    @contextmanager
    def _opened(self) -> Iterator[Ranges]:
        """Open the file; an error of the file system becomes a CheckpointError."""
        try:
            with backend_of(self.path).opened(self.path, self._identity) as file:
                yield file
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read: {error.strerror or error}.") from error


def _read_up_to(file: Ranges, nbytes: int, position: int) -> bytes:
    content = bytearray(nbytes)
    return bytes(content[: file.read_into(memoryview(content), position)])


def _read_header(path: Place, file: Ranges) -> tuple[bytes, int]:
    """Return the header's text, and where the data starts."""
    size = file.size
    if size < 8:
        raise CheckpointError(
            f"{path} has {size} bytes; a safetensors file begins with 8 bytes for its header's length."
        )
    length = int.from_bytes(_read_up_to(file, 8, 0), "little")
    if length > HEADER_LIMIT_BYTES:
        raise CheckpointError(
            f"{path} announces a header of {length:,} bytes; the limit is {HEADER_LIMIT_BYTES:,}. "
            "Is it a safetensors file? If it is, fetch or save it again."
        )
    if 8 + length > size:
        raise CheckpointError(f"{path} announces a header of {length:,} bytes, but has only {size:,} bytes. {_REMEDY}")
    text = b""
    while len(text) < length:
        more = _read_up_to(file, length - len(text), 8 + len(text))
        if not more:
            raise CheckpointError(f"{path} ends inside its header of {length:,} bytes. {_REMEDY}")
        text += more
    return text, 8 + length


def _parse(path: Place, text: bytes, data_start: int, size: int) -> dict[str, StoredTensor]:
    """Parse a header; its tensors together must cover the data without overlap."""
    entries = _load_json(path, text)
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict):
        raise CheckpointError(f"{path}: __metadata__ in the header is not a JSON object. {_REMEDY}")
    tensors = {}
    runs = []
    for name, entry in entries.items():
        try:
            checked = check(_Entry, entry, f"tensor {shown(name)}")
        except ValueError as error:
            raise CheckpointError(f"{path}: {error}. {_REMEDY}") from error
        dtype, shape, (begin, end) = DTYPES[checked["dtype"]], tuple(checked["shape"]), checked["data_offsets"]
        expected = prod(shape) * dtype.itemsize
        if end - begin != expected:
            raise CheckpointError(
                f"{path}: tensor {name!r} of shape {shape} in {dtype} takes {expected:,} bytes, but its data_offsets "
                f"[{begin}, {end}] give it {end - begin:,}. {_REMEDY}"
            )
        tensors[name] = StoredTensor(shape, dtype, data_start + begin)
        runs.append((begin, end, name))
    _check_cover(path, sorted(runs), size - data_start)
    return tensors


def _load_json(path: Place, text: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            counts = Counter(name for name, _ in pairs)
            twice = next(name for name in counts if counts[name] > 1)
            raise CheckpointError(f"{path}: the header names {twice!r} twice. {_REMEDY}")
        return found

    try:
        entries = json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: the header of {len(text):,} bytes is not JSON ({error}). {_REMEDY}") from error
    if not isinstance(entries, dict):
        raise CheckpointError(f"{path}: the header is not a JSON object. {_REMEDY}")
    return entries


def _check_cover(path: Place, runs: list[tuple[int, int, str]], data_bytes: int) -> None:
    """Raise unless byte ranges follow each other without gap or overlap, to the end of the file."""
    reached, before = 0, "the header"
    for begin, end, name in runs:
        if end > data_bytes:
            raise CheckpointError(
                f"{path}: tensor {name!r} ends at byte {end:,} of the data, which has {data_bytes:,}. {_REMEDY}"
            )
        if begin != reached:
            what = "overlaps" if begin < reached else "leaves a gap after"
            raise CheckpointError(
                f"{path}: tensor {name!r} begins at byte {begin:,} of the data and {what} {before!r}, which ends at "
                f"{reached:,}. {_REMEDY}"
            )
        reached, before = end, name
    if reached != data_bytes:
        raise CheckpointError(
            f"{path}: the header accounts for {reached:,} bytes of data, and the file has {data_bytes:,}. {_REMEDY}"
        )


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


_MADV_POPULATE_WRITE = 23  # linux/mman.h


def mapped_file(path: Path, specs: Sequence[TensorSpec]) -> dict[str, torch.Tensor]:
    """Make a safetensors file and return the memory of each tensor in it, flat, for a file system in memory.

    What is copied there is in the file, so no tensor is in memory twice. A file that exists gives its pages.

    Raises:
        CheckpointError: A name occurs twice or a dtype has no safetensors code.
        OSError: The file system refused, such as for want of room.
    """
    ordered = sorted(specs, key=file_order)
    header, starts, end = _header(ordered)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        os.truncate(descriptor, end)
        # Allocate all pages here: a page that is missing at the first write would be a SIGBUS instead of an error.
        os.posix_fallocate(descriptor, 0, end)
        memory = mmap.mmap(descriptor, end)
    finally:
        os.close(descriptor)
    # A fault for every page of a new mapping took 98 ms of a copy of 363 MB that otherwise took 20; this, 32.
    with contextlib.suppress(OSError, ValueError):  # older than Linux 5.14, or not Linux
        memory.madvise(_MADV_POPULATE_WRITE)
    memory[: len(header)] = header
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    return {one.name: whole[starts[one.name] :][: one.size_bytes].view(one.dtype) for one in ordered}


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
