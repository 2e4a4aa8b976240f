"""What checkpoints need of the place where they are; a disk and an object store each do it in their own way.

Everything else in this room works on names, bytes and indexes, and does not know which of the two it is on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from fullshard.storage.disk import Disk
from fullshard.storage.object_path import ObjectPath
from fullshard.storage.object_store import ObjectStore


class Ranges(Protocol):
    """An open file or object that is read by byte ranges."""

    @property
    def identity(self) -> tuple[Any, ...]:
        """What distinguishes this content from another one under the same name."""
        ...

    @property
    def size(self) -> int:
        """Bytes in it."""
        ...

    def read_into(self, view: memoryview, position: int) -> int:
        """Read into ``view`` from a position on; returns the number of bytes, which may be fewer, 0 at the end."""
        ...


class NewFile(Protocol):
    """A file or object that is being written; it appears, or is durable, with :meth:`finish`."""

    def write_at(self, position: int, data: memoryview) -> None:
        """Write all of ``data``; to an object store only where the last write ended."""
        ...

    def finish(self) -> None:
        """Make everything durable."""
        ...

    def close(self) -> None:
        """Release it; without :meth:`finish` before, what was written is incomplete or gone."""
        ...


class Lock(Protocol):
    """Keeps two runs from writing to one directory."""

    def require_held(self) -> None:
        """Raise a CheckpointError if another run has taken it; before each save."""
        ...

    def require_commit(self) -> None:
        """Raise a CheckpointError if another run has taken it; right before a commit."""
        ...

    def release(self) -> None:
        """Release it."""
        ...


class Backend(Protocol):
    """The operations; where a method says nothing of ranks, any rank may call it. All but the first raise on failure.

    ``OSError`` means that a disk refused; :class:`~fullshard.errors.StoreError` that an object store did.
    """

    @property
    def fetches(self) -> int:
        """Blocks to read at the same time: more than one where each read waits for a network."""
        ...

    @property
    def look_seconds(self) -> float:
        """First interval of rank 0's polling for other ranks' parts."""
        ...

    def read(self, path: Any, nbytes: int) -> bytes:
        """Read a whole file of at most ``nbytes``; a larger one, or one that is no file, is a ValueError."""
        ...

    def sha256(self, path: Any) -> str:
        """Return the SHA-256 of a file."""
        ...

    def opened(self, path: Any, known: tuple[Any, ...] | None) -> AbstractContextManager[Ranges]:
        """Open a file to read ranges; ``known`` is its identity, if it was opened before."""
        ...

    def create(self, path: Any, nbytes: int) -> NewFile:
        """Start a new file of ``nbytes``."""
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
        """Copy the files of a small directory, if there is one, to an existing directory on a disk."""
        ...

    def names(self, directory: Any, step: int, attempt: str) -> tuple[Any, Any]:
        """Return where a checkpoint is written, and where it is when it is complete."""
        ...

    def begin(self, temporary: Any) -> None:
        """Make the empty place that all ranks write a checkpoint to, after leftovers are cleared; on rank 0."""
        ...

    def small_files(self, path: Any) -> AbstractContextManager[Path]:
        """Give a directory on a disk for small files, which are in the new directory ``path`` at the end."""
        ...

    def finish(self, temporary: Any, final: Any, mark: Callable[[], None]) -> None:
        """Make a checkpoint appear: everything durable, and ``mark`` (which writes ``complete.json``) last."""
        ...

    def remove(self, path: Any) -> None:
        """Delete a checkpoint, such that part of one is never taken for one; on rank 0, under the lock."""
        ...

    def discard(self, temporary: Any) -> None:
        """Delete what a failed save has written; on rank 0."""
        ...

    def set_aside_text(self, path: Any) -> str:
        """Return what :meth:`set_aside` would do to a checkpoint now, as what follows "is"."""
        ...

    def set_aside(self, path: Any) -> Any:
        """Make a damaged checkpoint no candidate any more, and return what marks it; on rank 0, under the lock."""
        ...

    def clear_leftovers(self, directory: Any) -> None:
        """Delete what killed writers left, and restore what they were replacing; on rank 0, under the lock."""
        ...

    def candidates(self, directory: Any) -> list[Any]:
        """Return everything under a checkpoint's own name, complete or damaged, by step."""
        ...

    def is_candidate(self, path: Any) -> bool:
        """Return whether a path is still one: another process may have deleted it since it was listed."""
        ...

    def unfinished(self, directory: Any) -> list[Any]:
        """Return what is being written, replaced or deleted, or was left so by a killed process."""
        ...

    def aside(self, directory: Any) -> list[Any]:
        """Return damaged checkpoints that were set aside."""
        ...

    def lock(self, directory: Any) -> Lock:
        """Make the directory and lock it; on rank 0."""
        ...


_DISK: Backend = Disk()
_OBJECTS: Backend = ObjectStore()


def backend_of(path: Path | ObjectPath) -> Backend:
    """Return what reads and writes at a path."""
    return _OBJECTS if isinstance(path, ObjectPath) else _DISK
