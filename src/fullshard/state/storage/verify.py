"""Verification of checkpoints, models and weight files: lists all problems and where they are."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from fullshard.errors import CheckpointError, StoreError
from fullshard.file_names import stays_inside
from fullshard.state.storage.backend import backend_of
from fullshard.state.storage.completion import COMPLETE_NAME, Completion, changed_small_files, parse_completion
from fullshard.state.storage.index import INDEX_BOUNDS, INDEX_NAME, Index, PieceEntry, TensorEntry, parse_index
from fullshard.state.storage.json_file import SMALL, read_bounded, read_json
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
from fullshard.state.storage.object_path import ObjectPath, Place, as_place, relative
from fullshard.state.storage.safetensors_reader import STAGING_BYTES, SafetensorsFile
from fullshard.state.storage.shard_file import BLOCK_BYTES, crc_of, dtype_name, is_shard_name
from fullshard.state.storage.store import contradiction, instead_of, survey
from fullshard.state.storage.weight_files import INDEX_SUFFIX, WeightFiles
from fullshard.state.storage.weights_writer import WEIGHTS_INDEX_NAME

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
    unfinished: list[Place] = []
    directory: Place | None = None
    if kind in (Kind.RUN, Kind.CHECKPOINTS):
        directory = path / CHECKPOINTS_NAME if kind is Kind.RUN else path
        work = [(found, Kind.CHECKPOINT) for found in checkpoints_in(directory)]
        unfinished = unfinished_in(directory)
        if kind is Kind.RUN:
            work += [(found, Kind.MODEL) for found in models_in(path)]
            unfinished += unfinished_in(path)
        if not work and not unfinished:
            raise CheckpointError(f"{path} has no checkpoint and no model yet: there is nothing to verify.")
    notes = [f"{found} is being written or deleted, or was left by a killed process" for found in unfinished]
    if directory is not None:
        aside = set_aside_in(directory)
        notes += [f"{found} was damaged and set aside by resume=previous, and is not verified" for found in aside]
    sizes = [_weight_bytes(found) for found, _ in work]
    results, done = [], 0
    for (found, what), size in zip(work, sizes, strict=True):
        meter = _Meter(progress, done, sum(sizes))
        result = _verify_one(found, what, meter)
        if result.problems and not found.exists():
            notes.append(f"{found} was deleted while it was being verified")
        else:
            results.append(result)
        done += size
        progress(done, sum(sizes))
    notes += _what_resumes(path, kind, directory, results)
    return Verification(path, tuple(results), tuple(notes))


def _what_resumes(path: Place, kind: Kind, directory: Place | None, results: Sequence[VerifyResult]) -> list[str]:
    """Return what a resuming run would raise about damage in the newest checkpoint, or what to use instead."""
    if directory is not None:
        try:
            survey(directory, parse_newest=True).newest()
        except CheckpointError as error:
            return [f"a run does not resume: {error}"]
    elif kind is Kind.CHECKPOINT and any(result.problems for result in results):
        return [instead_of(path)]
    return []


def _weight_bytes(path: Place) -> int:
    """Estimate the bytes that will be read; only of a directory's own files."""
    suffixes = (".safetensors", ".bin", ".pt", ".pth")
    if isinstance(path, ObjectPath):
        return sum(size for name, size in path.sizes().items() if name.endswith(suffixes))
    files = path.iterdir() if path.is_dir() else [path]
    try:
        return sum(file.stat().st_size for file in files if file.suffix in suffixes)
    except OSError:
        return 0


class _Meter:
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


def _verify_one(path: Place, kind: Kind, meter: _Meter) -> VerifyResult:
    if kind is Kind.CHECKPOINT:
        return _verify_checkpoint(path, meter)
    if path.is_file() and is_shard_name(path.name) and (path.parent / INDEX_NAME).is_file():
        return _verify_shard(path, meter)
    return _verify_weights(path, kind, meter)


def _verify_checkpoint(path: Place, meter: _Meter) -> VerifyResult:
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
    problems += _check_files({name: file for name, file in opened.items() if file is not None}, index, meter)
    base = None if index.base is None else index.base.facts
    return VerifyResult(
        path, Kind.CHECKPOINT, meter.blocks, len(index.tensors), meter.nbytes, tuple(problems), unhashed, base
    )


