"""Hugging Face's ``model.safetensors``, written by ourselves so that one tensor at a time is enough.

The container is 8 bytes (little-endian length of the header), a JSON header with each tensor's dtype, shape and byte
range, and the tensors' bytes without gaps. The header needs names, shapes and dtypes only, so it goes first, and each
tensor is written to its place when it arrives, in any order. The library's own ``save_file`` wants all tensors at once.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from types import TracebackType

import torch

from fullshard.errors import CheckpointError

WEIGHTS_NAME = "model.safetensors"

_DTYPE_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
# Linux writes at most 0x7ffff000 bytes a call; smaller pieces also let Ctrl-C in between.
_WRITE_BYTES = 64 * 1024 * 1024


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
    def size_bytes(self) -> int:
        """Bytes of the tensor in the file."""
        return prod(self.shape) * self.dtype.itemsize


class SafetensorsWriter:
    """A safetensors file that is filled tensor by tensor; a context manager, on one rank.

    On leaving without an error every tensor must have been written, and the bytes are on the disk (fsync). What is
    left behind after an error is not a whole file: write into an :func:`~fullshard.checkpoint.atomic_directory`.
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
        self._missing = dict.fromkeys(self._specs)  # a dict keeps the order, for the message
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

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Write one tensor to its place, cast to the dtype the header gives it.

        Args:
            name: One of the names in the header, not written before.
            tensor: On any device, of the header's shape; not kept.

        Raises:
            CheckpointError: The name is unknown or was written before, or the shape is another.
            OSError: The file system refused.
        """
        spec = self._specs.get(name)
        if spec is None:
            raise CheckpointError(f"{self.path.name}: tensor {name!r} is none of the {len(self._specs)} announced.")
        if name not in self._missing:
            raise CheckpointError(f"{self.path.name}: tensor {name!r} came a second time; each is written once.")
        if tuple(tensor.shape) != spec.shape:
            raise CheckpointError(
                f"{self.path.name}: tensor {name!r} has shape {tuple(tensor.shape)}, announced was {spec.shape}."
            )
        plain = tensor.detach().to(device="cpu", dtype=spec.dtype).contiguous()
        _write_at(self._descriptor, self._starts[name], plain.reshape(-1).view(torch.uint8).numpy().data)
        del self._missing[name]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the file; without an error, first put it on the disk.

        Raises:
            CheckpointError: Tensors of the header were never written.
            OSError: The file system refused.
        """
        try:
            if kind is None and self._missing:
                names = list(self._missing)
                raise CheckpointError(
                    f"{self.path.name}: {len(names)} of {len(self._specs)} tensors were never written: "
                    f"{', '.join(names[:5])}{', …' if len(names) > 5 else ''}."
                )
            if kind is None:
                os.fsync(self._descriptor)
        finally:
            os.close(self._descriptor)


def write_full(
    stream: Iterable[tuple[str, Mapping[str, torch.Tensor | None]]],
    directory: Path,
    *,
    specs: Sequence[TensorSpec],
    dtype: torch.dtype | None = None,
) -> int:
    """Write a streamed model to ``directory/model.safetensors``; on the rank that receives the tensors.

    Args:
        stream: ``(unit name, {tensor name: full tensor})``, unit by unit; each tensor is written and let go before the
            next is taken up.
        directory: Existing directory, usually the one that :func:`~fullshard.checkpoint.atomic_directory` yields.
        specs: Every tensor that the stream will bring, a tied one once, with the dtype it has in the model.
        dtype: Cast floating tensors to this on the way; None keeps each one's own.

    Returns:
        Size of the file in bytes.

    Raises:
        CheckpointError: The stream brings a tensor twice, not at all, or with another shape than announced.
        OSError: The file system refused.
    """
    if dtype is not None:
        specs = [replace(spec, dtype=dtype) if spec.dtype.is_floating_point else spec for spec in specs]
    path = directory / WEIGHTS_NAME
    with SafetensorsWriter(path, specs) as writer:
        for unit_name, tensors in stream:
            _write_unit(writer, unit_name, tensors)
            del tensors  # before the stream makes the next unit
    return path.stat().st_size


def _write_unit(writer: SafetensorsWriter, unit_name: str, tensors: Mapping[str, torch.Tensor | None]) -> None:
    for name, tensor in tensors.items():
        if tensor is None:
            raise CheckpointError(f"{unit_name or 'root'}: tensor {name!r} did not reach the rank that writes.")
        writer.write(name, tensor)


def _header(specs: Sequence[TensorSpec]) -> tuple[bytes, dict[str, int], int]:
    """Header bytes with the length in front, where in the file each tensor starts, and where the file ends."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offsets: dict[str, int] = {}
    offset = 0
    for spec in specs:
        code = _DTYPE_CODES.get(spec.dtype)
        if code is None:
            raise CheckpointError(f"Tensor {spec.name!r} is {spec.dtype}, which the safetensors format cannot hold.")
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
        done += os.pwrite(descriptor, data[done : done + _WRITE_BYTES], position + done)
