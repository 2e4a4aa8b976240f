"""A bar with bytes and rate on standard error, for work that takes a while."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from fullshard.sizes import format_bytes

_LONG_BYTES = 64 << 20
_LONG_SECONDS = 2.0


class ByteProgress:
    """Shows how far work is, called with bytes done and in all; a context manager.

    Nothing is shown where standard error is no terminal, nor for work of less than 64 MiB that takes less than two
    seconds. At the end the bar is taken away.
    """

    def __init__(self, what: str) -> None:
        """``what`` is being done, such as ``exporting``."""
        self._what = what
        self._started = time.monotonic()
        self._bar: Progress | None = None

    def __enter__(self) -> ByteProgress:
        """Nothing to show yet."""
        return self

    def __call__(self, done: int, total: int) -> None:
        """Tell how far it is."""
        if self._bar is None:
            long = total > _LONG_BYTES or time.monotonic() - self._started > _LONG_SECONDS
            if not long or not sys.stderr.isatty():
                return
            self._bar = _start(self._what, total)
        self._bar.update(self._bar.task_ids[0], completed=done)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.stop()


class _Speed(ProgressColumn):
    """The rate; rich's own column knows decimal units only."""

    def render(self, task: Task) -> Text:
        """Of the last seconds, or of all where it is done."""
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{format_bytes(speed)}/s", style="progress.data.speed")


def _start(what: str, total: int) -> Progress:
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        _Speed(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    bar.add_task(what, total=total)
    bar.start()
    return bar
