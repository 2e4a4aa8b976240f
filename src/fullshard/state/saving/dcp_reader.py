"""Reader of torch's distributed checkpoints (DCP) that runs no code named in their files.

torch reads ``.metadata`` by :mod:`pickle` and values other than tensors by ``torch.load(weights_only=False)``: both
call any function that a file names. Here the metadata is unpickled into records of our own, only the names that torch's
writer writes are known, and every field has a rule; values are loaded with ``weights_only=True``.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import re
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


_OPCODES = re.compile(
    "APPENDS?|BIN(FLOAT|GET|INT[12]?|UNICODE)|BUILD|EMPTY_(DICT|LIST|TUPLE)|FRAME|LONG1|LONG_BINGET|MARK|MEMOIZE|"
    "NEW(FALSE|OBJ|TRUE)|NONE|PROTO|REDUCE|SETITEMS?|SHORT_BINUNICODE|STACK_GLOBAL|STOP|TUPLE[123]?"
)
_ARGUMENTS = {ord(op.code): op.arg.n if op.arg else 0 for op in pickletools.opcodes if _OPCODES.fullmatch(op.name)}
"""Bytes of each opcode's argument; negative: its first bytes say how many follow."""
_COUNTS = {pickletools.TAKEN_FROM_ARGUMENT1: 1, pickletools.TAKEN_FROM_ARGUMENT4U: 4}


def _require_known_opcodes(content: bytes) -> None:
    """Check that a pickle has only the opcodes that the writer needs (protocol 4).

    Others can fill the memory: a put into slot 2^31 of the memo takes 34 GB, from a file of 20 bytes.

    Raises:
        ValueError: It has another opcode, or ends early.
    """
    position, end = 0, len(content)
    while position < end:
        code = content[position]
        nbytes = _ARGUMENTS.get(code)
        if nbytes is None:
            raise ValueError(f"it has the opcode {bytes([code])!r}, which torch's writer does not use")
        if code == pickle.STOP[0]:
            return
        position += 1
        if nbytes < 0:
            nbytes = _COUNTS[nbytes] + int.from_bytes(content[position : position + _COUNTS[nbytes]], "little")
        position += nbytes
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
    tensors = rules.check(dict, fields["state_dict_metadata"], "state_dict_metadata")
    places = rules.check(dict, fields["storage_data"], "storage_data")
    planner = fields.get("planner_data")
    if planner is not None:
        planner = {rules.check(rules.Name, key, "a key"): _path_of(place) for key, place in planner.items()}
    return Metadata(
        state_dict_metadata={
            rules.check(rules.Name, key, "a key"): _stored(key, entry) for key, entry in tensors.items()
        },
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
        rules.check(rules.Name, fields["fqn"], "a key"),
        None if offset is None else _size(offset),
        None if hint is None else rules.check(rules.Count, hint, "index"),
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
    file = rules.check(rules.FileName, fields["relative_path"], "relative_path")
    names = fields.get("transform_descriptors")
    return _Place(
        file,
        rules.check(rules.Count, fields["offset"], f"an offset in {rules.shown(file)}"),
        rules.check(rules.Count, fields["length"], f"a length in {rules.shown(file)}"),
        None if names is None else rules.check(rules.Names, names, "transform_descriptors"),
    )


def _size(value: Any) -> torch.Size:
    return torch.Size(rules.check(list[rules.Count], list(value), "a size"))


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
