"""A thread that writes items, so that ranks never wait for a disk inside a collective."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from queue import SimpleQueue
from types import TracebackType
from typing import Generic, TypeVar

from fullshard.errors import CheckpointError

T = TypeVar("T")

JOIN_SECONDS = 10.0
"""Seconds that an abandoned writer waits for its thread to delete what it has written."""


class _GivenUpError(Exception):
    """Raised in the thread when the caller has failed and no longer needs what it writes."""


class BackgroundWriter(Generic[T]):
    """One thread that writes items in the order they are given; a context manager, on the rank that writes.

    Attributes:
        done_bytes: Bytes written so far.
        failure: The exception that ended the thread; None while it runs and after success.
    """

    def __init__(self, opened: AbstractContextManager[Callable[[T], int]], *, most: int) -> None:
        """Prepare; the thread starts on entry.

        Args:
            opened: Entered and exited in the thread; yields a function that writes one item and returns its bytes.
            most: Most items that may be waiting or being written when :meth:`room` reports room for another one.
        """
        self.done_bytes = 0
        self.failure: BaseException | None = None
        self._opened = opened
        self._most = most
        self._queue: SimpleQueue[T | None] = SimpleQueue()
        self._given = self._finished = 0
        self._given_up = self._ended = False
        self._changed = threading.Condition()
        # Daemon: a disk that never responds must not keep the process from exiting.
        self._thread = threading.Thread(target=self._run, name="fullshard-writer", daemon=True)

    def __enter__(self) -> BackgroundWriter[T]:
        """Start the thread."""
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for the thread; after an error, including Ctrl-C, make it stop and delete what it has written."""
        self._given_up = kind is not None
        self.end()
        self._thread.join(JOIN_SECONDS)

    def give(self, item: T) -> None:
        """Queue an item, which must not change before it is written."""
        self._given += 1
        self._queue.put(item)

    def end(self) -> None:
        """Signal that no more items follow."""
        self._queue.put(None)

    def room(self, seconds: float) -> str | None:
        """Wait for at most ``seconds`` until another item may be given.

        Returns:
            ``""`` if it may; None if not yet; the error's text if the thread has failed.
        """
        return self._wait(lambda: self._given - self._finished <= self._most, seconds)

    def outcome(self, seconds: float) -> str | None:
        """Wait for at most ``seconds`` until everything is written; only after :meth:`end`.

        Returns:
            ``""`` if it is; None if not yet; the error's text if the thread has failed.
        """
        return self._wait(lambda: False, seconds)

    def _wait(self, enough: Callable[[], bool], seconds: float) -> str | None:
        with self._changed:
            reached = self._changed.wait_for(lambda: self._ended or enough(), timeout=seconds)
        if self.failure is None:
            return "" if reached else None
        known = isinstance(self.failure, CheckpointError)
        return str(self.failure) if known else f"Rank 0 could not write the model: {self.failure!r}."

    def _run(self) -> None:
        """Write items until the end; runs in the thread."""
        try:
            with self._opened as write:
                while True:
                    item = self._queue.get()
                    if self._given_up:
                        raise _GivenUpError
                    if item is None:
                        break
                    nbytes = write(item)
                    with self._changed:
                        self.done_bytes += nbytes
                        self._finished += 1
                        self._changed.notify_all()
        except BaseException as error:
            self.failure = error
        with self._changed:
            self._ended = True
            self._changed.notify_all()
