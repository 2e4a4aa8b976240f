"""What is at a path: its kind, what a checkpoint, a model or a weight file holds, and whether it is undamaged."""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum
from math import prod
from typing import Any

import torch

from fullshard.directory_lock import CHECKPOINTS_NAME as CHECKPOINTS_NAME
from fullshard.errors import CheckpointError, StoreError
from fullshard.state.storage import rules
from fullshard.state.storage.backend import backend_of
from fullshard.state.storage.completion import (
    COMPLETE_NAME,
    Completion,
    changed_sizes,
    changed_small_files,
    check_completion,
    parse_completion,
)
from fullshard.state.storage.index import INDEX_BOUNDS, INDEX_NAME, Index, PieceEntry, TensorEntry, parse_index
from fullshard.state.storage.json_file import SMALL, read_bounded, read_json
from fullshard.state.storage.object_path import Listed, Place, as_place, is_url, on_disk, relative
from fullshard.state.storage.safetensors_file import STAGING_BYTES, SafetensorsFile
from fullshard.state.storage.shard_file import BLOCK_BYTES, crc_of, dtype_name, dtype_of, is_shard_name
from fullshard.state.storage.store import (
    contradiction,
    find_completions,
    instead_of,
    rank_by_metric,
    read_index,
    survey,
)
from fullshard.state.storage.weight_files import (
    ADAPTER_NAME,
    INDEX_SUFFIX,
    WEIGHTS_IN_DIRECTORY,
    WEIGHTS_INDEX_NAME,
    WeightFiles,
    read_weight_map,
)

FINISHED_NAME = "finished.json"
"""File in the directory of the checkpoints that marks a finished run."""

MODEL_WEIGHTS = (*WEIGHTS_IN_DIRECTORY, ADAPTER_NAME)
"""A directory that holds one of these files is a model's."""

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", INDEX_SUFFIX)
"""Suffixes of weight files."""

_UNFINISHED = re.compile(r"best.*\.(tmp|old|next|last|lost)")
_RUN_FILES = ("metrics.jsonl", "summary.json")


class Kind(Enum):
    """The kind of a path."""

    CHECKPOINT = "checkpoint"
    CHECKPOINTS = "checkpoints"
    RUN = "run"
    MODEL = "model"
    WEIGHTS = "weights"


def kind_of(path: Place) -> Kind:
    """Return the kind of a directory or file, judged by file names only; any rank.

    Raises:
        CheckpointError: The path does not exist, or is of no known kind; in an object store only checkpoints and
            directories of them are known.
    """
    if not path.exists():
        raise CheckpointError(
            f"There is no {path}. Give a run's directory, its {CHECKPOINTS_NAME} directory, one checkpoint (step-…), a "
            "model's directory or a weight file."
        )
    if path.is_file():
        if on_disk(path).name.endswith(WEIGHT_SUFFIXES):
            return Kind.WEIGHTS
        raise CheckpointError(
            f"{path} is not a weight file (*{', *'.join(WEIGHT_SUFFIXES)}). Give one, or a directory: a run's, its "
            f"{CHECKPOINTS_NAME}, one checkpoint (step-…) or a model's{_around(path)}."
        )
    if re.match(r"step-\d{8,}", path.name):
        return Kind.CHECKPOINT
    try:
        names = {one.name for one in path.iterdir()}
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}.") from error
    if names & {COMPLETE_NAME, INDEX_NAME}:
        return Kind.CHECKPOINT
    checkpoints = path.name == CHECKPOINTS_NAME or any(name.startswith("step-") for name in names)
    if checkpoints and is_url(path):
        return Kind.CHECKPOINTS  # of an object store nothing else is read, whatever files lie beside them
    signs = {
        Kind.RUN: names & {CHECKPOINTS_NAME, *_RUN_FILES},
        Kind.MODEL: names & {*MODEL_WEIGHTS},
        Kind.CHECKPOINTS: checkpoints,
    }
    found = next((kind for kind, sign in signs.items() if sign), None)
    if found is Kind.CHECKPOINTS:
        return found
    on_disk(path)
    if found is None:
        raise CheckpointError(
            f"{path} is nothing that fullshard writes or reads: it has no {CHECKPOINTS_NAME} or step-… directory, and "
            f"no weights ({', '.join(MODEL_WEIGHTS)})."
        )
    return found


