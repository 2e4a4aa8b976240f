"""A progress bar with bytes and rate on standard error."""

from __future__ import annotations

from rich.progress import DownloadColumn, ProgressColumn, Task
from rich.text import Text

from fullshard.launch.progress import WorkProgress
from fullshard.sizes import format_bytes

_LONG_BYTES = 64 << 20


class ByteProgress(WorkProgress):
    """A progress bar called with bytes done and in total; more than 64 MiB show it at once."""

    def is_long(self, total: int) -> bool:
        """Return whether the work takes long enough for a bar."""
        return total > _LONG_BYTES or super().is_long(total)

    def columns(self) -> tuple[ProgressColumn, ...]:
        """Return the columns between the bar and the remaining time."""
        return (DownloadColumn(binary_units=True), _Speed())


class _Speed(ProgressColumn):
    """The rate in binary units; rich's own column has decimal units only."""

    def render(self, task: Task) -> Text:
        """Return the rate of the last seconds, or of the finished task."""
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{format_bytes(speed)}/s", style="progress.data.speed")
