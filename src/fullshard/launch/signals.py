"""SIGTERM and Ctrl-C to a rank: the first asks it to save and leave, one more ends it at once."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any, Self

from fullshard.launch.local import INTERRUPTED_EXIT_CODE
from fullshard.train import StopRequest

SAME_WISH_SECONDS = 1.0
"""Signals within this time are one wish: a terminal, torchrun and a batch system each pass the same Ctrl-C on."""

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopSignals(StopRequest):
    """While entered, in a process's main thread, the first signal sets ``requested`` and a later one ends the process.

    A thread of its own reads the signals: Python's handlers have to wait until the main thread is back from C, which it
    is not while it waits for ranks that will never come.
    """

    def __enter__(self) -> Self:
        """Take over the signals."""
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._wakeup_before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._before: dict[int, Any] = {number: signal.signal(number, _nothing) for number in _SIGNALS}
        self._thread = threading.Thread(target=self._listen, name="fullshard-signals", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Give the signals back."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        os.close(self._writer)
        self._thread.join()
        os.close(self._reader)

    def _listen(self) -> None:
        """Read one byte for each signal, until the other end is closed."""
        first: float | None = None
        while received := os.read(self._reader, 1):
            if received[0] not in _SIGNALS:
                continue
            now = time.monotonic()
            if first is None:
                first = now
                self.requested = True
            elif now - first >= SAME_WISH_SECONDS:
                os._exit(INTERRUPTED_EXIT_CODE)


def _nothing(_signal: int, _frame: object) -> None:
    """Python tells the thread of signals only that have a handler."""