def _around(file: Place) -> str:
    """Return a hint at the directory that the user may have meant by naming a file in it."""
    with contextlib.suppress(CheckpointError):
        return f"; it is in {file.parent}, a {kind_of(file.parent).value.removesuffix('s')}"
    return ""


def _models_in(run: Place) -> list[Place]:
    """Return the models that a run has written: the best ones and, at its end, the one in its directory; any rank."""
    kept = sorted(path for path in run.glob("best*") if path.is_dir() and not _UNFINISHED.fullmatch(path.name))
    return [path for path in [*kept, run] if any((path / name).exists() for name in MODEL_WEIGHTS)]


def _listed(path: Place, kind: Kind) -> tuple[Listed, list[Place]]:
    """List the checkpoints of a run or of a directory of checkpoints, and the run's models."""
    if kind is not Kind.RUN:
        return backend_of(path).listed(path), []
    # Of the run's directory itself, only what is unfinished counts: best models that are being replaced.
    listed, own = (backend_of(one).listed(one) for one in (path / CHECKPOINTS_NAME, path))
    return replace(listed, unfinished=[*listed.unfinished, *own.unfinished]), _models_in(path)


def _weights_of(path: Place) -> WeightFiles:
    """Open a weight file, or a directory's weights: an adapter's, else the model's."""
    adapter = on_disk(path) / ADAPTER_NAME
    return WeightFiles(adapter if adapter.exists() else on_disk(path))


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
    tensors = tuple(
        TensorInfo(name, one.dtype, one.shape, one.numel * dtype_of(one).itemsize)
        for name, one in index.tensors.items()
    )
    facts = {
        "step": index.step,
        "world_size": index.world_size,
        "metric": index.metric,
        "greater_is_better": index.greater_is_better,
        "base": None if index.base is None else {**asdict(index.base), "quantisation": index.base.quantisation},
        "versions": dict(index.versions),
        "policies": list(index.policies),
        "optimizer_groups": [dict(group) for group in index.groups],
        "values": dict(index.values),
    }
    return Contents(path, Kind.CHECKPOINT, facts, tensors, backend_of(path).sizes(path))


def _of_weights(path: Place, kind: Kind) -> Contents:
    tensors = tuple(
        TensorInfo(name, dtype_name(one.dtype), one.shape, prod(one.shape) * one.dtype.itemsize)
        for name, one in _weights_of(path).tensors.items()
    )
    facts: dict[str, Any] = {}
    config = path / "config.json"
    if config.exists():
        try:
            values = rules.check(dict[str, Any], read_json(config), "it")
            facts = {name: values[name] for name in ("model_type", "architectures", "dtype") if name in values}
        except ValueError as error:
            raise CheckpointError(f"{config} cannot be read: {error}.") from error
    return Contents(path, kind, facts, tensors, backend_of(path).sizes(path))


def _list(path: Place, kind: Kind) -> Listing:
    directory = path / CHECKPOINTS_NAME if kind is Kind.RUN else path
    ranking = rank_by_metric(find_completions(directory))
    best = ranking.paths[:1]
    listed, models = _listed(path, kind)
    entries = [_checkpoint_entry(found, is_best=found in best) for found in listed.candidates]
    entries += [
        ListingEntry(found, Kind.MODEL, None, None, _nbytes(found), _problem_of_model(found)) for found in models
    ]
    greater = ranking.greater_is_better if best else None
    aside = tuple(listed.aside)
    return Listing(path, kind, tuple(entries), tuple(listed.unfinished), aside, greater, ranking.recorded)


