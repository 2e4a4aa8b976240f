"""Requests to a group's store that never block for long: torch's store waits forever while its process is stopped."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class _Question:
    """A function for the thread; its answer is valid once ``answered`` is set."""

    def __init__(self, ask: Callable[[], Any]) -> None:
        self.ask = ask
        self.answered = threading.Event()
        self.answer: Any = None
        self.error: Exception | None = None


class Line:
    """The thread that sends requests to the store, one after the other. One for each process.

    An unanswered request keeps the thread: no other thread may read the connection's bytes. It is answered when the
    store's process runs again or the network is repaired; then the line is free again.
    """

    def __init__(self) -> None:
        """Prepare the line; the thread starts with the first request."""
        self._free = threading.Lock()
        self._questions: queue.SimpleQueue[_Question | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._asked_at: float | None = None

    def ask(self, question: Callable[[], T], default: T, patience_s: float) -> T:
        """Return the store's answer, or ``default`` if none came in time; any thread.

        Raises:
            RuntimeError: The store is gone.
        """
        if not self._free.acquire(timeout=patience_s if self.silent_s() < patience_s else 0):
            return default
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="fullshard-store", daemon=True)
            self._thread.start()
        asked = _Question(question)
        self._asked_at = time.monotonic()
        self._questions.put(asked)
        if not asked.answered.wait(patience_s):
            return default
        if asked.error is not None:
            raise asked.error
        return asked.answer

    def silent_s(self) -> float:
        """Return the seconds for which the store has not answered; 0 if it has answered all requests."""
        asked_at = self._asked_at
        return 0.0 if asked_at is None else time.monotonic() - asked_at

    def close(self) -> None:
        """End the thread, unless a request is unanswered: then it remains until the process ends."""
        if self._thread is not None and self.silent_s() == 0:
            self._questions.put(None)
            self._thread.join(timeout=1.0)

    def _run(self) -> None:
        while (asked := self._questions.get()) is not None:
            try:
                asked.answer = asked.ask()
            except Exception as error:
                asked.error = error
            finally:
                self._asked_at = None
                self._free.release()
                asked.answered.set()


LINE = Line()
