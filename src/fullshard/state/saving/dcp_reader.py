"""Reader of torch's distributed checkpoints (DCP) that runs no code named in their files.

torch reads ``.metadata`` by :mod:`pickle` and values other than tensors by ``torch.load(weights_only=False)``: both
call any function that a file names. Here the metadata is unpickled into records of our own, only the names that torch's
writer writes are known, and every field has a rule; values are loaded with ``weights_only=True``.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

from fullshard.errors import CheckpointError
from fullshard.state.storage import read_bounded, rules, why_refused

MARKER = ".metadata"
"""Name of the file that torch writes last."""

_BYTES = 512 << 20
"""Largest ``.metadata`` that is read; 50,000 chunks of tensors are about 8 MB."""

_METADATA = "torch.distributed.checkpoint.metadata"
_OLDER = "torch.distributed._shard.sharded_tensor.metadata"
_RECORDS = frozenset(
    [(_METADATA, one.__name__) for one in (BytesStorageMetadata, ChunkStorageMetadata, Metadata, MetadataIndex)]
    + [(_METADATA, one.__name__) for one in (StorageMeta, TensorProperties, TensorStorageMetadata)]
    + [(_METADATA, "_MEM_FORMAT_ENCODING"), ("torch.distributed.checkpoint.filesystem", "_StorageInfo")]
    + [(_OLDER, "TensorProperties"), (_OLDER, "MEM_FORMAT_ENCODING"), ("torch.serialization", "_get_layout")]
    + [(module, name) for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath")]
)
"""Names that become a :class:`_Record`; none of their code runs."""

_PLAIN = {("torch", "Size"): torch.Size, ("collections", "OrderedDict"): OrderedDict}


class _Record:
    """An object in the file: the name of its class, the arguments of a call, and its state."""

    name = ""

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def fields(self, name: str) -> Mapping[str, Any]:
        """Return its state, a dict.

        Raises:
            ValueError: It is of another class, or its state is not a dict.
        """
        state = getattr(self, "state", None)
        if self.name != name or not isinstance(state, dict):
            raise ValueError(f"it has a {self.name} where a {name} is expected")
        return state


class _Unpickler(pickle.Unpickler):
    """Unpickler that knows only the names that torch's writer writes."""

    def __init__(self, content: bytes) -> None:
        super().__init__(io.BytesIO(content))
        # New classes each time: a file can set attributes of a class that it names.
        self._records = {key: type(key[1], (_Record,), {"name": key[1]}) for key in _RECORDS}

    def find_class(self, module: str, name: str) -> Any:
        """Return the record or value for a name.

        Raises:
            UnpicklingError: torch's writer does not write this name.
        """
        found = self._records.get((module, name)) or _PLAIN.get((module, name))
        if found is None and module == "torch":
            found = vars(torch).get(name)
            found = found if isinstance(found, torch.dtype) else None
        if found is None:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which was not looked up")
        return found

    def persistent_load(self, pid: Any) -> Any:
        """Refuse objects outside the file.

        Raises:
            UnpicklingError: Always.
        """
        raise pickle.UnpicklingError("it refers to an object outside the file")


_FIXED = {
    **dict.fromkeys((pickle.MARK, pickle.STOP, pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.MEMOIZE), 0),
    **dict.fromkeys((pickle.EMPTY_DICT, pickle.EMPTY_LIST, pickle.EMPTY_TUPLE), 0),
    **dict.fromkeys((pickle.SETITEM, pickle.SETITEMS, pickle.APPEND, pickle.APPENDS), 0),
    **dict.fromkeys((pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3), 0),
    **dict.fromkeys((pickle.STACK_GLOBAL, pickle.NEWOBJ, pickle.REDUCE, pickle.BUILD), 0),
    **dict.fromkeys((pickle.PROTO, pickle.BININT1, pickle.BINGET), 1),
    pickle.BININT2: 2,
    **dict.fromkeys((pickle.BININT, pickle.LONG_BINGET), 4),
    **dict.fromkeys((pickle.BINFLOAT, pickle.FRAME), 8),
}
_SIZED = {pickle.SHORT_BINUNICODE: "<B", pickle.BINUNICODE: "<I", pickle.LONG1: "<B"}
_STEPS = {code[0]: 1 + size for code, size in _FIXED.items()}
_LENGTHS = {code[0]: struct.Struct(form) for code, form in _SIZED.items()}


def _require_known_opcodes(content: bytes) -> None:
    """Check that a pickle has only the opcodes that the writer needs (protocol 4).

    Others can fill the memory: a put into slot 2^31 of the memo takes 34 GB, from a file of 20 bytes.

    Raises:
        ValueError: It has another opcode, or ends early.
    """
    position, end = 0, len(content)
    while position < end:
        code = content[position]
        step = _STEPS.get(code)
        if step is None:
            length = _LENGTHS.get(code)
            if length is None or position + 1 + length.size > end:
                raise ValueError(f"it has the opcode {bytes([code])!r}, which torch's writer does not use")
            step = 1 + length.size + length.unpack_from(content, position + 1)[0]
        elif code == pickle.STOP[0]:
            return
        position += step
    raise ValueError("it ends early")