def _checkpoint_entry(path: Place, *, is_best: bool) -> ListingEntry:
    nbytes = _nbytes(path)
    try:
        done = check_completion(path)
    except CheckpointError as error:
        return ListingEntry(path, Kind.CHECKPOINT, int(path.name.split("-")[1].split(".")[0]), None, nbytes, str(error))
    return ListingEntry(path, Kind.CHECKPOINT, done.step, done.metric, nbytes, None, is_best)


def _problem_of_model(path: Place) -> str | None:
    try:
        _weights_of(path)
    except CheckpointError as error:
        return str(error)
    return None


def _nbytes(path: Place, suffixes: str | tuple[str, ...] = "") -> int:
    """Return the bytes of a file, or of a directory's files with certain suffixes; 0 if it was deleted meanwhile."""
    with contextlib.suppress(OSError):
        return sum(size for name, size in backend_of(path).sizes(path).items() if name.endswith(suffixes))
    return 0


Progress = Callable[[int, int], None]
"""Called with the bytes read so far and the total bytes."""


@dataclass(frozen=True)
class Problem:
    """One problem found by verification."""

    file: str  # the file, relative to the path that was checked
    text: str  # the problem
    tensor: str | None = None  # name of the damaged tensor, if known
    start: int | None = None  # first damaged byte of the file, if known
    stop: int | None = None  # the byte just past the damage

    def as_dict(self) -> dict[str, Any]:
        """Return what ``--json`` prints."""
        return dict(vars(self))


@dataclass(frozen=True)
class VerifyResult:
    """Result of verifying one checkpoint, model or file."""

    path: Place
    kind: Kind
    checksums: int  # number of blocks compared with their checksums; 0: only the structure was checked
    tensors: int  # number of tensors, as far as known
    nbytes: int  # bytes of tensors that were read
    problems: tuple[Problem, ...]  # all problems
    # small files of a checkpoint of an earlier version, which recorded no checksums of them
    unhashed: tuple[str, ...] = ()
    base: Mapping[str, str] | None = None  # the quantised base model outside the checkpoint; None: all weights are here

    def as_dict(self) -> dict[str, Any]:
        """Return what ``--json`` prints."""
        return {
            "path": str(self.path),
            "kind": self.kind.value,
            "whole": not self.problems,
            "checked": "checksums" if self.checksums else "structure",
            "blocks": self.checksums,
            "tensors": self.tensors,
            "bytes": self.nbytes,
            "problems": [problem.as_dict() for problem in self.problems],
            "files_without_checksums": list(self.unhashed),
            "base": None if self.base is None else dict(self.base),
        }


@dataclass(frozen=True)
class Verification:
    """Results of verifying a path."""

    path: Place
    results: tuple[VerifyResult, ...]  # one for each checkpoint, model or file there
    notes: tuple[str, ...]  # what was not verified, and why

    @property
    def problems(self) -> int:
        """Number of problems."""
        return sum(len(result.problems) for result in self.results)

    def as_dict(self) -> dict[str, Any]:
        """Return what ``--json`` prints."""
        checked = [result.as_dict() for result in self.results]
        return {"path": str(self.path), "whole": not self.problems, "checked": checked, "notes": list(self.notes)}


