"""``complete.json``, which is written last and marks a checkpoint as complete: sizes and hashes of its other files."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import isnan
from pathlib import Path
from typing import Annotated

from fullshard.errors import CheckpointError
from fullshard.file_names import stays_inside
from fullshard.state.storage.backend import backend_of
from fullshard.state.storage.index import INDEX_BOUNDS, INDEX_NAME, Index
from fullshard.state.storage.json_file import Bounds, parse_sealed, read_bounded, seal, sha256_of
from fullshard.state.storage.object_path import Place
from fullshard.state.storage.rules import Count, FileName, Metric, rule, shown

COMPLETE_NAME = "complete.json"
VERSION = 2
"""Version of its format; from 2 on it has a checksum of itself."""
_BOUNDS = Bounds(16 << 20, 200_000, 400_000)
"""Limits: one entry for each rank's file and each small file."""
_SMALL = "model/"
"""Directory of the small files that an export needs in addition to tensors."""
Sha256 = Annotated[str, rule("it must be 64 hex digits", re.compile("[0-9a-f]{64}").fullmatch)]


@dataclass(frozen=True)
class Completion:
    """The contents of ``complete.json``.

    Attributes:
        step: Optimizer steps taken.
        metric: The value that ``keep_best`` compares; None if none was given.
        index_sha256: SHA-256 of the index file.
        files: Size in bytes of each other file, by its path inside the checkpoint.
        serial: Position in the order of saving. Steps do not give that order: a run that resumed from an earlier
            step saves checkpoints that are newer than those of later steps.
        greater_is_better: Direction of the metric; None: not recorded, by an earlier version.
        sha256: Hash of each small file, by its path inside the checkpoint; earlier versions recorded none.
    """

    step: Count
    metric: Metric
    index_sha256: Sha256
    files: dict[FileName, Count]
    serial: Count = 0
    greater_is_better: bool | None = None
    sha256: dict[FileName, Sha256] = field(default_factory=dict)

    @property
    def unhashed(self) -> list[str]:
        """Small files of which only the size was recorded."""
        return [name for name in self.files if name.startswith(_SMALL) and name not in self.sha256]


def parse_completion(content: bytes) -> Completion:
    """Parse a ``complete.json``; fields that a later version added are ignored.

    Raises:
        ValueError: It is damaged, not of this format, or has values that no checkpoint has.
    """
    return parse_sealed(Completion, content, _BOUNDS, VERSION)


def completion_of(path: Place, index: Index) -> Completion:
    """Build the completion record after everything else in the checkpoint is on disk; on one rank.

    Args:
        path: Its directory while it is written.
        index: Its index, with its serial number.

    Raises:
        CheckpointError, OSError: The file system refused.
    """
    files = {name: size for name, size in backend_of(path).sizes(path).items() if name != COMPLETE_NAME}
    hashes = {name: sha256_of(path / name) for name in files if name.startswith(_SMALL)}
    serial, greater = index.serial or 0, index.greater_is_better
    return Completion(index.step, index.metric, sha256_of(path / INDEX_NAME), files, serial, greater, hashes)


def write_completion(path: Place, done: Completion) -> None:
    """Mark a checkpoint as complete; on one rank.

    Raises:
        CheckpointError: The file system or the store refused.
    """
    backend_of(path).write_text(path / COMPLETE_NAME, seal(json.dumps({"version": VERSION, **asdict(done)}, indent=1)))


def add_small_file(path: Place, name: str, text: str, *, metric: float | None, greater_is_better: bool | None) -> None:
    """Add a small file and a metric to a complete checkpoint, which remains complete throughout; on one rank.

    Raises:
        CheckpointError: It is not complete, or the file system refused.
    """
    done, content = check_completion(path), text.encode()
    if name in done.files:
        # Taken off the list while it is replaced: after a kill in between, its size would differ from the listed one.
        files, hashes = ({key: of[key] for key in of if key != name} for of in (done.files, done.sha256))
        done = replace(done, files=files, sha256=hashes)
        write_completion(path, done)
    backend_of(path).write_text(path / name, text)
    files = {**done.files, name: len(content)}
    hashes = {**done.sha256, name: hashlib.sha256(content).hexdigest()}
    metric = None if metric is None or isnan(metric) else metric
    write_completion(
        path, replace(done, metric=metric, greater_is_better=greater_is_better, files=files, sha256=hashes)
    )


def check_completion(path: Place) -> Completion:
    """Check that a checkpoint is complete, without reading tensors; any rank.

    Raises:
        CheckpointError: It does not exist or is not complete; the message names only the problem.
    """
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a directory; a checkpoint is a directory such as step-00000100.")
    file = path / COMPLETE_NAME
    try:
        done = parse_completion(read_bounded(file, _BOUNDS.nbytes))
        wrong = [f"{name} {text}" for name, text in changed_sizes(path, done)]
        file = path / INDEX_NAME
        if not wrong and hashlib.sha256(read_bounded(file, INDEX_BOUNDS.nbytes)).hexdigest() != done.index_sha256:
            wrong = [f"{INDEX_NAME} was changed after it was written"]
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path} is not a complete checkpoint: {file.name}, which is written last, is missing. The save was "
            "interrupted, only part of the directory was copied, or this is not a checkpoint."
        ) from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}.") from error
    if wrong:
        raise CheckpointError(f"{path} is not complete: {'; '.join(wrong[:5])}.")
    return done


def changed_sizes(path: Place, done: Completion) -> Iterator[tuple[str, str]]:
    """Find the files of a checkpoint that are missing or not as long as they were: name and what is wrong; any rank.

    Raises:
        OSError: One cannot be looked at.
    """
    sizes = backend_of(path).sizes(path, done.files)
    for name, size in done.files.items():
        if sizes.get(name) != size:
            yield name, f"has {sizes[name]:,} bytes, expected {size:,}" if name in sizes else "is missing"


def copy_small_files(path: Place, target: Path, left_out: Sequence[str] = ()) -> None:
    """Copy the small files of a checkpoint to an existing directory on a disk; one process.

    Raises:
        CheckpointError: A name would lead out of ``target``; nothing has been written.
        OSError: One cannot be read or written.
    """
    sizes = backend_of(path).sizes(path).items()
    found = {name.removeprefix(_SMALL): size for name, size in sizes if name.startswith(_SMALL)}
    for name in found:
        if not stays_inside(name):
            raise CheckpointError(
                f"{path} has a file named {shown(name)}, which would be written outside of {target}. Nothing was "
                "written. Delete it; no save of fullshard makes such a name."
            )
    for name, size in found.items():
        if name not in left_out:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            (target / name).write_bytes(read_bounded(path / f"{_SMALL}{name}", size))


def changed_small_files(path: Place, done: Completion) -> Iterator[tuple[str, str]]:
    """Find small files of a checkpoint that changed after they were written, with the same size; any rank.

    Yields:
        Name, and a text with both hashes. :func:`check_completion` finds missing files and those of another size.

    Raises:
        OSError: One cannot be read.
    """
    sizes = backend_of(path).sizes(path, done.sha256)
    for name, written in done.sha256.items():
        if name in done.files and sizes.get(name) == done.files[name]:
            found = sha256_of(path / name)
            if found != written:
                yield name, f"has SHA-256 {found}, expected {written}"
