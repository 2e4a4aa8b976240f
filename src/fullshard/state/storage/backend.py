"""The interface of the places that hold checkpoints: a disk or an object store.

All other modules here work on names, bytes and indexes, and do not know which of the two is behind them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from fullshard.state.storage.disk import Disk
from fullshard.state.storage.object_path import ObjectPath
from fullshard.state.storage.object_store import ObjectStore


class Ranges(Protocol):
    """An open file or object that is read by byte ranges."""

    @property
    def identity(self) -> tuple[Any, ...]:
        """A value that changes when the content under this name is replaced."""
        ...

    @property
    def size(self) -> int:
        """Size in bytes."""
        ...

    def read_into(self, view: memoryview, position: int) -> int:
        """Read into ``view`` from a position on; returns the number of bytes read: perhaps fewer, 0 at the end."""
        ...


class NewFile(Protocol):
    """A file or object being written; :meth:`finish` makes it visible and durable."""

    def write_at(self, position: int, data: memoryview) -> None:
        """Write all of ``data``; in an object store, positions must be consecutive."""
        ...

    def finish(self) -> None:
        """Make everything durable."""
        ...

    def close(self) -> None:
        """Release the resource; without :meth:`finish` before, the content is incomplete or discarded."""
        ...


class Lock(Protocol):
    """A lock that keeps two runs from writing to one directory."""

    def require_held(self) -> None:
        """Raise a CheckpointError if another run has taken the lock; called before each save."""
        ...

    def require_commit(self) -> None:
        """Raise a CheckpointError if another run has taken the lock; called right before a commit."""
        ...

    def release(self) -> None:
        """Release the lock."""
        ...


class Backend(Protocol):
    """Operations on checkpoints. Any rank may call a method that names none. Methods raise on failure.

    The error is ``OSError`` from a disk, :class:`~fullshard.errors.StoreError` from an object store.
    """

    @property
    def fetches(self) -> int:
        """Number of blocks to read at the same time: more than one where each read waits for a network."""
        ...

    @property
    def look_seconds(self) -> float:
        """First interval of rank 0's polling for other ranks' parts, in seconds."""
        ...

    def read(self, path: Any, nbytes: int) -> bytes:
        """Read a complete file of at most ``nbytes``; raises ValueError if it is larger or not a file."""
        ...

    def sha256(self, path: Any) -> str:
        """Return the SHA-256 of a file."""
        ...

    def opened(self, path: Any, known: tuple[Any, ...] | None) -> AbstractContextManager[Ranges]:
        """Open a file for reading ranges; ``known`` is its identity if it was opened before."""
        ...

    def create(self, path: Any, nbytes: int) -> NewFile:
        """Start writing a new file of ``nbytes``."""
        ...

    def write_text(self, path: Any, text: str) -> None:
        """Replace a small file, atomically and durably."""
        ...

    def delete_file(self, path: Any) -> None:
        """Delete a file."""
        ...

    def sizes(self, path: Any) -> dict[str, int]:
        """List all files in a directory with their sizes, by relative path."""
        ...

    def sizes_of(self, path: Any, names: Sequence[str]) -> Mapping[str, int | None]:
        """Return the size of each named file of a directory, None where there is no such file."""
        ...

    def copy_directory(self, source: Any, target: Path, left_out: Sequence[str]) -> None:
        """Copy the files of a small directory, if it exists, to an existing directory on a disk."""
        ...

    def names(self, directory: Any, step: int, attempt: str) -> tuple[Any, Any]:
        """Return the path to write a checkpoint to, and its path once complete; the same one in an object store."""
        ...

    def begin(self, temporary: Any) -> None:
        """Clear leftovers and create the empty place that all ranks write a checkpoint to; on rank 0."""
        ...

    def small_files(self, path: Any) -> AbstractContextManager[Path]:
        """Provide a directory on a disk; the files written there end up in the new directory ``path``."""
        ...

    def finish(self, temporary: Any, final: Any, mark: Callable[[], None]) -> None:
        """Commit a checkpoint: everything durable, and ``mark`` (which writes ``complete.json``) last."""
        ...

    def remove(self, path: Any) -> None:
        """Delete a checkpoint so that a kill never leaves a part that looks like one; on rank 0, under the lock."""
        ...

    def discard(self, temporary: Any) -> None:
        """Delete what a failed save has written; on rank 0."""
        ...

    def set_aside_text(self, path: Any) -> str:
        """Return what :meth:`set_aside` does to a checkpoint, as a phrase that follows "is"."""
        ...

    def set_aside(self, path: Any) -> Any:
        """Exclude a damaged checkpoint from the candidates, and return what marks it; on rank 0, under the lock."""
        ...

    def clear_leftovers(self, directory: Any) -> None:
        """Delete what killed writers left, and restore what they were replacing; on rank 0, under the lock."""
        ...

    def candidates(self, directory: Any) -> list[Any]:
        """Return every path with a checkpoint's name, complete or damaged, by step."""
        ...

    def is_candidate(self, path: Any) -> bool:
        """Return False if another process has deleted the candidate since it was listed."""
        ...

    def unfinished(self, directory: Any) -> list[Any]:
        """Return paths that are being written, replaced or deleted, or that a killed process left in that state."""
        ...

    def aside(self, directory: Any) -> list[Any]:
        """Return damaged checkpoints that were set aside."""
        ...

    def lock(self, directory: Any) -> Lock:
        """Create the directory and take its lock; on rank 0."""
        ...


_DISK: Backend = Disk()
_OBJECTS: Backend = ObjectStore()


def backend_of(path: Path | ObjectPath) -> Backend:
    """Return the backend for a path."""
    return _OBJECTS if isinstance(path, ObjectPath) else _DISK
