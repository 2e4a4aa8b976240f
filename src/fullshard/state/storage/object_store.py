"""Checkpoints in an object store, which has neither renames nor directories.

::

    s3://bucket/run/
      step-00000100.9f3c01d2-1/       one save: step, the run that wrote it, the number of its save
        shard-00000-of-00002.safetensors, …, index.json, model/…
        complete.json                 put last: the checkpoint is complete exactly when this object exists
      step-00000200.9f3c01d2-2/       no complete.json: being written, being deleted, or left by a killed run
        writing.json                  put first, so that every rank can see that it may write there
      lock                            renewed by the run that writes here

A save never writes under the name of another one, so a rank that outlives its killed run cannot damage a later save.
Objects appear complete or not at all: a put replaces one in a single step, and an upload in parts appears at its end.

Stores offer no locks: a run's lock is an object that it renews. A run that finds the object watches it. If it changes,
its holder is alive and the lock is refused. If it does not change for three renewals, or its holder was a process on
this machine that has ended, the lock is taken over. Clocks are not compared.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from fullshard.errors import CheckpointError, StoreError
from fullshard.state.storage.object_path import (
    ATTEMPTS,
    PART_BYTES,
    Listed,
    ObjectPath,
    no_bucket,
    put,
    refusal,
    request,
)

LOCK_NAME = "lock"

RENEW_SECONDS = 10.0
"""Interval at which the holder puts the object again, in seconds."""
LOOKS = 10
"""How often another run looks at the object in one interval."""

_held: set[str] = set()
"""Tokens of the locks that this process holds."""


class ObjectLock:
    """Keeps two runs from writing under one prefix; held by one rank until released or no longer renewed."""

    def __init__(self, directory: ObjectPath) -> None:
        """Take the lock; one left by a killed run on another machine, after watching it for three renewals.

        Raises:
            CheckpointError: Another run holds it.
            StoreError: The store cannot be reached, or refuses.
        """
        self.directory = directory
        self._path = directory / LOCK_NAME
        self._token, self._renewals = secrets.token_hex(8), 0
        self._ended = threading.Event()
        self._writing = threading.Lock()
        self._take()
        _held.add(self._token)
        self._thread = threading.Thread(target=self._renew, name="fullshard-lock", daemon=True)
        self._thread.start()

    def require_held(self) -> None:
        """Check that the object is still this run's.

        Raises:
            CheckpointError: Another run has taken the lock, because this one did not renew it in time.
        """
        found = self._read()
        if found is None:
            self._put(only_new=False)
        elif found["token"] != self._token:
            raise CheckpointError(
                f"Another run ({_holder(found)}) has taken the lock of {self.directory}, because this one did not "
                "renew it in time. This run writes no more checkpoints there. Stop one of the two."
            )

    def require_commit(self) -> None:
        """Check that the object is still this run's, right before a checkpoint is marked as complete."""
        self.require_held()

    def release(self) -> None:
        """Delete the object if it is still this run's."""
        self._ended.set()
        _held.discard(self._token)
        with self._writing, contextlib.suppress(StoreError):
            found = self._read()
            if found is not None and found["token"] == self._token:
                self._path.unlink(missing_ok=True)

    def _take(self) -> None:
        """Put the object if there is none or its holder is gone."""
        found = first = self._read()
        # Looks are counted, not seconds: a process that was stopped meanwhile has not watched the holder.
        looks = 3 * LOOKS
        while found is not None and not _is_gone(found):
            if found != first or _is_here(found):
                raise CheckpointError(
                    f"Another run is writing to {self.directory} ({_holder(found)}); two runs would delete each "
                    "other's checkpoints. Wait until it finishes, stop it, or choose another place."
                )
            if not looks:
                break
            time.sleep(RENEW_SECONDS / LOOKS)
            found, looks = self._read(), looks - 1
        if not self._put(only_new=found is None):
            raise CheckpointError(
                f"Another run has just begun to write to {self.directory}. Wait until it finishes, or choose another "
                "place."
            )

    def _put(self, *, only_new: bool) -> bool:
        """Put the object; returns False if it had to be new and there is one already."""
        self._renewals += 1
        values = {"token": self._token, "renewals": self._renewals, "process": _process(), "host": socket.gethostname()}
        content = json.dumps(values).encode()
        try:
            put(self._path.url, content, mode="create" if only_new else "overwrite")
        except FileExistsError:
            # Also when the answer to the first attempt was lost, and the second attempt finds the object.
            found = self._read()
            return found is not None and found["token"] == self._token
        return True

    def _read(self) -> dict[str, Any] | None:
        """Return the contents of the object; None if there is none."""
        try:
            values = json.loads(request(self._path.url, lambda files: files.cat_file(self._path.key)))
        except FileNotFoundError:
            return None
        except ValueError:
            values = {}
        return {"token": "", "renewals": 0, "process": [], "host": "unknown", **values}

    def _renew(self) -> None:
        """Put the object at intervals; runs in a thread."""
        while not self._ended.wait(RENEW_SECONDS):
            with self._writing, contextlib.suppress(StoreError):  # if the store is away, the next save reports it
                found = self._read()
                if self._ended.is_set() or (found is not None and found["token"] != self._token):
                    return
                self._put(only_new=False)


