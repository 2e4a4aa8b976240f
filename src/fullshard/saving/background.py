"""A thread that writes what it is given, so that the ranks never wait for a disk inside a collective."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from queue import SimpleQueue
from types import TracebackType
from typing import Generic, TypeVar

from fullshard.errors import CheckpointError

T = TypeVar("T")

LEAVE_SECONDS = 10.0
"""How long one that gives up waits for the thread to clear away what it has written."""


class _GivenUpError(Exception):
    """Nobody wants any more what the thread writes."""


class BackgroundWriter(Generic[T]):
    """One thread that writes items in the order they are given; a context manager, on the rank that writes.

    Attributes:
        done_bytes: Bytes written so far.
        failure: What the thread ended with; None while it runs and when all went well.
    """

    def __init__(self, opened: AbstractContextManager[Callable[[T], int]], *, most: int) -> None:
        """Prepare; the thread starts on entry.

        Args:
            opened: Entered and left in the thread; gives what writes one item and returns its bytes.
            most: Items waiting or being written with which there is still room for another: at the time of the next
                one, all but so many of the last are written.
        """
        self.done_bytes = 0
        self.failure: BaseException | None = None
        self._opened = opened
        self._most = most
        self._queue: SimpleQueue[T | None] = SimpleQueue()
        self._given = self._finished = 0
        self._given_up = self._ended = False
        self._changed = threading.Condition()
        # A disk that never answers shall not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name="fullshard-writer", daemon=True)

    def __enter__(self) -> BackgroundWriter[T]:
        """Start the thread."""
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """After an error, Ctrl-C among them, have the thread stop and clear away what it has written."""
        self._given_up = kind is not None
        self.end()
        self._thread.join(LEAVE_SECONDS)

    def give(self, item: T) -> None:
        """Hand over an item, which must not change before it is written."""
        self._given += 1
        self._queue.put(item)

    def end(self) -> None:
        """Say that nothing more comes."""
        self._queue.put(None)

    def room(self, seconds: float) -> str | None:
        """Wait for at most ``seconds`` until another item may be given.

        Returns:
            ``""`` when it may; None while not; what went wrong, if the thread has failed.
        """
        return self._wait(lambda: self._given - self._finished <= self._most, seconds)

    def outcome(self, seconds: float) -> str | None:
        """Wait for at most ``seconds`` until everything is written; only after :meth:`end`.

        Returns:
            ``""`` when it is; None while not; what went wrong, if the thread has failed.
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
        """The thread."""
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
