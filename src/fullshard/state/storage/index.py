"""The index of a sharded checkpoint: each tensor's name, shape and dtype, and which file holds which run of it.

An index is read without trusting it: it is bounded before it is parsed, its own checksum is compared, and every field
has a type with its bounds (:mod:`fullshard.state.storage.rules`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Annotated, Any, Literal, NamedTuple

from annotated_types import Ge, Le, Len

from fullshard.errors import CheckpointError
from fullshard.state.storage.base import Base
from fullshard.state.storage.json_file import Bounds, parse_sealed, seal
from fullshard.state.storage.object_path import Place
from fullshard.state.storage.rules import MOST, Count, Metric, Name, Options, rule

INDEX_NAME = "index.json"
VERSION = 3
"""Version of the format; a reader reads this one and all earlier ones. From 2 on, ``index.json`` and ``complete.json``
have a checksum of themselves and the index has the checkpoint's serial number. Only tensor parallel models have indexes
of 3, which count elements of some tensors block by block; others are still 2, which earlier readers read."""

INDEX_BOUNDS = Bounds(256 << 20, 4_000_000, 16_000_000)
"""Limits. Each tensor has about four names; the checksums of 12 TB are three million values, 35 MB of text."""

SHARD_NAME = re.compile(r"shard-[0-9]{5,}-of-[0-9]{5,}\.safetensors")
"""Names of ranks' files."""

_RANKS_MOST = 1_000_000


Crc = Annotated[int, Ge(0), Le((1 << 32) - 1)]
Positive = Annotated[int, Ge(1)]
Shape = Annotated[tuple[Count, ...], Len(0, 64), rule("no tensor has so many elements", lambda of: prod(of) <= MOST)]
ShardName = Annotated[str, rule("it is not a file of the checkpoint", SHARD_NAME.fullmatch)]


class PieceEntry(NamedTuple):
    """One run of a tensor in one file."""

    file: ShardName  # name of the safetensors file, which holds the run as a 1-D tensor under the tensor's name
    start: Count  # first element, counted in the tensor's order
    stop: Count  # the element just past the run
    crcs: tuple[Crc, ...]  # CRC-32 of each block of ``BLOCK_BYTES`` of the run, the last one shorter


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a checkpoint."""

    dtype: Name  # name of its dtype in torch, such as ``float32``
    shape: Shape  # shape of the full tensor
    pieces: tuple[PieceEntry, ...]  # its runs in ascending order; together they cover it exactly
    # in which order its elements are counted and stored; None: as in the flattened tensor
    order: tuple[Count, Positive] | None = None

    @property
    def numel(self) -> int:
        """Number of elements of the full tensor."""
        return prod(self.shape)


@dataclass(frozen=True)
class Part:
    """Whose state a checkpoint has that one rank wrote alone: one run of each tensor, which is all that it held."""

    rank: Count  # the rank
    frozen: Name | None = None  # digest of its frozen parameters, which are left out; None: they are there


@dataclass(frozen=True)
class Index:
    """The contents of a checkpoint's ``index.json``."""

    step: Count  # optimizer steps taken
    world_size: Annotated[int, Ge(1), Le(_RANKS_MOST)]  # number of ranks that wrote it
    metric: Metric  # the value that ``keep_best`` compares; None if none was given
    values: Mapping[str, Any]  # the program's own values: schedule, scaler, position in the data
    # options of the optimizer's parameter groups, each with the names of its parameters under ``params``
    groups: Sequence[Options]
    scalars: Mapping[Name, Mapping[str, Any]]  # state of the optimizer other than tensors, by parameter name and key
    versions: Mapping[str, Name]  # of fullshard, torch and Python
    policies: Sequence[Name]  # how the model was sharded, one line of text per unit
    tensors: Mapping[Name, TensorEntry] = field(default_factory=dict)  # all tensors by name
    greater_is_better: bool | None = None  # whether a greater metric is better; None: not recorded
    base: Base | None = None  # the model whose frozen weights are left out; None: all weights are here
    serial: Count | None = None  # its number in the order of saving, as in ``complete.json``; None: version 1
    # number of ranks that divided its parameters (tensor parallel); None: none did
    divided_by: Annotated[int, Ge(2), Le(_RANKS_MOST)] | None = None
    part: Part | None = None  # the only rank that wrote it, with its own state alone; None: all ranks did
    format: Literal["fullshard-checkpoint"] = "fullshard-checkpoint"

    def as_json(self) -> str:
        """Return the text of the file.

        Raises:
            CheckpointError: It would be refused when it is read.
        """
        version = 3 if self.divided_by or any(one.order for one in self.tensors.values()) else 2
        plain = {"format": self.format, "version": version, **vars(self)}
        try:
            text = seal(json.dumps(plain, separators=(",", ":"), default=known_fields))
            parse_sealed(Index, text.encode(), INDEX_BOUNDS, VERSION)
        except ValueError as error:
            raise CheckpointError(f"A checkpoint cannot be saved with this index, because {error}.") from error
        return text


