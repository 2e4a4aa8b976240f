"""The lock that keeps two runs from writing into one directory of checkpoints."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import socket
import warnings
from pathlib import Path

from fullshard.errors import CheckpointError

LOCK_NAME = "lock"

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
            holder = "unknown, its lock file was deleted"
            with contextlib.suppress(OSError):
                holder = (self.directory / LOCK_NAME).read_text(errors="replace")[:4096].strip() or "unknown"
            raise CheckpointError(
                f"Another run is writing to {self.directory} (process {holder}); two runs would delete each other's "
                "checkpoints. Wait until it finishes, stop it, or choose another directory."
            ) from error


def _is_at(descriptor: int, path: Path) -> bool:
    """Return True if an open file is still the one at a path."""
    try:
        return descriptor >= 0 and os.path.samestat(os.fstat(descriptor), os.stat(path))
    except OSError:
        return False