def verify(path: str | Place, progress: Progress = lambda done, total: None) -> Verification:
    """Read everything at a path and compare it with what was written; one process.

    Args:
        path: A checkpoint, a directory of checkpoints, a run, a model's directory or a weight file; a URL of one of
            the first two.
        progress: Called after each block.

    Raises:
        CheckpointError: There is nothing to verify.
    """
    path = as_place(path)
    kind = kind_of(path)
    work: list[tuple[Place, Kind]] = [(path, kind)]
    notes: list[str] = []
    if kind in (Kind.RUN, Kind.CHECKPOINTS):
        listed, models = _listed(path, kind)
        work = [(found, Kind.CHECKPOINT) for found in listed.candidates] + [(found, Kind.MODEL) for found in models]
        if not work and not listed.unfinished:
            raise CheckpointError(f"{path} has no checkpoint and no model yet: there is nothing to verify.")
        notes += [f"{one} is being written or deleted, or was left by a killed process" for one in listed.unfinished]
        notes += [f"{one} was damaged and set aside by resume=previous, and is not verified" for one in listed.aside]
    sizes = [_nbytes(found, WEIGHT_SUFFIXES[:-1]) for found, _ in work]  # an estimate of what will be read
    results, done = [], 0
    for (found, what), size in zip(work, sizes, strict=True):
        throughput = _Throughput(progress, done, sum(sizes))
        result = _verify_one(found, what, throughput)
        if result.problems and not found.exists():
            notes.append(f"{found} was deleted while it was being verified")
        else:
            results.append(result)
        done += size
        progress(done, sum(sizes))
    notes += _what_resumes(path, kind, results)
    return Verification(path, tuple(results), tuple(notes))


def _what_resumes(path: Place, kind: Kind, results: Sequence[VerifyResult]) -> list[str]:
    """Return what a resuming run would raise about damage in the newest checkpoint, or what to use instead."""
    if kind in (Kind.RUN, Kind.CHECKPOINTS):
        try:
            survey(path / CHECKPOINTS_NAME if kind is Kind.RUN else path, parse_newest=True).newest()
        except CheckpointError as error:
            return [f"a run does not resume: {error}"]
    elif kind is Kind.CHECKPOINT and any(result.problems for result in results):
        return [instead_of(path)]
    return []


class _Throughput:
    """Counts the bytes read for one result, and reports progress."""

    def __init__(self, progress: Progress, before: int, total: int) -> None:
        self.nbytes = 0
        self.blocks = 0
        self._progress = progress
        self._before = before
        self._total = total

    def add(self, nbytes: int) -> None:
        """Count one block."""
        self.nbytes += nbytes
        self.blocks += 1
        self._progress(min(self._before + self.nbytes, self._total), self._total)


def _verify_one(path: Place, kind: Kind, throughput: _Throughput) -> VerifyResult:
    if kind is Kind.CHECKPOINT:
        return _verify_checkpoint(path, throughput)
    if path.is_file() and is_shard_name(path.name) and (path.parent / INDEX_NAME).is_file():
        return _verify_shard(path, throughput)
    return _verify_weights(path, kind, throughput)


def _verify_checkpoint(path: Place, throughput: _Throughput) -> VerifyResult:
    """Verify a sharded checkpoint: marker, sizes, index, headers, small files, and every block's checksum."""
    problems: list[Problem] = []
    done = _check_marker(path, problems)
    if done is not None:
        problems += _check_hashes(path, done)
    reported = {problem.file for problem in problems}
    problems += [problem for problem in _check_json(path / "model", path) if problem.file not in reported]
    unhashed = () if done is None else tuple(done.unhashed)
    index = _check_index(path, done, problems)
    if index is None:
        # Headers can be checked without an index.
        for file in sorted(path.glob("*.safetensors")):
            _open(file, path, problems)
        return VerifyResult(path, Kind.CHECKPOINT, 0, 0, 0, tuple(problems), unhashed)
    missing = {problem.file for problem in problems}
    names = sorted({piece.file for entry in index.tensors.values() for piece in entry.pieces})
    opened = {
        name: _open(path / name, path, problems) for name in names if (path / name).exists() or name not in missing
    }
    problems += _check_files({name: file for name, file in opened.items() if file is not None}, index, throughput)
    base = None if index.base is None else index.base.facts
    return VerifyResult(
        path, Kind.CHECKPOINT, throughput.blocks, len(index.tensors), throughput.nbytes, tuple(problems), unhashed, base
    )


