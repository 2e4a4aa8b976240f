"""A directory of checkpoints on disk: names, completeness, the lock, and which checkpoints are kept.

::

    checkpoints/
      step-00000100/            complete: complete.json exists and agrees with the other files
        shard-00000-of-00002.safetensors, …, index.json, model/, complete.json (written last)
      step-00000200.tmp/        being written, left by a killed writer, or being deleted
      step-00000100.old/        being replaced by a new checkpoint of the same step
      lock                      held by the run that writes here
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import socket
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from fullshard.errors import CheckpointError
from fullshard.storage.atomic import delete, fsync, recover, sibling, write_text
from fullshard.storage.index import INDEX_NAME, Index, parse_index

COMPLETE_NAME = "complete.json"
LOCK_NAME = "lock"
_STEP = re.compile(r"step-(\d{8,})")
_SMALL = "model/"
"""Directory of the small files that an export needs in addition to tensors."""
_LEFTOVER = re.compile(r"(step-\d{8,})\.(tmp|old)")


def step_directory(directory: Path, step: int) -> Path:
    """Return the directory of a step's checkpoint."""
    return directory / f"step-{step:08d}"


@dataclass(frozen=True)
class Completion:
    """The contents of ``complete.json``.

    Attributes:
        step: Optimizer steps taken.
        metric: The value that ``keep_best`` compares; None if none was given.
        index_sha256: SHA-256 of the index file.
        files: Size in bytes of each other file, by its path inside the checkpoint.
        serial: Its number in the order of saving. The step does not give that order: a run that resumed from an earlier
            step saves checkpoints that are newer than those of later steps.
        greater_is_better: Whether a greater metric is better; None: not recorded, by an earlier version.
        sha256: Hash of each small file, by its path inside the checkpoint; an earlier version recorded none.
    """

    step: int
    metric: float | None
    index_sha256: str
    files: dict[str, int]
    serial: int = 0
    greater_is_better: bool | None = None
    sha256: dict[str, str] = field(default_factory=dict)

    @property
    def unhashed(self) -> list[str]:
        """Small files of which only the size was recorded."""
        return [name for name in self.files if name.startswith(_SMALL) and name not in self.sha256]


def parse_completion(text: str) -> Completion:
    """Parse a ``complete.json``; fields that a later version added are ignored.

    Raises:
        ValueError, TypeError, AttributeError: The text is not of this format.
    """
    known = {one.name for one in fields(Completion)}
    return Completion(**{name: value for name, value in json.loads(text).items() if name in known})


def write_completion(path: Path, step: int, metric: float | None, *, greater_is_better: bool | None = None) -> None:
    """Mark a checkpoint as complete, after everything else in it is on disk; on one rank.

    Args:
        path: Its directory while it is written, next to the earlier checkpoints.
        step: Optimizer steps taken.
        metric: The value that ``keep_best`` compares.
        greater_is_better: Whether a greater metric is better.

    Raises:
        CheckpointError, OSError: The file system refused.
    """
    files = {
        str(found.relative_to(path)): found.stat().st_size
        for found in sorted(path.rglob("*"))
        if found.is_file() and found.name != COMPLETE_NAME
    }
    serial = 1 + max((other.serial for other, _ in find_completions(path.parent)), default=0)
    hashes = {name: _sha256(path / name) for name in files if name.startswith(_SMALL)}
    done = Completion(step, metric, _sha256(path / INDEX_NAME), files, serial, greater_is_better, hashes)
    write_text(path / COMPLETE_NAME, json.dumps(asdict(done), indent=1) + "\n")


def read_completion(path: Path) -> Completion:
    """Check that a checkpoint is complete, without reading tensors; any rank.

    Args:
        path: The checkpoint's directory.

    Raises:
        CheckpointError: It does not exist or is not complete; the message names the problem and what to use instead.
    """
    try:
        return check_completion(path)
    except CheckpointError as error:
        raise CheckpointError(f"{error} {instead_of(path)}") from error


