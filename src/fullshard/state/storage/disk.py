"""Checkpoints on a disk that all ranks share: one rename makes a checkpoint appear, and one makes it disappear."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import logging
import os
import re
import socket
import stat
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from fullshard.directory_lock import LOCK_NAME, taken
from fullshard.errors import CheckpointError
from fullshard.state.storage.atomic import commit, delete, fsync, recover, sibling, write_text
from fullshard.state.storage.object_path import Listed

_log = logging.getLogger("fullshard")


class DirectoryLock:
    """Keeps two runs from writing into one directory; held by one rank until released or until the process dies.

    Two locks are held: that of the file ``lock``, which works on network file systems too, and that of the directory,
    which remains if somebody deletes the file. :meth:`require_held`, called before each save, covers file systems where
    only the first one works.
    """

    def __init__(self, directory: Path) -> None:
        """Make the directory and take both locks.

        Raises:
            CheckpointError: Another run holds one, or the file system refused.
        """
        self.directory = directory
        self._file = self._folder = -1
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._take()
        except OSError as error:
            self.release()
            file = next((one for one in (directory, *directory.parents) if one.is_file()), None)
            problem = f"{error}. Check that you can write to it" if file is None else f"{file} is a file. Move it"
            raise CheckpointError(
                f"Checkpoints cannot be written to {directory}: {problem} or choose another directory."
            ) from error
        except CheckpointError:
            self.release()
            raise

    def require_held(self) -> None:
        """Check the lock before a save; takes it again if its file was deleted.

        Raises:
            CheckpointError: Another run has taken it, or the directory does not exist any more.
        """
        if _is_at(self._file, self.directory / LOCK_NAME) and _is_at(self._folder, self.directory):
            return
        if not self.directory.is_dir():
            raise CheckpointError(
                f"{self.directory} was deleted or moved while this run was writing checkpoints to it. Put it back, or "
                "start the run again."
            )
        if not _is_at(self._folder, self.directory):
            self.release()
        try:
            self._take()
        except CheckpointError as error:
            raise CheckpointError(
                f"{self.directory / LOCK_NAME} was deleted while this run held it, and a second run has started: this "
                f"run writes no more checkpoints there. {error}"
            ) from error
        except OSError as error:
            raise CheckpointError(f"The lock of {self.directory} cannot be taken again: {error}.") from error
        _log.warning(
            "%s was deleted while this run held it, and was made again. It keeps a second run from writing to this "
            "directory: do not delete it while a run is under way.",
            self.directory / LOCK_NAME,
        )

    def require_commit(self) -> None:
        """Do nothing: the kernel keeps the lock as long as the process lives."""

    def release(self) -> None:
        """Release both locks."""
        self._drop_file()
        if self._folder >= 0:
            os.close(self._folder)
            self._folder = -1

    def _drop_file(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _take(self) -> None:
        """Lock the directory, unless it is locked, and the file.

        Raises:
            CheckpointError: Another run holds one.
            OSError: The file system refused.
        """
        if self._folder < 0:
            self._folder = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY)
            with contextlib.suppress(OSError):  # network file systems cannot lock directories; the file's lock remains
                self._lock(self._folder)
        path = self.directory / LOCK_NAME
        while not _is_at(self._file, path):  # somebody may delete the file between opening and locking it
            self._drop_file()
            self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                self._lock(self._file)
            except CheckpointError:
                self._drop_file()  # an open file that is not locked must not count as the lock
                raise
            except OSError as error:
                warnings.warn(
                    f"The file system of {self.directory} does not support locks ({error}): a second run could write "
                    "to it too.",
                    stacklevel=4,
                )
        with contextlib.suppress(OSError):  # only for messages: a full disk must not prevent taking the lock
            os.ftruncate(self._file, 0)
            os.write(self._file, f"{os.getpid()} on {socket.gethostname()}\n".encode())

    def _lock(self, descriptor: int) -> None:
        # flock, not the file's existence, is the lock: the kernel releases it however the process dies. A forked child
        # inherits it and keeps it until it ends, too.
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise taken(self.directory) from error


def _is_at(descriptor: int, path: Path) -> bool:
    """Return True if an open file is still the one at a path."""
    try:
        return descriptor >= 0 and os.path.samestat(os.fstat(descriptor), os.stat(path))
    except OSError:
        return False


_CHECKPOINT = re.compile(r"step-\d{8,}(\.old)?")
_LEFTOVER = re.compile(r"(step-[0-9]{8,})\.(tmp|old)")
_UNFINISHED = re.compile(r"(step-\d{8,}|best.*)\.(tmp|old|next|last|lost)")
_SET_ASIDE = re.compile(r"step-\d{8,}\.damaged(\.\d+)?")


class Disk:
    """The directory itself is the interface (names, renames, fsync); see :mod:`fullshard.state.storage.backend`."""

    fetches = 1

    @contextlib.contextmanager
    def opened(self, path: Path, known: tuple[int, ...] | None) -> Iterator[_OpenFile]:
        """Open the file; if it was replaced in between, the identity differs. Opening a pipe would block."""
        del known
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
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

    def sizes(self, path: Path, names: Iterable[str] | None = None) -> dict[str, int]:
        """Look at each name; a directory that may be entered but not listed is enough. Of a file, list itself."""
        if names is None:
            names = [path.name] if path.is_file() else sorted(_listed(path))
        top = path if path.is_dir() else path.parent
        return {name: size for name in names if (size := _size_of(top / name)) is not None}

    def names(self, directory: Path, step: int, attempt: str) -> tuple[Path, Path]:
        """Return the temporary and the final name; the commit is a rename."""
        del attempt
        final = directory / f"step-{step:08d}"
        return sibling(final, "tmp"), final

    @contextlib.contextmanager
    def begin(self, temporary: Path) -> Iterator[Path]:
        """Make the directories; the caller writes the small files where they stay."""
        self._clear_leftovers(temporary.parent)
        temporary.mkdir()
        (temporary / "model").mkdir()
        yield temporary / "model"

    def finish(self, temporary: Path, final: Path, mark: Callable[[], None]) -> None:
        """Mark the checkpoint under its temporary name, then rename it."""
        mark()
        commit(temporary, final)

    def remove(self, path: Path) -> None:
        """Rename a checkpoint, then delete it: a kill never leaves part of one under its name."""
        doomed = path
        if path.suffix != ".tmp":
            doomed = sibling(path, "tmp")
            if os.path.lexists(doomed):
                delete(doomed)
            os.rename(path, doomed)
            fsync(path.parent)
        delete(doomed)

    def set_aside_text(self, path: Path) -> str:
        """Return the name it gets."""
        return f"renamed to {_aside_name(path).name}"

    def set_aside(self, path: Path) -> Path:
        """Rename the directory."""
        name = _aside_name(path)
        os.rename(path, name)
        fsync(path.parent)
        return name

    def listed(self, directory: Path) -> Listed:
        """List by name; a directory that was renamed to ``.old`` is a candidate if no other has taken its place."""
        # Not only directories: a dangling link at the newest checkpoint must be reported as damage.
        names = {path.name for path in directory.iterdir()} if directory.is_dir() else set[str]()
        candidates = [
            name
            for name in sorted(names, key=lambda name: (len(name.removesuffix(".old")), name))
            if _CHECKPOINT.fullmatch(name) and (not name.endswith(".old") or name.removesuffix(".old") not in names)
        ]
        unfinished = [name for name in sorted(names) if _UNFINISHED.fullmatch(name) and name not in candidates]
        # os.path.isdir and not Path.is_dir: a link that cannot be followed is none, and hides no checkpoint.
        aside = [name for name in sorted(names) if _SET_ASIDE.fullmatch(name)]
        return Listed(
            [directory / name for name in candidates],
            [directory / name for name in unfinished if os.path.isdir(directory / name)],
            [directory / name for name in aside],
        )

    def lock(self, directory: Path) -> DirectoryLock:
        """Make the directory and lock it."""
        lock = DirectoryLock(directory)
        try:
            self._clear_leftovers(directory)
        except BaseException:
            lock.release()
            raise
        return lock

    def _clear_leftovers(self, directory: Path) -> None:
        """Restore directories that were being replaced, and delete those that were being written."""
        names = {match[1] for path in directory.iterdir() if (match := _LEFTOVER.fullmatch(path.name))}
        for name in sorted(names):
            recover(directory / name)


class _OpenFile:
    """A file descriptor to read from."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError("it is not a regular file")
        self.size = status.st_size
        self.identity = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)

    def read_into(self, view: memoryview, position: int) -> int:
        """Read with one system call, which may return fewer bytes."""
        return os.preadv(self._descriptor, [view], position)

    def content(self) -> bytes:
        """Read it from the beginning."""
        with open(self._descriptor, "rb", closefd=False) as file:
            return file.read(self.size)


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


def _listed(path: Path) -> Iterator[str]:
    """Yield the names of a checkpoint's own files and of those in ``model/``, also behind links to directories."""

    def refuse(error: OSError) -> None:
        raise error

    yield from os.listdir(path)
    if not (path / "model").is_dir():
        return
    for directory, _, names in os.walk(path / "model", onerror=refuse, followlinks=True):
        yield from (str((Path(directory) / name).relative_to(path)) for name in names)


def _size_of(path: Path) -> int | None:
    """Return the size of a file; None if there is none of this name."""
    try:
        return path.stat().st_size if path.is_file() else None
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENAMETOOLONG):  # a forged name is that of no file
            return None
        raise


def _aside_name(path: Path) -> Path:
    names = (sibling(path, f"damaged{f'.{number}' if number else ''}") for number in itertools.count())
    return next(name for name in names if not os.path.lexists(name))