def read_metadata(path: Path) -> Metadata:
    """Read the metadata of a distributed checkpoint; any rank.

    Args:
        path: The checkpoint's directory.

    Raises:
        CheckpointError: There is none, it is damaged, or it names anything that torch's writer does not write.
    """
    try:
        content = read_bounded(path / MARKER, _BYTES)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path} is not a complete distributed checkpoint: it has no file {MARKER}, which is written last."
        ) from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path / MARKER} cannot be read: {error}.") from error
    try:
        _require_known_opcodes(content)
        return _metadata(_Unpickler(content).load())
    except Exception as error:  # unpickling damaged bytes can raise nearly anything
        raise CheckpointError(
            f"{path / MARKER} is not metadata as torch.distributed.checkpoint writes it, and no code of it was run: "
            f"{error}. Save the checkpoint again with torch's FileSystemWriter, or fetch it again."
        ) from error


def _metadata(record: Any) -> Metadata:
    """Build torch's object from the unpickled records, field by field.

    Raises:
        ValueError, TypeError, KeyError, AttributeError: It is not of this form.
    """
    fields = record.fields("Metadata")
    tensors = rules.mapping(fields["state_dict_metadata"], "state_dict_metadata")
    places = rules.mapping(fields["storage_data"], "storage_data")
    planner = fields.get("planner_data")
    if planner is not None:
        planner = {rules.name(key, "a key"): _path_of(place) for key, place in planner.items()}
    return Metadata(
        state_dict_metadata={rules.name(key, "a key"): _stored(key, entry) for key, entry in tensors.items()},
        planner_data=planner,
        storage_data={_index(index): _place(place) for index, place in places.items()},
        storage_meta=StorageMeta(),
    )


def _stored(key: str, entry: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if entry.name == "BytesStorageMetadata":
        return BytesStorageMetadata()
    fields = entry.fields("TensorStorageMetadata")
    properties = fields["properties"].state
    dtype = properties["dtype"] if isinstance(properties, dict) else properties[0]
    if fields["properties"].name != "TensorProperties" or not isinstance(dtype, torch.dtype):
        raise ValueError(f"{rules.shown(key)} has no dtype")
    chunks = [chunk.fields("ChunkStorageMetadata") for chunk in fields["chunks"]]
    return TensorStorageMetadata(
        TensorProperties(dtype),
        _size(fields["size"]),
        [ChunkStorageMetadata(_size(chunk["offsets"]), _size(chunk["sizes"])) for chunk in chunks],
    )


def _index(record: Any) -> MetadataIndex:
    fields = record.fields("MetadataIndex")
    offset, hint = fields.get("offset"), fields.get("index")
    return MetadataIndex(
        rules.name(fields["fqn"], "a key"),
        None if offset is None else _size(offset),
        None if hint is None else rules.count(hint, "index"),
    )


@dataclass(frozen=True)
class _Place:
    """Location of a chunk or value, as torch's reader expects it."""

    relative_path: str
    offset: int
    length: int
    transform_descriptors: list[str] | None


def _place(record: Any) -> _Place:
    fields = record.fields("_StorageInfo")
    file = rules.file_name(fields["relative_path"], "relative_path")
    names = fields.get("transform_descriptors")
    return _Place(
        file,
        rules.count(fields["offset"], f"an offset in {rules.shown(file)}"),
        rules.count(fields["length"], f"a length in {rules.shown(file)}"),
        None if names is None else rules.names(names, "transform_descriptors"),
    )


def _size(value: Any) -> torch.Size:
    return torch.Size(rules.counts(list(value), "a size"))


def _path_of(place: Any) -> tuple[str | int, ...]:
    """Return the path of a value in the nested state, of names and numbers."""
    if not isinstance(place, tuple) or not all(type(part) in (str, int) for part in place):
        raise ValueError(f"the path {rules.shown(place)} is not of names and numbers")
    return place


class DcpReader(FileSystemReader):
    """torch's reader, with metadata read before: torch would unpickle it, on each rank and for each load."""

    def __init__(self, path: Path, metadata: Metadata) -> None:
        """Read the files next to the metadata of ``path``."""
        super().__init__(path)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata."""
        return self._metadata


class DcpPlanner(DefaultLoadPlanner):
    """torch's planner for a flat state, by the keys of the checkpoint; it loads only plain Python objects."""

    def __init__(self, path: Path) -> None:
        """Name ``path`` in messages."""
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._path = path

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Load one value that is not a tensor.

        Raises:
            CheckpointError: It is not a plain value.
        """
        key = read_item.dest_index.fqn
        try:
            self.state_dict[key] = torch.load(value, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            raise CheckpointError(f"{key} of {self._path} is not a plain value: {why_refused(error)}") from error
