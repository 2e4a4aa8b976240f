"""Progress bars on standard error: with bytes and rate, or with the share that is done."""

from __future__ import annotations

from rich.progress import DownloadColumn, ProgressColumn, Task, TaskProgressColumn
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


class ShareProgress(WorkProgress):
    """A progress bar of several pieces of work one after the other; shows the share that is done.

    Attributes:
        pieces: How many pieces there are.
        piece: The number of the piece that is under way, from 0.
    """

    def __init__(self, what: str, pieces: int, *, shown: bool) -> None:
        """Start without a bar, before the first piece."""
        super().__init__(what, shown=shown)
        self.pieces, self.piece = pieces, 0

    def __call__(self, done: int, total: int) -> None:
        """Update the bar: of this piece ``done`` of ``total`` is done."""
        super().__call__(self.piece * total + done, self.pieces * total)

    def columns(self) -> tuple[ProgressColumn, ...]:
        """Return the columns between the bar and the remaining time."""
        return (TaskProgressColumn(),)


class _Speed(ProgressColumn):
    """The rate in binary units; rich's own column has decimal units only."""

    def render(self, task: Task) -> Text:
        """Return the rate of the last seconds, or of the finished task."""
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{format_bytes(speed)}/s", style="progress.data.speed")