def _verify_shard(path: Place, meter: _Meter) -> VerifyResult:
    """Verify one rank's file of a checkpoint by the index next to it, and nothing else of the checkpoint."""
    top, problems = path.parent, list[Problem]()
    done = _check_marker(top, problems)
    index = _check_index(top, done, problems)
    problems = [problem for problem in problems if problem.file in (path.name, INDEX_NAME, COMPLETE_NAME)]
    file = _open(path, top, problems)
    if index is not None and file is not None:
        problems += _check_files({path.name: file}, index, meter)
    tensors = 0 if file is None else len(file.tensors)
    return VerifyResult(path, Kind.WEIGHTS, meter.blocks, tensors, meter.nbytes, tuple(problems))


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
    sizes = backend_of(path).sizes_of(path, list(done.files))
    for name, size in done.files.items():
        found = sizes[name]
        if found is None:
            problems.append(Problem(name, f"is missing; expected {size:,} bytes"))
        elif found != size:
            problems.append(Problem(name, f"has {found:,} bytes, expected {size:,}"))
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


def _check_files(files: Mapping[str, SafetensorsFile], index: Index, meter: _Meter) -> Iterator[Problem]:
    """Check every run that the index lists in ``files``, by name, and that they contain no other tensors."""
    for name, entry in index.tensors.items():
        for piece in entry.pieces:
            if piece.file in files:
                yield from _check_piece(files[piece.file], name, entry, piece, meter)
    for file_name, file in files.items():
        for name in file.tensors:
            entry = index.tensors.get(name)
            if entry is None or all(piece.file != file_name for piece in entry.pieces):
                yield Problem(file_name, f"contains {name}, which the index does not list in it", name)


def _check_piece(
    file: SafetensorsFile, name: str, entry: TensorEntry, piece: PieceEntry, meter: _Meter
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
        meter.add(block.nbytes)
        found = crc_of(block)
        if found != written:
            text = f"bytes {where[1]:,} to {where[2]:,} ({name}) have checksum {found:08x}, expected {written:08x}"
            yield Problem(piece.file, text, *where)


def _verify_weights(path: Place, kind: Kind, meter: _Meter) -> VerifyResult:
    """Verify files without checksums: headers, their index, and that every byte can be read."""
    assert isinstance(path, Path), "of an object store only checkpoints are read"
    problems = list(_check_json(path, path)) if path.is_dir() else []
    adapter = path / ADAPTER_NAME
    try:
        files = WeightFiles(adapter if adapter.exists() else path)
    except CheckpointError as error:
        return VerifyResult(path, kind, 0, 0, meter.nbytes, (*problems, *_every_problem(path, error)))
    for name, stored in files.tensors.items():
        numel, step = prod(stored.shape), STAGING_BYTES // stored.dtype.itemsize
        try:
            for low in range(0, numel, step):
                block = torch.empty(min(step, numel - low), dtype=stored.dtype)
                files.read(name, low, block)
                meter.add(block.nbytes)
        except CheckpointError as error:
            problems.append(Problem(path.name, _without(str(error), path), name))
    return VerifyResult(path, kind, 0, len(files.tensors), meter.nbytes, tuple(problems))


def _every_problem(path: Place, first: CheckpointError) -> list[Problem]:
    """Return the problems of each file of a model that could not be opened because of the first one."""
    top = path if path.is_dir() else path.parent
    index = path / WEIGHTS_INDEX_NAME if path.is_dir() else path
    problems: list[Problem] = []
    named: set[str] | None = set()
    if index.is_file() and index.name.endswith(INDEX_SUFFIX):
        named = _named_files(index)
        missing = sorted(name for name in named or () if not (top / name).is_file())
        problems += [Problem(name, f"is missing; {index.name} names it") for name in missing]
    for file in sorted(top.glob("*.safetensors")) if path.is_dir() or named else ():
        _open(file, top, problems)
    if named is None or not problems:
        problems.insert(0, Problem(path.name, _without(str(first), path)))
    return problems


def _named_files(index: Place) -> set[str] | None:
    """Return the files next to it that an index names; None if it cannot be parsed."""
    try:
        return {name for name in map(str, read_json(index)["weight_map"].values()) if stays_inside(name)}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


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
