"""Checkpoints on a disk that all ranks share: one rename makes a checkpoint appear, and one makes it disappear."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from fullshard.state.storage.atomic import commit, delete, fsync, recover, sibling, write_text
from fullshard.state.storage.lock import DirectoryLock

_CHECKPOINT = re.compile(r"step-\d{8,}(\.old)?")
_LEFTOVER = re.compile(r"(step-[0-9]{8,})\.(tmp|old)")
_UNFINISHED = re.compile(r"(step-\d{8,}|best.*)\.(tmp|old|next|last|lost)")
_SET_ASIDE = re.compile(r"step-\d{8,}\.damaged(\.\d+)?")


class Disk:
    """The directory itself is the interface (names, renames, fsync); see :mod:`fullshard.state.storage.backend`."""

    fetches = 1
    look_seconds = 0.02

    def read(self, path: Path, nbytes: int) -> bytes:
        """Read a regular file; a pipe is refused, because reading it would block."""
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise ValueError("it is not a regular file")
            if status.st_size > nbytes:
                raise ValueError(f"it has {status.st_size:,} bytes; at most {nbytes:,} are read")
            with os.fdopen(os.dup(descriptor), "rb") as file:
                return file.read(nbytes)
        finally:
            os.close(descriptor)

    def sha256(self, path: Path) -> str:
        """Hash a file."""
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    @contextlib.contextmanager
    def opened(self, path: Path, known: tuple[int, ...] | None) -> Iterator[_OpenFile]:
        """Open the file; if it was replaced in between, the identity differs."""
        del known
        descriptor = os.open(path, os.O_RDONLY)
        try:
            yield _OpenFile(descriptor)
        finally:
            os.close(descriptor)

    def create(self, path: Path, nbytes: int) -> _NewFile:
        """Create the file at its full length."""
        return _NewFile(path, nbytes)

    def write_text(self, path: Path, text: str) -> None:
        """Replace a small file."""
        write_text(path, text)

    def delete_file(self, path: Path) -> None:
        """Delete a file."""
        os.unlink(path)

    def sizes(self, path: Path) -> dict[str, int]:
        """List a directory with its subdirectories."""
        return {str(one.relative_to(path)): one.stat().st_size for one in sorted(path.rglob("*")) if one.is_file()}

    def sizes_of(self, path: Path, names: Sequence[str]) -> Mapping[str, int | None]:
        """Look at each file."""
        return {name: _size_of(path / name) for name in names}

    def copy_directory(self, source: Path, target: Path, left_out: Sequence[str]) -> None:
        """Copy a directory with its subdirectories."""
        if source.is_dir():
            ignored = lambda _, names: [name for name in names if name in left_out]  # noqa: E731
            shutil.copytree(source, target, dirs_exist_ok=True, ignore=ignored)

    def names(self, directory: Path, step: int, attempt: str) -> tuple[Path, Path]:
        """Return the temporary and the final name; the commit is a rename."""
        del attempt
        final = directory / f"step-{step:08d}"
        return sibling(final, "tmp"), final

    def begin(self, temporary: Path) -> None:
        """Make the directory."""
        temporary.mkdir()

    @contextlib.contextmanager
    def small_files(self, path: Path) -> Iterator[Path]:
        """Create the directory and give it to the caller to write into."""
        path.mkdir()
        yield path

    def finish(self, temporary: Path, final: Path, mark: Callable[[], None]) -> None:
        """Mark the checkpoint under its temporary name, then rename it."""
        mark()
        commit(temporary, final)

    def remove(self, path: Path) -> None:
        """Rename a checkpoint, then delete it: a kill never leaves part of one under its name."""
        doomed = sibling(path, "tmp")
        if os.path.lexists(doomed):
            delete(doomed)
        os.rename(path, doomed)
        fsync(path.parent)
        delete(doomed)

    def discard(self, temporary: Path) -> None:
        """Delete the directory."""
        shutil.rmtree(temporary)

    def set_aside_text(self, path: Path) -> str:
        """Return the name it gets."""
        return f"renamed to {_aside_name(path).name}"

    def set_aside(self, path: Path) -> Path:
        """Rename the directory."""
        name = _aside_name(path)
        os.rename(path, name)
        fsync(path.parent)
        return name

    def clear_leftovers(self, directory: Path) -> None:
        """Restore directories that were being replaced, and delete those that were being written."""
        names = {match[1] for path in directory.iterdir() if (match := _LEFTOVER.fullmatch(path.name))}
        for name in sorted(names):
            recover(directory / name)

    def candidates(self, directory: Path) -> list[Path]:
        """Return ``step-…`` directories; one that was renamed to ``.old`` counts if no other has taken its place."""
        # Not only directories: a dangling link at the newest checkpoint must be reported as damage.
        names = {path.name for path in directory.iterdir()} if directory.is_dir() else set()
        return [
            directory / name
            for name in sorted(names, key=lambda name: (len(name.removesuffix(".old")), name))
            if _CHECKPOINT.fullmatch(name) and (not name.endswith(".old") or name.removesuffix(".old") not in names)
        ]

    def is_candidate(self, path: Path) -> bool:
        """Return False if it has been deleted or replaced."""
        name = path.name.removesuffix(".old")
        return os.path.lexists(path) and (name == path.name or not (path.parent / name).exists())

    def unfinished(self, directory: Path) -> list[Path]:
        """Return directories with the suffixes of unfinished work."""
        if not directory.is_dir():
            return []
        found = self.candidates(directory)
        return sorted(p for p in directory.iterdir() if p.is_dir() and _UNFINISHED.fullmatch(p.name) and p not in found)

    def aside(self, directory: Path) -> list[Path]:
        """Return directories with the suffix of damaged checkpoints."""
        found = directory.iterdir() if directory.is_dir() else ()
        return sorted(path for path in found if _SET_ASIDE.fullmatch(path.name))

    def lock(self, directory: Path) -> DirectoryLock:
        """Make the directory and lock it."""
        return DirectoryLock(directory)


class _OpenFile:
    """A file descriptor to read from."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        status = os.fstat(descriptor)
        self.size = status.st_size
        self.identity = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)

    def read_into(self, view: memoryview, position: int) -> int:
        """Read with one system call, which may return fewer bytes."""
        return os.preadv(self._descriptor, [view], position)


class _NewFile:
    """A file of its final length that is filled in any order."""

    def __init__(self, path: Path, nbytes: int) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        try:
            os.truncate(self._descriptor, nbytes)
        except BaseException:
            os.close(self._descriptor)
            raise

    def write_at(self, position: int, data: memoryview) -> None:
        """Write all of ``data``, repeating system calls that write less."""
        done = 0
        while done < len(data):
            done += os.pwrite(self._descriptor, data[done:], position + done)

    def finish(self) -> None:
        """Flush to disk."""
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


def _aside_name(path: Path) -> Path:
    names = (sibling(path, f"damaged{f'.{number}' if number else ''}") for number in itertools.count())
    return next(name for name in names if not os.path.lexists(name))


def _size_of(path: Path) -> int | None:
    try:
        return path.stat().st_size if path.is_file() else None
    except OSError:  # such as a name that is too long
        return None
