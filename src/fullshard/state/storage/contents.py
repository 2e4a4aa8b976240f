"""The contents of checkpoints, models and weight files, found without reading any tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from fullshard.errors import CheckpointError
from fullshard.state.storage import rules
from fullshard.state.storage.backend import backend_of
from fullshard.state.storage.completion import check_completion
from fullshard.state.storage.index import Index, TensorEntry
from fullshard.state.storage.json_file import read_json
from fullshard.state.storage.kinds import (
    ADAPTER_NAME,
    CHECKPOINTS_NAME,
    Kind,
    checkpoints_in,
    kind_of,
    models_in,
    set_aside_in,
    unfinished_in,
)
from fullshard.state.storage.object_path import ObjectPath, Place, as_place
from fullshard.state.storage.shard_file import dtype_name, dtype_of
from fullshard.state.storage.store import find_completions, rank_by_metric, read_index
from fullshard.state.storage.weight_files import WeightFiles


@dataclass(frozen=True)
class TensorInfo:
    """One stored tensor."""

    name: str
    dtype: str  # name of its dtype in torch
    shape: tuple[int, ...]  # its full shape
    nbytes: int  # its size in bytes

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)


@dataclass(frozen=True)
class TensorGroup:
    """Totals of the tensors of one purpose, such as the model or the optimizer."""

    name: str  # the prefix of their names in a checkpoint; otherwise ``model``
    tensors: int
    elements: int
    nbytes: int  # size in bytes
    dtypes: tuple[str, ...]  # their dtypes, each once

    def as_dict(self) -> dict[str, Any]:
        """Return what ``--json`` prints."""
        return {"tensors": self.tensors, "elements": self.elements, "bytes": self.nbytes, "dtypes": list(self.dtypes)}


@dataclass(frozen=True)
class Contents:
    """The contents of one checkpoint, model or weight file."""

    path: Place
    kind: Kind
    facts: Mapping[str, Any]  # what is recorded in addition to tensors, by name
    tensors: tuple[TensorInfo, ...]  # all stored tensors
    files: Mapping[str, int]  # size in bytes of each file, by its name

    @property
    def groups(self) -> list[TensorGroup]:
        """Totals of the tensors by purpose."""
        split: dict[str, list[TensorInfo]] = {}
        for tensor in self.tensors:
            name = tensor.name.partition("/")[0] if self.kind is Kind.CHECKPOINT else "model"
            split.setdefault(name, []).append(tensor)
        return [
            TensorGroup(
                name,
                len(tensors),
                sum(tensor.numel for tensor in tensors),
                sum(tensor.nbytes for tensor in tensors),
                tuple(sorted({tensor.dtype for tensor in tensors})),
            )
            for name, tensors in sorted(split.items())
        ]

    def as_dict(self) -> dict[str, Any]:
        """Return what ``--json`` prints."""
        return {
            "path": str(self.path),
            "kind": self.kind.value,
            **self.facts,
            "groups": {group.name: group.as_dict() for group in self.groups},
            "tensors": {t.name: {"dtype": t.dtype, "shape": list(t.shape), "bytes": t.nbytes} for t in self.tensors},
            "files": dict(self.files),
        }


@dataclass(frozen=True)
class ListingEntry:
    """A checkpoint or a model in a run's directory."""

    path: Place  # its directory
    kind: Kind
    step: int | None  # optimizer steps taken; None if not known
    metric: float | None  # the metric it was saved with; None if there is none
    nbytes: int  # size of all its files in bytes
    problem: str | None  # why it is not complete; None if it is, judged by markers and sizes
    is_best: bool = False  # whether its metric is the best among the complete ones

    def as_dict(self) -> dict[str, Any]:
        """Return what ``--json`` prints."""
        return {
            "path": str(self.path),
            "kind": self.kind.value,
            "step": self.step,
            "metric": self.metric,
            "bytes": self.nbytes,
            "whole": self.problem is None,
            "problem": self.problem,
            "best": self.is_best,
        }


@dataclass(frozen=True)
class Listing:
    """The contents of a run or of a directory of checkpoints."""

    path: Place
    kind: Kind
    entries: tuple[ListingEntry, ...]  # checkpoints by step, then models
    unfinished: tuple[Place, ...]  # directories that are being written or were left incomplete
    set_aside: tuple[Place, ...] = ()  # damaged checkpoints that were renamed when a run went back to an earlier one
    greater_is_better: bool | None = None  # whether a greater metric is better; None: there are no metrics
    recorded: bool = True  # whether that is recorded in a checkpoint; otherwise it is assumed

    def as_dict(self) -> dict[str, Any]:
        """Return what ``--json`` prints."""
        return {
            "path": str(self.path),
            "kind": self.kind.value,
            "entries": [entry.as_dict() for entry in self.entries],
            "unfinished": [str(path) for path in self.unfinished],
            "set_aside": [str(path) for path in self.set_aside],
            "greater_is_better": self.greater_is_better,
            "greater_is_better_recorded": self.recorded,
        }


