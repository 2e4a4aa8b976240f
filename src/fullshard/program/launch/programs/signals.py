"""SIGTERM and Ctrl-C in a rank: the first requests a checkpoint and a stop, a second one ends the process.

SIGUSR1 (Slurm's notice), SIGHUP (the terminal closes) and a file that appears also request a stop; none counts as the
first of two. SIGINT and SIGHUP stay ignored where the process was started so (``heard_signals``).
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from pathlib import Path
from typing import Any, Self

from fullshard.program.launch.failure import is_ending, report_saving
from fullshard.program.launch.processes import INTERRUPTED_EXIT_CODE
from fullshard.program.launch.ranks import NOTICES, STOP_SIGNALS, heard_signals
from fullshard.program.train import StopRequest

SAME_REQUEST_SECONDS = 1.0
"""Signals within this time are one request: a terminal, torchrun and a batch system each pass on the same Ctrl-C."""

_STOPPING = b"fullshard: stopping after this step with a checkpoint; a second signal exits at once without one\n"

_LOOK_SECONDS = 0.5
"""Interval of looks for the file that stops a run."""


class StopSignals(StopRequest):
    """While entered, in a process's main thread, the first signal sets ``requested`` and a later one ends the process.

    A separate thread reads the signals: Python's handlers run only when the main thread returns from C, which it does
    not do while it waits in a collective for ranks that never arrive.
    """

    def __init__(self, file: Path | None = None) -> None:
        """Request a stop also when ``file`` appears."""
        super().__init__()
        self._file = file

    def __enter__(self) -> Self:
        """Install the handlers and start the thread."""
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._wakeup_before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._before: dict[int, Any] = {number: signal.signal(number, _nothing) for number in heard_signals()}
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
        while True:
            if self._file is not None and not select.select([self._reader], [], [], _LOOK_SECONDS)[0]:
                if not self.requested and self._file.exists():
                    self._request()
                continue
            received = os.read(self._reader, 1)
            if not received:
                return
            if received[0] not in STOP_SIGNALS:
                continue
            if is_ending():
                os._exit(INTERRUPTED_EXIT_CODE)
            now = time.monotonic()
            if not self.requested:
                self._request()
            if received[0] in NOTICES:
                continue
            first = first or now
            if now - first >= SAME_REQUEST_SECONDS:
                os._exit(INTERRUPTED_EXIT_CODE)

    def _request(self) -> None:
        self.requested = True
        if os.environ.get("RANK", "0") == "0":
            with contextlib.suppress(OSError):
                os.write(2, _STOPPING)  # print() may wait for a lock of the main thread
        report_saving()


def _nothing(_signal: int, _frame: object) -> None:
    """Do nothing: Python wakes the thread only for signals that have a handler."""
