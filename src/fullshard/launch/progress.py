"""A progress bar on standard error for work that takes more than two seconds."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn

LONG_SECONDS = 2.0


class WorkProgress:
    """A progress bar, called with the work done and the total; a context manager.

    Nothing is shown if standard error is not a terminal, nor in the first two seconds. The bar is removed at the end.
    """

    def __init__(self, what: str, *, shown: bool = True) -> None:
        """Start without a bar; only one of several ranks has it ``shown``."""
        self._what = what
        self._shown = shown and sys.stderr.isatty()
        self._started = time.monotonic()
        self._bar: Progress | None = None

    def __enter__(self) -> Self:
        """Show nothing yet."""
        return self

    def __call__(self, done: int, total: int) -> None:
        """Update the bar."""
        if not self._shown:
            return
        if self._bar is None:
            if not self.is_long(total):
                return
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

    def is_long(self, total: int) -> bool:
        """Return True if the work is long enough for a bar."""
        return time.monotonic() - self._started >= LONG_SECONDS

    def columns(self) -> tuple[ProgressColumn, ...]:
        """Return the columns between the bar and the remaining time."""
        return (MofNCompleteColumn(),)
