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
from dataclasses import asdict, dataclass
from pathlib import Path

from fullshard.checkpoint.atomic import delete, fsync, recover, sibling, write_text
from fullshard.checkpoint.index import INDEX_NAME, Index, parse_index
from fullshard.errors import CheckpointError

COMPLETE_NAME = "complete.json"
LOCK_NAME = "lock"
_STEP = re.compile(r"step-(\d{8,})")
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
    """

    step: int
    metric: float | None
    index_sha256: str
    files: dict[str, int]
    serial: int = 0


def write_completion(path: Path, step: int, metric: float | None) -> None:
    """Mark a checkpoint as whole, after everything else in it is on the disk; on one rank.

    Args:
        path: Its directory while it is written, beside those that were saved before.
        step: Optimizer steps taken.
        metric: What ``keep_best`` compares.

    Raises:
        CheckpointError, OSError: The file system refused.
    """
    files = {
        str(found.relative_to(path)): found.stat().st_size
        for found in sorted(path.rglob("*"))
        if found.is_file() and found.name != COMPLETE_NAME
    }
    serial = 1 + max((read_completion(other).serial for other in find_checkpoints(path.parent)), default=0)
    done = Completion(step, metric, _sha256(path / INDEX_NAME), files, serial)
    write_text(path / COMPLETE_NAME, json.dumps(asdict(done), indent=1) + "\n")


def read_completion(path: Path) -> Completion:
    """Check that a checkpoint is whole, without reading tensors; any rank.

    Args:
        path: The checkpoint's directory.

    Raises:
        CheckpointError: It is not there or not whole; the message says what is wrong with it.
    """
    if not path.is_dir():
        raise CheckpointError(f"{path} is no directory; a checkpoint is one, such as step-00000100.")
    try:
        done = Completion(**json.loads((path / COMPLETE_NAME).read_text(encoding="utf-8")))
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
            "directory was copied in part, or it is something else. Use another checkpoint."
        ) from error
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path / COMPLETE_NAME} cannot be read: {error}. Use another checkpoint.") from error
    if wrong:
        raise CheckpointError(f"{path} is not whole: {'; '.join(wrong[:5])}. Use another checkpoint.")
    return done


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
    found: list[tuple[int, int, Path]] = []
    if not directory.is_dir():
        return []
    for path in directory.iterdir():
        # A writer that was killed between two renames leaves the old one under this name only.
        name = path.name.removesuffix(".old")
        match = _STEP.fullmatch(name)
        if match is None or (name != path.name and (directory / name).exists()):
            continue
        with contextlib.suppress(CheckpointError):
            found.append((read_completion(path).serial, int(match[1]), path))
    return [path for _, _, path in sorted(found)]


def clear_leftovers(directory: Path) -> None:
    """Bring back what a killed writer was replacing, and delete what it was writing; on one rank, under the lock.

    Raises:
        OSError: The file system refused.
    """
    names = {match[1] for path in directory.iterdir() if (match := _LEFTOVER.fullmatch(path.name))}
    for name in sorted(names):
        recover(directory / name)


def prune(directory: Path, *, keep_last: int | None, keep_best: int, newest: Path) -> None:
    """Delete whole checkpoints that are neither among the last nor among the best; on one rank, under the lock.

    Args:
        directory: Where they lie.
        keep_last: How many of those saved last are kept; None: all.
        keep_best: How many of the highest metrics are kept beside them; of equal ones the later.
        newest: The one just committed, which is kept in any case.

    Raises:
        OSError: The file system refused.
    """
    if keep_last is None:
        return
    found = [(read_completion(path), path) for path in find_checkpoints(directory)]
    kept = {newest, *(path for _, path in found[len(found) - keep_last :])}
    judged = [(done.metric, done.step, path) for done, path in found if done.metric is not None]
    kept |= {path for _, _, path in sorted(judged, key=lambda one: one[:2], reverse=True)[:keep_best]}
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
            raise CheckpointError(
                f"Checkpoints cannot be written to {directory}: {error}. Mend its permissions or choose another one."
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
