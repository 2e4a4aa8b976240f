"""SIGTERM and Ctrl-C in a rank: the first requests a checkpoint and a stop, a second one ends the process."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any, Self

from fullshard.launch.failure import is_ending, report_saving
from fullshard.launch.local import INTERRUPTED_EXIT_CODE
from fullshard.train import StopRequest

SAME_REQUEST_SECONDS = 1.0
"""Signals within this time are one request: a terminal, torchrun and a batch system each pass on the same Ctrl-C."""

_STOPPING = b"fullshard: stopping after this step with a checkpoint; a second signal exits at once without one\n"

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopSignals(StopRequest):
    """While entered, in a process's main thread, the first signal sets ``requested`` and a later one ends the process.

    A separate thread reads the signals: Python's handlers run only when the main thread returns from C, which it does
    not do while it waits in a collective for ranks that never arrive.
    """

    def __enter__(self) -> Self:
        """Install the handlers and start the thread."""
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._wakeup_before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._before: dict[int, Any] = {number: signal.signal(number, _nothing) for number in _SIGNALS}
        self._thread = threading.Thread(target=self._listen, name="fullshard-signals", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Restore the previous handlers."""
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
            if is_ending():
                os._exit(INTERRUPTED_EXIT_CODE)
            now = time.monotonic()
            if first is None:
                first = now
                self.requested = True
                if os.environ.get("RANK", "0") == "0":
                    os.write(2, _STOPPING)  # print() may hold a lock that the main thread has
                report_saving()
            elif now - first >= SAME_REQUEST_SECONDS:
                os._exit(INTERRUPTED_EXIT_CODE)


def _nothing(_signal: int, _frame: object) -> None:
    """Do nothing: Python wakes the thread only for signals that have a handler."""
