"""The index of a sharded checkpoint: every tensor's global name, shape, dtype, and which file holds which run of it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from fullshard.errors import CheckpointError

INDEX_NAME = "index.json"
FORMAT = "fullshard-checkpoint"
VERSION = 1
"""Of the format; a reader reads this one and all before it."""


@dataclass(frozen=True)
class PieceEntry:
    """One run of a tensor in one file.

    Attributes:
        file: Name of the safetensors file, which holds the run as a 1-D tensor under the tensor's name.
        start: First element, counted in the flattened whole tensor.
        stop: The element just past the run.
        crcs: CRC-32 of each block of ``BLOCK_BYTES`` of the run, the last one shorter.
    """

    file: str
    start: int
    stop: int
    crcs: tuple[int, ...]


@dataclass(frozen=True)
class TensorEntry:
    """One tensor.

    Attributes:
        dtype: Its dtype's name in torch, such as ``float32``.
        shape: Shape of the whole tensor.
        pieces: Its runs, ascending; together they cover it exactly.
    """

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[PieceEntry, ...]

    @property
    def numel(self) -> int:
        """Elements of the whole tensor."""
        return prod(self.shape)


@dataclass(frozen=True)
class Index:
    """What a checkpoint says about itself.

    Attributes:
        step: Optimizer steps taken.
        world_size: Ranks that wrote it.
        metric: What ``keep_best`` compares; None when it was not given.
        values: What the program wants back: schedule, scaler, position in the data.
        groups: Options of the optimizer's parameter groups, each with the names of its parameters under ``params``.
        scalars: State of the optimizer that is no tensor, by parameter name and key.
        versions: Of fullshard, torch and Python.
        policies: How the model was sharded, as text, for people.
        tensors: By name.
        greater_is_better: Whether the greater metric is the better one; None: not recorded.
    """

    step: int
    world_size: int
    metric: float | None
    values: Mapping[str, Any]
    groups: Sequence[Mapping[str, Any]]
    scalars: Mapping[str, Mapping[str, Any]]
    versions: Mapping[str, str]
    policies: Sequence[str]
    tensors: Mapping[str, TensorEntry] = field(default_factory=dict)
    greater_is_better: bool | None = None

    def as_json(self) -> str:
        """The file's text."""
        return json.dumps(
            {
                "format": FORMAT,
                "version": VERSION,
                **{name: getattr(self, name) for name in (*_PLAIN, *_LATER)},
                "tensors": {name: _tensor_as_plain(entry) for name, entry in self.tensors.items()},
            },
            separators=(",", ":"),
        )


_PLAIN = ("step", "world_size", "metric", "values", "groups", "scalars", "versions", "policies")
_LATER = ("greater_is_better",)
"""What the first checkpoints of this version have not."""


def _tensor_as_plain(entry: TensorEntry) -> dict[str, Any]:
    pieces = [[piece.file, piece.start, piece.stop, list(piece.crcs)] for piece in entry.pieces]
    return {"dtype": entry.dtype, "shape": list(entry.shape), "pieces": pieces}


def tensors_from_plain(values: Mapping[str, Any]) -> dict[str, TensorEntry]:
    """The tensors of a parsed index or of one rank's part of it.

    Raises:
        KeyError, TypeError, ValueError: It is not of this format.
    """
    return {
        name: TensorEntry(
            str(entry["dtype"]),
            tuple(int(size) for size in entry["shape"]),
            tuple(
                PieceEntry(str(file), int(start), int(stop), tuple(int(crc) for crc in crcs))
                for file, start, stop, crcs in entry["pieces"]
            ),
        )
        for name, entry in values.items()
    }


def tensors_as_plain(tensors: Mapping[str, TensorEntry]) -> dict[str, Any]:
    """What :func:`tensors_from_plain` reads."""
    return {name: _tensor_as_plain(entry) for name, entry in tensors.items()}


def parse_index(text: str, path: Path) -> Index:
    """Read an index.

    Args:
        text: Content of the file.
        path: Where it is from, for messages.

    Raises:
        CheckpointError: It is not JSON, of another program or of a later version, or contradicts itself.
    """
    try:
        values = json.loads(text)
        if values.get("format") != FORMAT:
            raise CheckpointError(
                f"{path} is no index of a fullshard checkpoint (its format says {values.get('format')!r})."
            )
        if int(values["version"]) > VERSION:
            raise CheckpointError(
                f"{path} has format version {values['version']}; this fullshard reads up to {VERSION}: update it."
            )
        plain = {name: values[name] for name in _PLAIN} | {name: values.get(name) for name in _LATER}
        index = Index(**plain, tensors=tensors_from_plain(values["tensors"]))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} cannot be read as a checkpoint's index: {error!r}.") from error
    require_covered(index.tensors, path)
    return index


def merge_tensors(parts: Iterable[Mapping[str, TensorEntry]]) -> dict[str, TensorEntry]:
    """One table from those of all ranks.

    Raises:
        CheckpointError: Ranks hold tensors of one name with other shapes or dtypes.
    """
    merged: dict[str, TensorEntry] = {}
    for part in parts:
        for name, entry in part.items():
            known = merged.get(name)
            if known is None:
                merged[name] = entry
            elif (known.dtype, known.shape) != (entry.dtype, entry.shape):
                raise CheckpointError(
                    f"Ranks must hold parts of one model; {name} is {known.dtype} {known.shape} on one rank and "
                    f"{entry.dtype} {entry.shape} on another."
                )
            else:
                pieces = sorted((*known.pieces, *entry.pieces), key=lambda piece: piece.start)
                merged[name] = TensorEntry(known.dtype, known.shape, tuple(pieces))
    return merged


def require_covered(tensors: Mapping[str, TensorEntry], where: object) -> None:
    """Check that the pieces of each tensor cover it, each element once.

    Args:
        tensors: The table.
        where: For the message.

    Raises:
        CheckpointError: An element is missing or there twice, or a file lies elsewhere.
    """
    for name, entry in tensors.items():
        reached = 0
        outside = [piece.file for piece in entry.pieces if "/" in piece.file]
        if outside:
            raise CheckpointError(f"{where}: {name} is said to be in {outside[0]}, which is no file of the checkpoint.")
        for piece in entry.pieces:
            if piece.start != reached or piece.stop <= piece.start:
                break
            reached = piece.stop
        if reached != entry.numel:
            raise CheckpointError(
                f"{where}: the pieces of {name} {entry.shape} do not cover its {entry.numel:,} elements: "
                f"{reached:,} in a row, then a gap or an overlap."
            )
