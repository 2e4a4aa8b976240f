"""The index of a sharded checkpoint: each tensor's name, shape and dtype, and which file holds which run of it."""

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
"""Version of the format; a reader reads this one and all earlier ones."""


@dataclass(frozen=True)
class PieceEntry:
    """One run of a tensor in one file.

    Attributes:
        file: Name of the safetensors file, which holds the run as a 1-D tensor under the tensor's name.
        start: First element, counted in the flattened full tensor.
        stop: The element just past the run.
        crcs: CRC-32 of each block of ``BLOCK_BYTES`` of the run, the last one shorter.
    """

    file: str
    start: int
    stop: int
    crcs: tuple[int, ...]


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a checkpoint.

    Attributes:
        dtype: Name of its dtype in torch, such as ``float32``.
        shape: Shape of the full tensor.
        pieces: Its runs in ascending order; together they cover it exactly.
    """

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[PieceEntry, ...]

    @property
    def numel(self) -> int:
        """Number of elements of the full tensor."""
        return prod(self.shape)


@dataclass(frozen=True)
class Index:
    """The contents of a checkpoint's ``index.json``.

    Attributes:
        step: Optimizer steps taken.
        world_size: Number of ranks that wrote it.
        metric: The value that ``keep_best`` compares; None if none was given.
        values: The program's own values: schedule, scaler, position in the data.
        groups: Options of the optimizer's parameter groups, each with the names of its parameters under ``params``.
        scalars: State of the optimizer other than tensors, by parameter name and key.
        versions: Of fullshard, torch and Python.
        policies: How the model was sharded, one line of text per unit.
        tensors: All tensors by name.
        greater_is_better: Whether a greater metric is better; None: not recorded.
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
        """Return the text of the file."""
        return json.dumps(
            {
                "format": FORMAT,
                "version": VERSION,
                **{name: getattr(self, name) for name in (*_PLAIN, *_LATER)},
                "tensors": tensors_as_plain(self.tensors),
            },
            separators=(",", ":"),
        )


_PLAIN = ("step", "world_size", "metric", "values", "groups", "scalars", "versions", "policies")
_LATER = ("greater_is_better",)
"""Fields that the first checkpoints of this version lack."""


def tensors_from_plain(values: Mapping[str, Any]) -> dict[str, TensorEntry]:
    """Parse the tensors of an index, or of one rank's part of it.

    Raises:
        KeyError, TypeError, ValueError: ``values`` is not of this format.
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
    """Return ``tensors`` as JSON holds them, for :func:`tensors_from_plain`."""
    return {
        name: {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "pieces": [[piece.file, piece.start, piece.stop, list(piece.crcs)] for piece in entry.pieces],
        }
        for name, entry in tensors.items()
    }


def parse_index(text: str, path: Path) -> Index:
    """Parse an index and check that its pieces cover every tensor.

    Args:
        text: Content of the file.
        path: The file, for messages.

    Raises:
        CheckpointError: The text is not JSON, of another program or a later version, or contradicts itself.
    """
    try:
        values = json.loads(text)
        if values.get("format") != FORMAT:
            raise CheckpointError(
                f"{path} is not the index of a fullshard checkpoint (its format is {values.get('format')!r})."
            )
        if int(values["version"]) > VERSION:
            raise CheckpointError(
                f"{path} has format version {values['version']}; this fullshard reads up to {VERSION}. Update it."
            )
        plain = {name: values[name] for name in _PLAIN} | {name: values.get(name) for name in _LATER}
        index = Index(**plain, tensors=tensors_from_plain(values["tensors"]))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} cannot be read as a checkpoint's index: {error!r}.") from error
    require_covered(index.tensors, path)
    return index


def merge_tensors(parts: Iterable[Mapping[str, TensorEntry]]) -> dict[str, TensorEntry]:
    """Merge the tensors of all ranks into one table.

    Raises:
        CheckpointError: Ranks hold a tensor of the same name with different shapes or dtypes.
    """
    merged: dict[str, TensorEntry] = {}
    for part in parts:
        for name, entry in part.items():
            known = merged.get(name)
            if known is None:
                merged[name] = entry
            elif (known.dtype, known.shape) != (entry.dtype, entry.shape):
                raise CheckpointError(
                    f"All ranks must save the same model; {name} is {known.dtype} {known.shape} on one rank and "
                    f"{entry.dtype} {entry.shape} on another."
                )
            else:
                pieces = sorted((*known.pieces, *entry.pieces), key=lambda piece: piece.start)
                merged[name] = TensorEntry(known.dtype, known.shape, tuple(pieces))
    return merged


def require_covered(tensors: Mapping[str, TensorEntry], where: object) -> None:
    """Raise unless the pieces of each tensor cover it, each element once.

    Args:
        tensors: The tensors.
        where: The path, for the message.

    Raises:
        CheckpointError: An element is missing or covered twice, or a file is outside the checkpoint.
    """
    for name, entry in tensors.items():
        reached = 0
        outside = [piece.file for piece in entry.pieces if "/" in piece.file]
        if outside:
            raise CheckpointError(f"{where}: {name} is stored in {outside[0]}, which is not a file of the checkpoint.")
        for piece in entry.pieces:
            if piece.start != reached or piece.stop <= piece.start:
                break
            reached = piece.stop
        if reached != entry.numel:
            raise CheckpointError(
                f"{where}: the pieces of {name} {entry.shape} do not cover its {entry.numel:,} elements: "
                f"after {reached:,} there is a gap or an overlap."
            )