def instead_of(path: Path) -> str:
    """Return a sentence that names the newest other complete checkpoint, for use instead of a damaged one; any rank."""
    others: list[Path] = []
    with contextlib.suppress(OSError):
        others = [other for other in find_checkpoints(path.parent) if other.name != path.name]
    if not others:
        return f"There is no other complete checkpoint in {path.parent}."
    newest = others[-1]
    return (
        f"The newest other complete one is {newest}. To use it, pass resume={newest} to fullshard train, "
        f"path={str(newest)!r} to Checkpoints.load or load_checkpoint, or {newest} to fullshard export."
    )


def check_completion(path: Path) -> Completion:
    """Check as :func:`read_completion` does; the message names only the problem.

    Raises:
        CheckpointError: It does not exist or is not complete.
    """
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a directory; a checkpoint is a directory such as step-00000100.")
    try:
        done = parse_completion((path / COMPLETE_NAME).read_text(encoding="utf-8"))
        wrong = [
            f"{name} is missing" if found == "no" else f"{name} has {found} bytes instead of {size:,}"
            for name, size in done.files.items()
            if (found := size_of(path / name)) != f"{size:,}"
        ]
        if not wrong and _sha256(path / INDEX_NAME) != done.index_sha256:
            wrong = [f"{INDEX_NAME} was changed after it was written"]
    except FileNotFoundError as error:
        name = Path(str(error.filename)).name
        raise CheckpointError(
            f"{path} is not a complete checkpoint: {name}, which is written last, is missing. The save was "
            "interrupted, only part of the directory was copied, or it is something else."
        ) from error
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path / COMPLETE_NAME} cannot be read: {error}.") from error
    if wrong:
        raise CheckpointError(f"{path} is not complete: {'; '.join(wrong[:5])}.")
    return done


def changed_small_files(path: Path, done: Completion) -> Iterator[tuple[str, str]]:
    """Find small files of a checkpoint that changed after they were written, with the same size; any rank.

    Yields:
        Name, and a text with both hashes. :func:`check_completion` finds missing files and those of another size.

    Raises:
        OSError: One cannot be read.
    """
    for name, written in done.sha256.items():
        if name in done.files and size_of(path / name) == f"{done.files[name]:,}":
            found = _sha256(path / name)
            if found != written:
                yield name, f"has SHA-256 {found}, expected {written}"


def size_of(path: Path) -> str:
    """Return the size of a file in bytes as text, ``no`` if there is no such file."""
    return f"{path.stat().st_size:,}" if path.is_file() else "no"


def read_index(path: Path) -> Index:
    """Read the index of a complete checkpoint; any rank.

    Args:
        path: The checkpoint's directory.

    Raises:
        CheckpointError: It is not complete, or its index cannot be read.
    """
    read_completion(path)
    try:
        text = (path / INDEX_NAME).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path / INDEX_NAME} cannot be read: {error}.") from error
    return parse_index(text, path / INDEX_NAME)


def find_checkpoints(directory: Path) -> list[Path]:
    """Return the complete checkpoints in a directory, in the order they were saved in; any rank.

    Args:
        directory: The directory of ``step-…`` directories; it need not exist.
    """
    return [path for _, path in find_completions(directory)]


def find_completions(directory: Path) -> list[tuple[Completion, Path]]:
    """Return the same as :func:`find_checkpoints`, each with its ``complete.json``."""
    found: list[tuple[int, int, Path, Completion]] = []
    if not directory.is_dir():
        return []
    for path in directory.iterdir():
        # A writer killed between the two renames of a commit leaves the old checkpoint under this name only.
        name = path.name.removesuffix(".old")
        match = _STEP.fullmatch(name)
        if match is None or (name != path.name and (directory / name).exists()):
            continue
        with contextlib.suppress(CheckpointError):
            done = check_completion(path)
            found.append((done.serial, int(match[1]), path, done))
    return [(done, path) for _, _, path, done in sorted(found, key=lambda one: one[:3])]


@dataclass(frozen=True)
class Ranking:
    """Checkpoints ordered by their metric.

    Attributes:
        paths: The best first; among equal ones the later step first.
        greater_is_better: Whether a greater metric is better.
        recorded: Whether that is recorded in a checkpoint; otherwise it is assumed.
    """

    paths: tuple[Path, ...]
    greater_is_better: bool
    recorded: bool


