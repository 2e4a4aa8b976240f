"""The lock of a prefix in an object store: an object that its holder renews, because stores offer no other lock.

A run that finds the object watches it. If it changes, its holder is alive and the lock is refused. If it does not
change for three renewals, or its holder was a process on this machine that has ended, the lock is taken over. Clocks
are not compared.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import threading
import time
from pathlib import Path
from typing import Any

from fullshard.errors import CheckpointError, StoreError
from fullshard.state.storage.object_client import put, request
from fullshard.state.storage.object_path import ObjectPath

LOCK_NAME = "lock"

RENEW_SECONDS = 10.0
"""Interval at which the holder puts the object again, in seconds."""

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
        started, first = time.monotonic(), self._read()
        found = first
        while found is not None and not _is_gone(found):
            waited = time.monotonic() - started
            if found != first or _is_here(found):
                raise CheckpointError(
                    f"Another run is writing to {self.directory} ({_holder(found)}); two runs would delete each "
                    "other's checkpoints. Wait until it finishes, stop it, or choose another place."
                )
            if waited > 3 * RENEW_SECONDS:
                break
            time.sleep(RENEW_SECONDS / 10)
            found = self._read()
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
