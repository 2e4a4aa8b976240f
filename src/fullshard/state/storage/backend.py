"""The interface of the places that hold checkpoints: a disk or an object store.

All other modules here work on names, bytes and indexes, and do not know which of the two is behind them. A disk commits
a checkpoint by a rename, a store by its last object.

For a new kind of store write no backend but a file system of fsspec: ``info``, ``find``, ``cat_file``, ``pipe_file``
(with ``mode="create"``), ``rm_file``, and ``open(…, "wb")`` whose file can ``discard()``. Registered with fsspec, its
URLs work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from fullshard.state.storage.disk import Disk
from fullshard.state.storage.object_path import Listed, ObjectPath
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

    def content(self) -> bytes:
        """Read all of it, of one moment: in an object store another process may replace the object meanwhile."""
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

    fetches: int
    """Number of blocks to read at the same time: more than one where each read waits for a network."""

    def opened(self, path: Any, known: tuple[Any, ...] | None) -> AbstractContextManager[Ranges]:
        """Open a regular file for reading; ``known`` is its identity if it was opened before."""
        ...

    def create(self, path: Any, nbytes: int) -> NewFile:
        """Start writing a new file of ``nbytes``."""
        ...

    def write_text(self, path: Any, text: str) -> None:
        """Replace a small file, atomically and durably."""
        ...

    def sizes(self, path: Any, names: Iterable[str] | None = None) -> dict[str, int]:
        """Return the sizes of the files ``names`` of a checkpoint that exist, by path relative to it.

        None lists it: its own files and those in ``model/``. A file that cannot be looked at is an error, because a
        save records by this what it vouches for.
        """
        ...

    def names(self, directory: Any, step: int, attempt: str) -> tuple[Any, Any]:
        """Return the path to write a checkpoint to, and its path once complete; the same one in an object store."""
        ...

    def begin(self, temporary: Any) -> AbstractContextManager[Path]:
        """Clear leftovers and create the empty place that all ranks write a checkpoint to; on rank 0, under the lock.

        Yields a directory on a disk; the files written there end up in the checkpoint's ``model/``.
        """
        ...

    def finish(self, temporary: Any, final: Any, mark: Callable[[], None]) -> None:
        """Commit a checkpoint: everything durable, and ``mark`` (which writes ``complete.json``) last."""
        ...

    def remove(self, path: Any) -> None:
        """Delete a checkpoint, complete or not, so that a kill never leaves a part that looks like one; on rank 0."""
        ...

    def set_aside_text(self, path: Any) -> str:
        """Return what :meth:`set_aside` does to a checkpoint, as a phrase that follows "is"."""
        ...

    def set_aside(self, path: Any) -> Any:
        """Exclude a damaged checkpoint from the candidates, and return what marks it; on rank 0, under the lock."""
        ...

    def listed(self, directory: Any) -> Listed:
        """List the checkpoints in a directory, which need not exist."""
        ...

    def lock(self, directory: Any) -> Lock:
        """Create the directory, take its lock, and clear what killed writers left; on rank 0."""
        ...


_DISK: Backend = Disk()
_OBJECTS: Backend = ObjectStore()


def backend_of(path: Path | ObjectPath) -> Backend:
    """Return the backend for a path."""
    return _OBJECTS if isinstance(path, ObjectPath) else _DISK
