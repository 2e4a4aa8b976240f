"""The index of a sharded checkpoint: each tensor's name, shape and dtype, and which file holds which run of it.

An index is read without trusting it: it is bounded before it is parsed, its own checksum is compared, and every value
has a rule (:mod:`fullshard.state.storage.rules`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import prod
from typing import Any

from fullshard.core.layout import Order
from fullshard.errors import CheckpointError
from fullshard.state.storage import rules
from fullshard.state.storage.base import Base
from fullshard.state.storage.json_file import Bounds, parse_bounded, require_bounded, require_sealed, seal
from fullshard.state.storage.object_path import Place

INDEX_NAME = "index.json"
FORMAT = "fullshard-checkpoint"
VERSION = 3
"""Version of the format; a reader reads this one and all earlier ones. From 2 on, ``index.json`` and ``complete.json``
have a checksum of themselves and the index has the checkpoint's serial number. Only tensor parallel models have indexes
of 3, which count elements of some tensors block by block; others are still 2, which earlier readers read."""

INDEX_BOUNDS = Bounds(256 << 20, 4_000_000, 16_000_000)
"""Limits. Each tensor has about four names; the checksums of 12 TB are three million values, 35 MB of text."""

SHARD_NAME = re.compile(r"shard-[0-9]{5,}-of-[0-9]{5,}\.safetensors")
"""Names of ranks' files."""

_CRC_MOST = (1 << 32) - 1
_RANKS_MOST = 1_000_000
_DIMENSIONS_MOST = 64


@dataclass(frozen=True)
class PieceEntry:
    """One run of a tensor in one file."""

    file: str  # name of the safetensors file, which holds the run as a 1-D tensor under the tensor's name
    start: int  # first element, counted in the tensor's order
    stop: int  # the element just past the run
    crcs: tuple[int, ...]  # CRC-32 of each block of ``BLOCK_BYTES`` of the run, the last one shorter


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a checkpoint."""

    dtype: str  # name of its dtype in torch, such as ``float32``
    shape: tuple[int, ...]  # shape of the full tensor
    pieces: tuple[PieceEntry, ...]  # its runs in ascending order; together they cover it exactly
    order: Order = None  # in which order its elements are counted and stored; None: as in the flattened tensor

    @property
    def numel(self) -> int:
        """Number of elements of the full tensor."""
        return prod(self.shape)


@dataclass(frozen=True)
class Part:
    """Whose state a checkpoint has that one rank wrote alone: one run of each tensor, which is all that it held."""

    rank: int  # the rank
    frozen: str | None = None  # digest of its frozen parameters, which are left out; None: they are there


@dataclass(frozen=True)
class Index:
    """The contents of a checkpoint's ``index.json``."""

    step: int  # optimizer steps taken
    world_size: int  # number of ranks that wrote it
    metric: float | None  # the value that ``keep_best`` compares; None if none was given
    values: Mapping[str, Any]  # the program's own values: schedule, scaler, position in the data
    # options of the optimizer's parameter groups, each with the names of its parameters under ``params``
    groups: Sequence[Mapping[str, Any]]
    scalars: Mapping[str, Mapping[str, Any]]  # state of the optimizer other than tensors, by parameter name and key
    versions: Mapping[str, str]  # of fullshard, torch and Python
    policies: Sequence[str]  # how the model was sharded, one line of text per unit
    tensors: Mapping[str, TensorEntry] = field(default_factory=dict)  # all tensors by name
    greater_is_better: bool | None = None  # whether a greater metric is better; None: not recorded
    base: Base | None = None  # the model whose frozen weights are left out; None: all weights are here
    serial: int | None = None  # its number in the order of saving, as in ``complete.json``; None: version 1
    divided_by: int | None = None  # number of ranks that divided its parameters (tensor parallel); None: none did
    part: Part | None = None  # the only rank that wrote it, with its own state alone; None: all ranks did

    def as_json(self) -> str:
        """Return the text of the file.

        Raises:
            CheckpointError: It would be refused when it is read.
        """
        plain = {
            "format": FORMAT,
            "version": 3 if self.divided_by or any(one.order for one in self.tensors.values()) else 2,
            **{name: getattr(self, name) for name in (*_PLAIN, *_LATER)},
            **({} if self.base is None else {"base": self.base.as_plain()}),
            **({} if self.divided_by is None else {"divided_by": self.divided_by}),
            **({} if self.part is None else {"part": asdict(self.part)}),
            "tensors": tensors_as_plain(self.tensors),
        }
        try:
            _require_plain_rules(plain)
            text = seal(json.dumps(plain, separators=(",", ":")))
            require_bounded(text.encode(), INDEX_BOUNDS)
        except ValueError as error:
            raise CheckpointError(f"A checkpoint cannot be saved with this index, because {error}.") from error
        return text


_PLAIN = ("step", "world_size", "metric", "values", "groups", "scalars", "versions", "policies")
_LATER = ("greater_is_better", "serial")
"""Fields that indexes of the first version lack."""


