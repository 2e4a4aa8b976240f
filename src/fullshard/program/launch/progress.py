"""Progress on standard error of work that takes more than two seconds: a bar in a terminal, else some lines."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn

from fullshard.program.launch.messages import say

LONG_SECONDS = 2.0

LINES = 10
"""Lines for the whole work where there is no terminal."""


class WorkProgress:
    """Progress of work, called with the work done and the total; a context manager.

    Nothing is shown in the first two seconds. In a terminal it is a bar, which is removed at the end. Elsewhere, as in
    a pipe or a log, it is a line for each further tenth of the work, except for the last.
    """

    def __init__(self, what: str, *, shown: bool = True) -> None:
        """Start without a bar; only one of several ranks has it ``shown``."""
        self._what = what
        self._shown = shown
        self._in_terminal = sys.stderr.isatty()
        self._tenths = 0
        self._started = time.monotonic()
        self._bar: Progress | None = None

    def __enter__(self) -> Self:
        """Show nothing yet."""
        return self

    def __call__(self, done: int, total: int) -> None:
        """Update the bar, or print a line."""
        if not self._shown or (self._bar is None and not self.is_long(total)):
            return
        if not self._in_terminal:
            self._print_tenth(done, total)
            return
        if self._bar is None:
            bar = (TextColumn("{task.description}"), BarColumn(), *self.columns(), TimeRemainingColumn())
            self._bar = Progress(*bar, console=Console(stderr=True), transient=True)
            self._bar.add_task(self._what, total=total)
            self._bar.start()
        self._bar.update(self._bar.task_ids[0], completed=done, total=total)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.stop()

    def amount(self, done: int, total: int) -> str:
        """Return what is done, for a line."""
        return f"{done:,} of {total:,}"

    def _print_tenth(self, done: int, total: int) -> None:
        tenths, before = LINES * done // max(total, 1), self._tenths
        self._tenths = tenths  # fewer than before: another piece of work has begun
        if before < tenths < LINES:
            say(f"{self._what}: {self.amount(done, total)}")

    def is_long(self, total: int) -> bool:
        """Return True if the work is long enough for a bar."""
        return time.monotonic() - self._started >= LONG_SECONDS

    def columns(self) -> tuple[ProgressColumn, ...]:
        """Return the columns between the bar and the remaining time."""
        return (MofNCompleteColumn(),)