def rank_by_metric(found: Sequence[tuple[Completion, Path]], *, otherwise: bool = True) -> Ranking:
    """Order checkpoints by their metric; those without one are left out.

    The newest checkpoint that records the direction determines it. Checkpoints that record the other direction have a
    different metric and are left out; those of an earlier version, which record none, are included.

    Args:
        found: Checkpoints in the order they were saved in.
        otherwise: Whether a greater metric is better if no checkpoint records it.
    """
    judged = [(done, path, done.metric) for done, path in found if done.metric is not None]
    recorded = [done.greater_is_better for done, _, _ in judged if done.greater_is_better is not None]
    greater = recorded[-1] if recorded else otherwise
    comparable = [one for one in judged if one[0].greater_is_better in (None, greater)]
    comparable.sort(key=lambda one: (one[2] if greater else -one[2], one[0].step), reverse=True)
    return Ranking(tuple(path for _, path, _ in comparable), greater, bool(recorded))


def clear_leftovers(directory: Path) -> None:
    """Restore what a killed writer was replacing, and delete what it was writing; on one rank, under the lock.

    Raises:
        OSError: The file system refused.
    """
    names = {match[1] for path in directory.iterdir() if (match := _LEFTOVER.fullmatch(path.name))}
    for name in sorted(names):
        recover(directory / name)


@dataclass(frozen=True)
class Keep:
    """Which checkpoints are kept after the next one is saved.

    Attributes:
        last: Number of newest checkpoints; None: all.
        best: Number of checkpoints with the best metric in addition to those.
        greater_is_better: Whether a greater metric is better if no checkpoint records it.
    """

    last: int | None = 2
    best: int = 0
    greater_is_better: bool = True


def prune(directory: Path, keep: Keep, *, newest: Path) -> None:
    """Delete complete checkpoints that are neither among the last nor the best; on one rank, under the lock.

    Args:
        directory: The directory of checkpoints.
        keep: How many are kept.
        newest: The one just committed, which is always kept.

    Raises:
        OSError: The file system refused.
    """
    if keep.last is None:
        return
    found = find_completions(directory)
    best = rank_by_metric(found, otherwise=keep.greater_is_better).paths[: keep.best]
    # max(0, …): with fewer checkpoints than keep.last, a negative start would drop the first ones.
    kept = {newest, *(path for _, path in found[max(0, len(found) - keep.last) :]), *best}
    for _, path in found:
        if path not in kept:
            remove_checkpoint(path)


def remove_checkpoint(path: Path) -> None:
    """Delete a checkpoint; on one rank. It is renamed first, so that a kill never leaves part of one under its name.

    Raises:
        OSError: The file system refused.
    """
    doomed = sibling(path, "tmp")
    if os.path.lexists(doomed):
        delete(doomed)
    os.rename(path, doomed)
    fsync(path.parent)
    delete(doomed)


class DirectoryLock:
    """Keeps two runs from writing into one directory; held by one rank until released or until the process dies."""

    def __init__(self, directory: Path) -> None:
        """Make the directory and take the lock.

        Raises:
            CheckpointError: Another run holds it, or the file system refused.
        """
        path = directory / LOCK_NAME
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            file = next((one for one in (directory, *directory.parents) if one.is_file()), None)
            problem = f"{error}. Check that you can write to it" if file is None else f"{file} is a file. Move it"
            raise CheckpointError(
                f"Checkpoints cannot be written to {directory}: {problem} or choose another directory."
            ) from error
        # flock, not the file's existence, is the lock: the kernel releases it however the process dies. A forked child
        # inherits it and keeps it until it ends, too.
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.read(self._descriptor, 4096).decode(errors="replace").strip() or "unknown"
            os.close(self._descriptor)
            raise CheckpointError(
                f"Another run is writing to {directory} (process {holder}); two runs would delete each other's "
                "checkpoints. Wait until it finishes, stop it, or choose another directory."
            ) from error
        except OSError as error:
            warnings.warn(
                f"The file system of {directory} does not support locks ({error}): a second run could write to it too.",
                stacklevel=2,
            )
        with contextlib.suppress(OSError):  # only for the message above: a full disk must not prevent taking the lock
            os.ftruncate(self._descriptor, 0)
            os.write(self._descriptor, f"{os.getpid()} on {socket.gethostname()}\n".encode())

    def release(self) -> None:
        """Release the lock."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