def _process() -> list[Any]:
    """Return an identity that no two living processes share: boot, namespace of process numbers, and process number."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return [boot, os.readlink("/proc/self/ns/pid"), os.getpid()]
    return []


def _is_here(found: dict[str, Any]) -> bool:
    """Return True if the holder is a living process that this one can see."""
    mine, its = _process(), found["process"]
    return bool(mine) and mine[:2] == its[:2] and not _is_gone(found)


def _is_gone(found: dict[str, Any]) -> bool:
    """Return True if the holder is known to have ended; False if that cannot be known."""
    mine, its = _process(), found["process"]
    if not mine or mine[:2] != its[:2]:
        return False
    if mine == its:
        return found["token"] not in _held
    return not Path(f"/proc/{int(its[2])}").exists()


def _holder(found: dict[str, Any]) -> str:
    number = f"process {found['process'][2]} on " if found["process"] else ""
    return f"{number}{found['host']}"


COMPLETE_NAME = "complete.json"
WRITING_NAME = "writing.json"
DAMAGED_NAME = "damaged.json"

_NAMED = re.compile(r"step-\d{8,}(\.[0-9a-f]+-\d+)?")
"""Checkpoints, and those that were copied here from a disk."""
_SAVED_HERE = re.compile(r"step-\d{8,}\.[0-9a-f]+-\d+")


class ObjectStore:
    """Objects under a prefix; see :mod:`fullshard.state.storage.backend`."""

    fetches = 8

    @contextlib.contextmanager
    def opened(self, path: ObjectPath, known: tuple[Any, ...] | None) -> Iterator[_Object]:
        """Ask for the size once; it stays valid, because no save writes an object of this name again."""
        size = path.size() if known is None else known[1]
        if size is None:
            raise FileNotFoundError(f"there is no {path}")
        yield _Object(path, size)

    def create(self, path: ObjectPath, nbytes: int) -> _NewObject:
        """Start an upload in parts."""
        return _NewObject(path, nbytes)

    def write_text(self, path: ObjectPath, text: str) -> None:
        """Put an object, which appears complete."""
        put(path.url, text.encode())

    def sizes(self, path: ObjectPath, names: Iterable[str] | None = None) -> dict[str, int]:
        """List a prefix in one request (one for each thousand objects), in which all names are found."""
        found, wanted = sorted(path.sizes().items()), None if names is None else set(names)
        return {name: size for name, size in found if wanted is None or name in wanted}

    def names(self, directory: ObjectPath, step: int, attempt: str) -> tuple[ObjectPath, ObjectPath]:
        """Return the same prefix twice; no other save uses it."""
        path = directory / f"step-{step:08d}.{attempt}"
        return path, path

    @contextlib.contextmanager
    def begin(self, temporary: ObjectPath) -> Iterator[Path]:
        """Put an object that the other ranks can see; the small files are put from a temporary directory at the end."""
        self._clear_leftovers(temporary.parent)
        self.write_text(temporary / WRITING_NAME, json.dumps({"note": "this checkpoint is not complete"}) + "\n")
        with tempfile.TemporaryDirectory(prefix="fullshard-") as scratch:
            yield Path(scratch)
            for file in sorted(one for one in Path(scratch).rglob("*") if one.is_file()):
                put((temporary / "model" / file.relative_to(scratch)).url, file.read_bytes())

    def finish(self, temporary: ObjectPath, final: ObjectPath, mark: Callable[[], None]) -> None:
        """Put the marker last: that is the commit. Nothing is renamed."""
        assert temporary == final, "a store has no renames"
        (temporary / WRITING_NAME).unlink(missing_ok=True)
        mark()

    def remove(self, path: ObjectPath) -> None:
        """Delete every object under the prefix, including objects whose put seemed to fail.

        The marker goes first: without it, the prefix is not a checkpoint.
        """
        (path / COMPLETE_NAME).unlink(missing_ok=True)
        for name in path.sizes():
            (path / name).unlink(missing_ok=True)

    def set_aside_text(self, path: ObjectPath) -> str:
        """Return the object that marks it."""
        del path
        return f"marked by an object {DAMAGED_NAME}"

    def set_aside(self, path: ObjectPath) -> ObjectPath:
        """Put an object that marks the checkpoint as damaged, because there are no renames."""
        self.write_text(path / DAMAGED_NAME, json.dumps({"note": "set aside by a run that went back"}) + "\n")
        return path / DAMAGED_NAME

    def listed(self, directory: ObjectPath) -> Listed:
        """List the prefixes: one with a marker is a candidate, one without it unfinished."""
        found: dict[str, set[str]] = {}
        for path in directory.sizes():
            name, _, rest = path.partition("/")
            if rest:
                found.setdefault(name, set()).add(rest)
        aside = [name for name, files in found.items() if DAMAGED_NAME in files]
        named = [name for name in found if _NAMED.fullmatch(name) and name not in aside]
        named.sort(key=lambda name: (name.partition(".")[0], name))
        complete = [name for name in named if COMPLETE_NAME in found[name]]
        unfinished = [name for name in named if name not in complete]
        return Listed(*([directory / name for name in names] for names in (complete, unfinished, sorted(aside))))

    def lock(self, directory: ObjectPath) -> ObjectLock:
        """Take the lock object, which only one run renews."""
        lock = ObjectLock(directory)
        try:
            self._clear_leftovers(directory)
        except BaseException:
            lock.release()
            raise
        return lock

    def _clear_leftovers(self, directory: ObjectPath) -> None:
        """Delete saves without a marker; holding the lock means that no run is writing them."""
        for path in self.listed(directory).unfinished:
            if _SAVED_HERE.fullmatch(path.name):
                self.remove(directory / path.name)


class _Object:
    """An object that is read by ranges."""

    def __init__(self, path: ObjectPath, size: int) -> None:
        self.size = size
        self.identity = (path.url, size)
        self._path = path

    def read_into(self, view: memoryview, position: int) -> int:
        """Fetch one range of bytes."""
        key, stop = self._path.key, min(position + len(view), self.size)
        content = request(self._path.url, lambda files: files.cat_file(key, start=position, end=stop))
        view[: len(content)] = content
        return len(content)

    def content(self) -> bytes:
        """Fetch all of it in one request."""
        return request(self._path.url, lambda files: files.cat_file(self._path.key))


class _NewObject:
    """An upload in parts of ``PART_BYTES``, from the first byte to the last; it appears when it is finished."""

    def __init__(self, path: ObjectPath, nbytes: int) -> None:
        self._path, self._nbytes, self._at, self._finished = path, nbytes, 0, False
        self._file: Any = request(path.url, lambda files: files.open(path.key, "wb", block_size=PART_BYTES))

    def write_at(self, position: int, data: memoryview) -> None:
        """Append ``data``; each full part is sent."""
        assert position == self._at, f"{self._path}: byte {position} after {self._at}; an upload has one order"
        self._at += len(data)
        self._attempt(lambda: self._file.write(data), lambda: self._file.flush())

    def finish(self) -> None:
        """Send the last part, and confirm that the store has the object at its full size."""
        self._attempt(self._file.close, self._file.close)
        size = self._path.size()
        if size != self._nbytes:
            raise CheckpointError(
                f"{self._path} has {size or 0:,} bytes after the upload of {self._nbytes:,}. Save again; if it happens "
                "again, check the store."
            )
        self._finished = True

    def close(self) -> None:
        """Abandon the upload unless it was finished: none of its parts appears."""
        if not self._finished and not self._file.closed:
            with contextlib.suppress(Exception):  # the causing error is reported; the store expires old parts itself
                self._file.closed = True
                self._file.discard()

    def _attempt(self, first: Callable[[], Any], again: Callable[[], Any]) -> None:
        """Send a part once: fsspec's clients repeat the parts themselves, a bounded number of times."""
        try:
            first()
        except FileNotFoundError as error:
            raise no_bucket(self._path.url, error) from error
        except Exception as error:
            problem = refusal(self._path.url, error, ATTEMPTS)
            raise (problem or error) from error
