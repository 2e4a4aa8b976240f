"""A directory of checkpoints on disk: names, which of them are whole, the lock, and which are kept.

::

    checkpoints/
      step-00000100/            whole: complete.json is there and agrees with what lies beside it
        shard-00000-of-00002.safetensors, …, index.json, model/, complete.json (written last)
      step-00000200.tmp/        being written, or left by a killed writer; or on its way to be deleted
      step-00000100.old/        being replaced by a new one of the same step
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
"""Where the small files lie: whatever else an export needs beside the tensors."""
_LEFTOVER = re.compile(r"(step-\d{8,})\.(tmp|old)")


def step_directory(directory: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return directory / f"step-{step:08d}"


@dataclass(frozen=True)
class Completion:
    """What ``complete.json`` says.

    Attributes:
        step: Optimizer steps taken.
        metric: What ``keep_best`` compares; None when it was not given.
        index_sha256: Hash of the index file.
        files: Size in bytes of each other file, by its path inside the checkpoint.
        serial: Its number among those saved in its directory: who goes back to an earlier step makes checkpoints that
            are newer than those of later steps.
        greater_is_better: Whether the greater metric is the better one; None: not recorded, by an earlier version.
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
        """Small files of which the size only is known."""
        return [name for name in self.files if name.startswith(_SMALL) and name not in self.sha256]


def parse_completion(text: str) -> Completion:
    """What a ``complete.json`` says; facts that a later version added are left out.

    Raises:
        ValueError, TypeError, AttributeError: It is not of this format.
    """
    known = {one.name for one in fields(Completion)}
    return Completion(**{name: value for name, value in json.loads(text).items() if name in known})