def tensors_from_plain(values: Any) -> dict[str, TensorEntry]:
    """Parse the tensors of an index, or of one rank's part of it.

    Raises:
        KeyError, TypeError, ValueError: ``values`` is not of this format.
    """
    return {
        rules.name(name, "the name of a tensor"): _tensor_from_plain(name, entry)
        for name, entry in rules.mapping(values, "tensors").items()
    }


def _tensor_from_plain(name: str, entry: Any) -> TensorEntry:
    where = rules.shown(name)
    shape = rules.counts(entry["shape"], f"the shape of {where}")
    if len(shape) > _DIMENSIONS_MOST or prod(shape) > rules.MOST:
        raise ValueError(f"the shape of {where} is {rules.shown(shape)}; no tensor has so many elements")
    pieces = []
    for file, start, stop, crcs in entry["pieces"]:
        if type(file) is not str or not SHARD_NAME.fullmatch(file):
            raise ValueError(f"{where} is stored in {rules.shown(file)}, which is not a file of the checkpoint")
        first, last = (rules.count(bound, f"an end of a run of {where}") for bound in (start, stop))
        pieces.append(PieceEntry(file, first, last, rules.counts(crcs, f"a checksum of {where}", _CRC_MOST)))
    order = _order_from_plain(where, shape, entry["order"]) if "order" in entry else None
    return TensorEntry(rules.name(entry["dtype"], f"the dtype of {where}"), shape, tuple(pieces), order)


def _order_from_plain(where: str, shape: tuple[int, ...], values: Any) -> Order:
    dim, count = rules.counts(values, f"the order of {where}")
    if not 0 < dim < len(shape) or not count or shape[dim] % count:
        raise ValueError(f"the order of {where} {shape} is {rules.shown(values)}, which are no blocks of it")
    return dim, count


def tensors_as_plain(tensors: Mapping[str, TensorEntry]) -> dict[str, Any]:
    """Return ``tensors`` as JSON holds them, for :func:`tensors_from_plain`."""
    return {
        name: {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "pieces": [[piece.file, piece.start, piece.stop, list(piece.crcs)] for piece in entry.pieces],
            **({} if entry.order is None else {"order": list(entry.order)}),
        }
        for name, entry in tensors.items()
    }


def parse_index(content: bytes, path: Place) -> Index:
    """Parse the index in the file ``path``; check its values, its own checksum, and what its pieces cover.

    Raises:
        CheckpointError: It is not JSON, of another program or a later version, damaged, contradicts itself, or has
            values that no checkpoint has.
    """
    try:
        values = rules.mapping(parse_bounded(content, INDEX_BOUNDS), "it")
        if values.get("format") != FORMAT:
            raise CheckpointError(
                f"{path} is not the index of a fullshard checkpoint: its format is {rules.shown(values.get('format'))}."
            )
        if rules.count(values["version"], "version", least=1) > VERSION:
            raise CheckpointError(
                f"{path} has format version {values['version']}; this fullshard reads up to {VERSION}. Update it."
            )
        require_sealed(content, needed=values["version"] > 1)
        _require_plain_rules(values)
        plain: dict[str, Any] = {name: values[name] for name in _PLAIN}
        plain |= {name: values.get(name) for name in _LATER}
        plain["divided_by"] = values.get("divided_by")
        plain["base"] = None if values.get("base") is None else Base.from_plain(rules.mapping(values["base"], "base"))
        plain["part"] = _part_from_plain(values.get("part"), values["world_size"])
        index = Index(**plain, tensors=tensors_from_plain(values["tensors"]))
    except KeyError as error:
        raise CheckpointError(f"{path} cannot be read as a checkpoint's index: it has no {error}.") from error
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read as a checkpoint's index: {error}.") from error
    require_covered(index.tensors, path, alone=index.part is not None)
    return index


def _part_from_plain(values: Any, world_size: int) -> Part | None:
    if values is None:
        return None
    frozen = rules.mapping(values, "part")["frozen"]
    rank = rules.count(values["rank"], "the rank of part", most=world_size - 1)
    return Part(rank, None if frozen is None else rules.name(frozen, "the digest of frozen parameters"))


def _require_plain_rules(values: Mapping[str, Any]) -> None:
    """Check everything but the tensors against the rules of :class:`Index`.

    Raises:
        KeyError, ValueError: A field is missing or breaks its rule.
    """
    rules.count(values["step"], "step")
    rules.count(values["world_size"], "world_size", least=1, most=_RANKS_MOST)
    rules.metric(values["metric"])
    rules.flag(values.get("greater_is_better"), "greater_is_better")
    if values.get("serial") is not None:
        rules.count(values["serial"], "serial")
    if values.get("divided_by") is not None:
        rules.count(values["divided_by"], "divided_by", least=2, most=_RANKS_MOST)
    for number, group in enumerate(values["groups"]):
        rules.options(group, f"group {number}")
    rules.mapping(values["values"], "values")
    for name, scalars in rules.mapping(values["scalars"], "scalars").items():
        rules.name(name, "a name in scalars")
        rules.mapping(scalars, f"scalars of {rules.shown(name)}")
    rules.names(list(rules.mapping(values["versions"], "versions").values()), "versions")
    rules.names(values["policies"], "policies")


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
        CheckpointError: An element is missing or covered twice.
    """
    for name, entry in tensors.items():
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