def _verify_shard(path: Place, throughput: _Throughput) -> VerifyResult:
    """Verify one rank's file of a checkpoint by the index next to it, and nothing else of the checkpoint."""
    top, problems = path.parent, list[Problem]()
    done = _check_marker(top, problems)
    index = _check_index(top, done, problems)
    problems = [problem for problem in problems if problem.file in (path.name, INDEX_NAME, COMPLETE_NAME)]
    file = _open(path, top, problems)
    if index is not None and file is not None:
        problems += _check_files({path.name: file}, index, throughput)
    tensors = 0 if file is None else len(file.tensors)
    return VerifyResult(path, Kind.WEIGHTS, throughput.blocks, tensors, throughput.nbytes, tuple(problems))


def _check_hashes(path: Place, done: Completion) -> Iterator[Problem]:
    """Check the small files whose hashes were recorded."""
    try:
        for name, text in changed_small_files(path, done):
            yield Problem(name, text)
    except OSError as error:
        yield Problem("model", f"cannot be read: {error}")


def _check_marker(path: Place, problems: list[Problem]) -> Completion | None:
    """Check the marker, and the sizes of the files it lists."""
    try:
        done = parse_completion(read_bounded(path / COMPLETE_NAME, SMALL.nbytes))
    except FileNotFoundError:
        problems.append(
            Problem(
                COMPLETE_NAME, "is missing; it is written last: the save was interrupted, or not everything was copied"
            )
        )
        return None
    except (OSError, ValueError) as error:
        problems.append(Problem(COMPLETE_NAME, f"cannot be read: {error}"))
        return None
    problems += [Problem(name, text) for name, text in changed_sizes(path, done)]
    return done


def _check_index(path: Place, done: Completion | None, problems: list[Problem]) -> Index | None:
    """Check the index's hash, that it can be parsed, and that its pieces cover the tensors."""
    file = path / INDEX_NAME
    try:
        content = read_bounded(file, INDEX_BOUNDS.nbytes)
    except (OSError, ValueError) as error:
        if not any(problem.file == INDEX_NAME for problem in problems):
            problems.append(Problem(INDEX_NAME, f"cannot be read: {error}"))
        return None
    found = hashlib.sha256(content).hexdigest()
    if done is not None and found != done.index_sha256:
        problems.append(Problem(INDEX_NAME, f"has SHA-256 {found}, expected {done.index_sha256}"))
    try:
        index = parse_index(content, file)
        wrong = None if done is None else contradiction(index, done)
        if wrong is not None:
            problems.append(Problem(INDEX_NAME, wrong))
        return index
    except CheckpointError as error:
        problems.append(Problem(INDEX_NAME, _without(str(error), file)))
        return None


def _open(file: Place, top: Place, problems: list[Problem]) -> SafetensorsFile | None:
    """Open a file; if its header is wrong, add that to ``problems``."""
    try:
        return SafetensorsFile(file)
    except StoreError:
        raise
    except CheckpointError as error:
        problems.append(Problem(relative(file, top), _without(str(error), file)))
        return None


def _check_files(files: Mapping[str, SafetensorsFile], index: Index, throughput: _Throughput) -> Iterator[Problem]:
    """Check every run that the index lists in ``files``, by name, and that they contain no other tensors."""
    for name, entry in index.tensors.items():
        for piece in entry.pieces:
            if piece.file in files:
                yield from _check_piece(files[piece.file], name, entry, piece, throughput)
    for file_name, file in files.items():
        for name in file.tensors:
            entry = index.tensors.get(name)
            if entry is None or all(piece.file != file_name for piece in entry.pieces):
                yield Problem(file_name, f"contains {name}, which the index does not list in it", name)