def write_completion(path: Path, step: int, metric: float | None, *, greater_is_better: bool | None = None) -> None:
    """Mark a checkpoint as whole, after everything else in it is on the disk; on one rank.

    Args:
        path: Its directory while it is written, beside those that were saved before.
        step: Optimizer steps taken.
        metric: What ``keep_best`` compares.
        greater_is_better: Which way it does.

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
    """Check that a checkpoint is whole, without reading tensors; any rank.

    Args:
        path: The checkpoint's directory.

    Raises:
        CheckpointError: It is not there or not whole; the message says what is wrong with it, and what to use instead.
    """
    try:
        return check_completion(path)
    except CheckpointError as error:
        raise CheckpointError(f"{error} {instead_of(path)}") from error


def instead_of(path: Path) -> str:
    """What to use where a checkpoint turned out to be damaged: a sentence with the newest other whole one; any rank."""
    others: list[Path] = []
    with contextlib.suppress(OSError):
        others = [other for other in find_checkpoints(path.parent) if other.name != path.name]
    if not others:
        return f"There is no other whole checkpoint in {path.parent}."
    newest = others[-1]
    return (
        f"The newest other whole one is {newest}. To use it, give resume={newest} to fullshard train, "
        f"path={str(newest)!r} to Checkpoints.load or load_checkpoint, or {newest} to fullshard export."
    )


def check_completion(path: Path) -> Completion:
    """As :func:`read_completion`, and the message says only what is wrong.

    Raises:
        CheckpointError: It is not there or not whole.
    """
    if not path.is_dir():
        raise CheckpointError(f"{path} is no directory; a checkpoint is one, such as step-00000100.")
    try:
        done = parse_completion((path / COMPLETE_NAME).read_text(encoding="utf-8"))
        wrong = [
            f"{name} is missing" if found == "no" else f"{name} has {found} bytes instead of {size:,}"
            for name, size in done.files.items()
            if (found := size_of(path / name)) != f"{size:,}"
        ]
        if not wrong and _sha256(path / INDEX_NAME) != done.index_sha256:
            wrong = [f"{INDEX_NAME} is not the one that was written"]
    except FileNotFoundError as error:
        name = Path(str(error.filename)).name
        raise CheckpointError(
            f"{path} is not a whole checkpoint: {name} is missing. It is written last: the save was cut off, or the "
            "directory was copied in part, or it is something else."
        ) from error
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path / COMPLETE_NAME} cannot be read: {error}.") from error
    if wrong:
        raise CheckpointError(f"{path} is not whole: {'; '.join(wrong[:5])}.")
    return done


def changed_small_files(path: Path, done: Completion) -> Iterator[tuple[str, str]]:
    """The small files of a checkpoint that are not as they were written, though of their size; any rank.

    Yields:
        Name, and both hashes in words. Those that are missing or of another size are :func:`check_completion`'s.

    Raises:
        OSError: One cannot be read.
    """
    for name, written in done.sha256.items():
        if name in done.files and size_of(path / name) == f"{done.files[name]:,}":
            found = _sha256(path / name)
            if found != written:
                yield name, f"has SHA-256 {found}; written was {written}"


def size_of(path: Path) -> str:
    """Size of a file in bytes as text, ``no`` where there is none."""
    return f"{path.stat().st_size:,}" if path.is_file() else "no"


def read_index(path: Path) -> Index:
    """The index of a whole checkpoint; any rank.

    Args:
        path: The checkpoint's directory.

    Raises:
        CheckpointError: It is not whole, or its index cannot be read.
    """
    read_completion(path)
    try:
        text = (path / INDEX_NAME).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path / INDEX_NAME} cannot be read: {error}.") from error
    return parse_index(text, path / INDEX_NAME)


def find_checkpoints(directory: Path) -> list[Path]:
    """The whole checkpoints in a directory in the order they were saved in; torn ones are left out. Any rank.

    Args:
        directory: Where ``step-…`` directories lie; it need not exist.
    """
    return [path for _, path in find_completions(directory)]


def find_completions(directory: Path) -> list[tuple[Completion, Path]]:
    """As :func:`find_checkpoints`, each with what it says of itself."""
    found: list[tuple[int, int, Path, Completion]] = []
    if not directory.is_dir():
        return []
    for path in directory.iterdir():
        # A writer that was killed between two renames leaves the old one under this name only.
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
    """Checkpoints by their metric.

    Attributes:
        paths: The best first, of equal ones the later step first.
        greater_is_better: Which way.
        recorded: Whether one of them says so; else it is an assumption.
    """

    paths: tuple[Path, ...]
    greater_is_better: bool
    recorded: bool


def rank_by_metric(found: Sequence[tuple[Completion, Path]], *, otherwise: bool = True) -> Ranking:
    """Order checkpoints by their metric, those without one left out.

    Which way is what the newest of them says. Those that say the other way hold another metric, and are left out; those
    of an earlier version, which say nothing, are taken with the others.

    Args:
        found: In the order they were saved in.
        otherwise: Whether the greater is the better where none of them says it.
    """
    judged = [(done, path, done.metric) for done, path in found if done.metric is not None]
    said = [done.greater_is_better for done, _, _ in judged if done.greater_is_better is not None]
    greater = said[-1] if said else otherwise
    alike = [one for one in judged if one[0].greater_is_better in (None, greater)]
    alike.sort(key=lambda one: (one[2] if greater else -one[2], one[0].step), reverse=True)
    return Ranking(tuple(path for _, path, _ in alike), greater, bool(said))


def clear_leftovers(directory: Path) -> None:
    """Bring back what a killed writer was replacing, and delete what it was writing; on one rank, under the lock.

    Raises:
        OSError: The file system refused.
    """
    names = {match[1] for path in directory.iterdir() if (match := _LEFTOVER.fullmatch(path.name))}
    for name in sorted(names):
        recover(directory / name)


@dataclass(frozen=True)
class Keep:
    """Which checkpoints outlive the next one.

    Attributes:
        last: How many of the newest; None: all.
        best: How many of those with the best metric beside them.
        greater_is_better: Which way metrics are compared where no checkpoint says it.
    """

    last: int | None = 2
    best: int = 0
    greater_is_better: bool = True


def prune(directory: Path, keep: Keep, *, newest: Path) -> None:
    """Delete whole checkpoints that are neither among the last nor among the best; on one rank, under the lock.

    Args:
        directory: Where they lie.
        keep: How many of those saved last are kept, and of the best ones beside them.
        newest: The one just committed, which is kept in any case.

    Raises:
        OSError: The file system refused.
    """
    if keep.last is None:
        return
    found = find_completions(directory)
    best = rank_by_metric(found, otherwise=keep.greater_is_better).paths[: keep.best]
    kept = {newest, *(path for _, path in found[max(0, len(found) - keep.last) :]), *best}
    for _, path in found:
        if path not in kept:
            remove_checkpoint(path)


def remove_checkpoint(path: Path) -> None:
    """Delete a checkpoint: at once no longer found, then its files; on one rank.

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
    """Keeps two runs from writing into one directory; held by one rank until it is released or the process dies."""

    def __init__(self, directory: Path) -> None:
        """Take the lock, making the directory.

        Raises:
            CheckpointError: Another run holds it, or the file system refused.
        """
        path = directory / LOCK_NAME
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            file = next((one for one in (directory, *directory.parents) if one.is_file()), None)
            problem = f"{error}. Mend its permissions" if file is None else f"{file} is a file. Move it"
            raise CheckpointError(
                f"Checkpoints cannot be written to {directory}: {problem} or choose another directory."
            ) from error
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.read(self._descriptor, 4096).decode(errors="replace").strip() or "not known"
            os.close(self._descriptor)
            raise CheckpointError(
                f"Another run is writing to {directory} (process {holder}); two would delete each other's checkpoints. "
                "Wait for its end, stop it, or choose another directory."
            ) from error
        except OSError as error:
            warnings.warn(
                f"The file system of {directory} has no locks ({error}): nothing keeps a second run from writing here.",
                stacklevel=2,
            )
        with contextlib.suppress(OSError):  # for people only: a full disk must not keep a lock from being taken
            os.ftruncate(self._descriptor, 0)
            os.write(self._descriptor, f"{os.getpid()} on {socket.gethostname()}\n".encode())

    def release(self) -> None:
        """Let the next run in."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