@dataclass(frozen=True)
class IndexPart:
    """One rank's part of an index."""

    tensors: Mapping[Name, TensorEntry]
    groups: Sequence[Mapping[str, Any]]
    scalars: Mapping[Name, Mapping[str, Any]]


def known_fields(record: Any) -> dict[str, Any]:
    """Return the fields of a record of an index that are not None: the ``default`` of :func:`json.dumps`."""
    if not isinstance(record, (Base, IndexPart, Part, TensorEntry)):
        raise TypeError(f"{type(record).__name__} has no form in JSON")
    return {name: value for name, value in vars(record).items() if value is not None}


def parse_index(content: bytes, path: Place) -> Index:
    """Parse the index in the file ``path``; check its values, its own checksum, and that its pieces cover all tensors.

    Raises:
        CheckpointError: It is not JSON, of another program or a later version, damaged, contradicts itself, or has
            values that no checkpoint has.
    """
    try:
        index = parse_sealed(Index, content, INDEX_BOUNDS, VERSION)
    except ValueError as error:
        raise CheckpointError(f"{path} cannot be read as a checkpoint's index: {error}.") from error
    if index.part is not None and index.part.rank >= index.world_size:
        raise CheckpointError(f"{path} is of rank {index.part.rank}, but {index.world_size} ranks wrote it.")
    require_covered(index.tensors, path, alone=index.part is not None)
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
            elif (known.dtype, known.shape, known.order) != (entry.dtype, entry.shape, entry.order):
                raise CheckpointError(
                    f"All ranks must save the same model; {name} is {known.dtype} {known.shape} on one rank and "
                    f"{entry.dtype} {entry.shape} on another."
                )
            else:
                pieces = sorted((*known.pieces, *entry.pieces), key=lambda piece: piece.start)
                merged[name] = replace(known, pieces=tuple(pieces))
    return merged


def require_covered(tensors: Mapping[str, TensorEntry], where: object, *, alone: bool = False) -> None:
    """Check that the pieces of each tensor cover every element exactly once; ``where`` names the file in the message.

    With ``alone``, of one rank's :class:`Part`: that they are one run of each tensor.

    Raises:
        CheckpointError: An element is missing or covered twice, or they are counted in blocks that it does not have.
    """
    for name, entry in tensors.items():
        dim, count = entry.order or (1, 1)
        if entry.order and not (0 < dim < len(entry.shape) and entry.shape[dim] % count == 0):
            raise CheckpointError(f"{where}: the order of {name} {entry.shape} is {entry.order}, no blocks of it.")
        if alone:
            if len(entry.pieces) == 1 and entry.pieces[0].start <= entry.pieces[0].stop <= entry.numel:
                continue
            raise CheckpointError(f"{where}: {name} {entry.shape} must be one run of its {entry.numel:,} elements.")
        reached = 0
        for piece in entry.pieces:
            if piece.start != reached or piece.stop <= piece.start:
                break
            reached = piece.stop
        else:
            if reached == entry.numel:
                continue
        raise CheckpointError(
            f"{where}: the pieces of {name} {entry.shape} do not cover its {entry.numel:,} elements: "
            f"after {reached:,} there is a gap or an overlap."
        )