def _check_piece(
    file: SafetensorsFile, name: str, entry: TensorEntry, piece: PieceEntry, throughput: _Throughput
) -> Iterator[Problem]:
    """Check one run of one tensor: its entry in the file against the index, then its blocks."""
    stored = file.tensors.get(name)
    if stored is None:
        yield Problem(piece.file, f"does not contain {name}, which the index lists in it", name)
        return
    numel = piece.stop - piece.start
    if stored.shape != (numel,) or dtype_name(stored.dtype) != entry.dtype:
        yield Problem(
            piece.file,
            f"contains {name} as {dtype_name(stored.dtype)} {stored.shape}; the index lists {entry.dtype} ({numel},)",
            name,
        )
        return
    itemsize = stored.dtype.itemsize
    per_block = BLOCK_BYTES // itemsize
    blocks = -(-numel // per_block)
    if blocks != len(piece.crcs):
        yield Problem(INDEX_NAME, f"has {len(piece.crcs)} checksums for the {blocks} blocks of {name}", name)
        return
    for number, written in enumerate(piece.crcs):
        low = number * per_block
        block = torch.empty(min(per_block, numel - low), dtype=stored.dtype)
        start = stored.offset + low * itemsize
        where = (name, start, start + block.nbytes)
        try:
            file.read(name, low, block)
        except StoreError:
            raise
        except CheckpointError as error:
            yield Problem(piece.file, _without(str(error), file.path), *where)
            return
        throughput.add(block.nbytes)
        found = crc_of(block)
        if found != written:
            text = f"bytes {where[1]:,} to {where[2]:,} ({name}) have checksum {found:08x}, expected {written:08x}"
            yield Problem(piece.file, text, *where)


def _verify_weights(path: Place, kind: Kind, throughput: _Throughput) -> VerifyResult:
    """Verify files without checksums: headers, their index, and that every byte can be read."""
    problems = list(_check_json(path, path)) if path.is_dir() else []
    try:
        files = _weights_of(path)
    except CheckpointError as error:
        return VerifyResult(path, kind, 0, 0, throughput.nbytes, (*problems, *_every_problem(path, error)))
    for name, stored in files.tensors.items():
        numel, step = prod(stored.shape), STAGING_BYTES // stored.dtype.itemsize
        try:
            for low in range(0, numel, step):
                block = torch.empty(min(step, numel - low), dtype=stored.dtype)
                files.read(name, low, block)
                throughput.add(block.nbytes)
        except CheckpointError as error:
            problems.append(Problem(path.name, _without(str(error), path), name))
    return VerifyResult(path, kind, 0, len(files.tensors), throughput.nbytes, tuple(problems))


def _every_problem(path: Place, first: CheckpointError) -> list[Problem]:
    """Return the problems of each file of a model that could not be opened because of the first one."""
    top = path if path.is_dir() else path.parent
    index = path / WEIGHTS_INDEX_NAME if path.is_dir() else path
    problems: list[Problem] = []
    named: set[str] | None = set()
    if index.is_file() and index.name.endswith(INDEX_SUFFIX):
        try:
            named = set(read_weight_map(index).values())
        except CheckpointError:
            named = None
        missing = sorted(name for name in named or () if not (top / name).is_file())
        problems += [Problem(name, f"is missing; {index.name} names it") for name in missing]
    for file in sorted(top.glob("*.safetensors")) if path.is_dir() or named else ():
        _open(file, top, problems)
    if named is None or not problems:
        problems.insert(0, Problem(path.name, _without(str(first), path)))
    return problems


def _check_json(directory: Place, top: Place) -> Iterator[Problem]:
    """Check that small files named ``*.json`` are JSON."""
    for file in sorted(directory.glob("*.json")):
        if file.name.endswith(INDEX_SUFFIX):
            continue  # verified with the weights
        try:
            read_json(file)
        except (OSError, ValueError) as error:
            yield Problem(relative(file, top), f"is not JSON: {error}")


def _without(text: str, file: Place) -> str:
    """Return a message without the path that it begins with."""
    return text.removeprefix(str(file)).lstrip(": /")