def inspect_path(path: str | Place) -> Contents | Listing:
    """Inspect a checkpoint, a directory of checkpoints, a run, a model's directory or a weight file; one process.

    Raises:
        CheckpointError: The path is none of these, or too damaged to list its contents.
    """
    path = as_place(path)
    kind = kind_of(path)
    try:
        if kind is Kind.CHECKPOINT:
            return _of_checkpoint(path)
        if kind in (Kind.MODEL, Kind.WEIGHTS):
            return _of_weights(path, kind)
        return _list(path, kind)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}.") from error


def _of_checkpoint(path: Place) -> Contents:
    index = read_index(path)
    tensors = tuple(_stored_run_by_run(name, entry) for name, entry in index.tensors.items())
    return Contents(path, Kind.CHECKPOINT, _facts(index), tensors, _files(path))


def _stored_run_by_run(name: str, entry: TensorEntry) -> TensorInfo:
    return TensorInfo(name, entry.dtype, entry.shape, entry.numel * dtype_of(entry).itemsize)


def _facts(index: Index) -> dict[str, Any]:
    return {
        "step": index.step,
        "world_size": index.world_size,
        "metric": index.metric,
        "greater_is_better": index.greater_is_better,
        "base": None if index.base is None else {**index.base.as_plain(), "quantisation": index.base.quantisation},
        "versions": dict(index.versions),
        "policies": list(index.policies),
        "optimizer_groups": [dict(group) for group in index.groups],
        "values": dict(index.values),
    }


def _of_weights(path: Place, kind: Kind) -> Contents:
    assert isinstance(path, Path), "of an object store only checkpoints are read"
    adapter = path / ADAPTER_NAME
    stored = WeightFiles(adapter if adapter.exists() else path).tensors
    tensors = tuple(
        TensorInfo(name, dtype_name(one.dtype), one.shape, prod(one.shape) * one.dtype.itemsize)
        for name, one in stored.items()
    )
    facts: dict[str, Any] = {}
    config = path / "config.json"
    if config.exists():
        try:
            values = rules.mapping(read_json(config), "it")
            facts = {name: values[name] for name in ("model_type", "architectures", "dtype") if name in values}
        except ValueError as error:
            raise CheckpointError(f"{config} cannot be read: {error}.") from error
    return Contents(path, kind, facts, tensors, _files(path))


def _list(path: Place, kind: Kind) -> Listing:
    directory = path / CHECKPOINTS_NAME if kind is Kind.RUN else path
    ranking = rank_by_metric(find_completions(directory))
    best = ranking.paths[:1]
    entries = [_checkpoint_entry(found, is_best=found in best) for found in checkpoints_in(directory)]
    unfinished = unfinished_in(directory)
    if kind is Kind.RUN:
        unfinished += unfinished_in(path)
        entries += [
            ListingEntry(found, Kind.MODEL, None, None, sum(_files(found).values()), _problem_of_model(found))
            for found in models_in(path)
        ]
    greater = ranking.greater_is_better if best else None
    aside = tuple(set_aside_in(directory))
    return Listing(path, kind, tuple(entries), tuple(unfinished), aside, greater, ranking.recorded)


def _checkpoint_entry(path: Place, *, is_best: bool) -> ListingEntry:
    nbytes = sum(_files(path).values())
    try:
        done = check_completion(path)
    except CheckpointError as error:
        return ListingEntry(path, Kind.CHECKPOINT, int(path.name.split("-")[1].split(".")[0]), None, nbytes, str(error))
    return ListingEntry(path, Kind.CHECKPOINT, done.step, done.metric, nbytes, None, is_best)


def _problem_of_model(path: Place) -> str | None:
    assert isinstance(path, Path), "of an object store only checkpoints are read"
    adapter = path / ADAPTER_NAME
    try:
        WeightFiles(adapter if adapter.exists() else path)
    except CheckpointError as error:
        return str(error)
    return None


def _files(path: Place) -> dict[str, int]:
    """Return the sizes of a file or of a directory's files, including a checkpoint's ``model/``."""
    if isinstance(path, ObjectPath):
        return backend_of(path).sizes(path)
    if path.is_file():
        return {path.name: path.stat().st_size}
    found = [*path.iterdir(), *(path / "model").glob("*")]
    return {str(file.relative_to(path)): file.stat().st_size for file in sorted(found) if file.is_file()}
