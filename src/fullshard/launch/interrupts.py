"""Requests to stop that the launcher passes on to its ranks: signals, and a file that appears."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Protocol, Self

from fullshard.launch.messages import say

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""Signals that ask a run to save and stop."""

NOTICES = (signal.SIGUSR1, signal.SIGHUP)
"""Those that never count as the first or second of two: Slurm's notice, after which a SIGTERM comes, and the end of a
terminal, which a shell and the kernel both tell."""


def heard_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that ask this process to stop; without SIGHUP where it is ignored, as under nohup."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return tuple(number for number in STOP_SIGNALS if number != signal.SIGHUP or not ignored)


@dataclass(frozen=True)
class Notice:
    """Further ways to request a stop, and the time limit after a request."""

    file: Path | None = None  # the run stops when it appears
    grace_s: float | None = None  # ranks that run longer after the first request are killed; None: never


NO_NOTICE = Notice()


class Stoppable(Protocol):
    """A rank that was started."""

    def terminate(self) -> None:
        """Send SIGTERM."""
        ...

    def kill(self) -> None:
        """Send SIGKILL."""
        ...


class Interrupts:
    """Passes requests to stop (Ctrl-C, timeout, Slurm, a service manager) on to the ranks while entered.

    Attributes:
        asked: True if the ranks were asked to save and exit.
    """

    def __init__(self, ranks: Sequence[Stoppable], notice: Notice) -> None:
        """Pass signals to ``ranks``, a list that may still change."""
        self.asked = False
        self._ranks = ranks
        self._notice = notice
        self._asked_at = 0.0
        self._signals = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        """Install the handlers."""
        # While SIGCHLD is ignored a parent never learns how a child ended, and a program may be started in that state.
        self._before = {signal.SIGCHLD: signal.signal(signal.SIGCHLD, signal.SIG_DFL)}
        self._before |= {number: signal.signal(number, self._interrupt) for number in heard_signals()}
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Restore the previous handlers."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def out_of_time(self) -> bool:
        """Look for the file of the notice; return True if the time limit has passed."""
        if self._notice.file is not None and not self.asked and self._notice.file.exists():
            say(f"{self._notice.file} is there: the run stops")
            self._ask()
        grace_s = self._notice.grace_s
        return self.asked and grace_s is not None and time.monotonic() - self._asked_at > grace_s

    def _interrupt(self, number: int, _frame: FrameType | None) -> None:
        self._signals += number not in NOTICES
        if self._signals > 1:
            for rank in self._ranks:
                rank.kill()
            raise KeyboardInterrupt
        if not self.asked:
            self._ask()

    def _ask(self) -> None:
        self.asked, self._asked_at = True, time.monotonic()
        for rank in self._ranks:
            rank.terminate()
