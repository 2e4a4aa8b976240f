"""Questions to a group's store that never block for long: torch's store waits for ever while its process is stopped."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class _Question:
    """A function for the thread, and its answer once ``answered`` is set."""

    def __init__(self, ask: Callable[[], Any]) -> None:
        self.ask = ask
        self.answered = threading.Event()
        self.answer: Any = None
        self.error: Exception | None = None


class Line:
    """The thread that asks the store, one question after the other. One for each process.

    A question that is not answered stays with the thread: the connection's bytes must not be read by another one. It is
    answered when the store's process runs again, or the network is mended; then the line is free again.
    """

    def __init__(self) -> None:
        """Start no thread yet."""
        self._free = threading.Lock()
        self._questions: queue.SimpleQueue[_Question | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._asked_at: float | None = None

    def ask(self, question: Callable[[], T], default: T, patience_s: float) -> T:
        """Return the answer of the store, or ``default`` if none came in time; for use by any thread.

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
        """Return for how many seconds the store has not answered; 0 if it has answered all questions."""
        asked_at = self._asked_at
        return 0.0 if asked_at is None else time.monotonic() - asked_at

    def close(self) -> None:
        """End the thread, unless a question is not answered: then it stays where it is until the process ends."""
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
