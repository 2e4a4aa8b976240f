"""A bar on standard error for work that takes more than two seconds."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

LONG_SECONDS = 2.0


class WorkProgress:
    """Shows how far work is, called with how much is done and in all; a context manager.

    Nothing is shown where standard error is no terminal, nor before two seconds. At the end the bar is taken away.
    """

    def __init__(self, what: str, *, shown: bool = True) -> None:
        """``what`` is being done, such as ``evaluating``; ``shown``: on one rank only."""
        self._what = what
        self._shown = shown and sys.stderr.isatty()
        self._started = time.monotonic()
        self._bar: Progress | None = None

    def __enter__(self) -> WorkProgress:
        """Nothing to show yet."""
        return self

    def __call__(self, done: int, total: int) -> None:
        """Tell how far it is."""
        if not self._shown:
            return
        if self._bar is None:
            if time.monotonic() - self._started < LONG_SECONDS:
                return
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._bar.add_task(self._what, total=total)
            self._bar.start()
        self._bar.update(self._bar.task_ids[0], completed=done, total=total)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.stop()
