"""Progress bars on standard error, with bytes and rate or with the completed share."""

from __future__ import annotations

from rich.progress import DownloadColumn, ProgressColumn, Task, TaskProgressColumn
from rich.text import Text

from fullshard.launch.progress import WorkProgress
from fullshard.sizes import format_bytes

_LONG_BYTES = 64 << 20


class ByteProgress(WorkProgress):
    """A progress bar called with bytes done and in total; shown at once for more than 64 MiB."""

    def is_long(self, total: int) -> bool:
        """Return True if the work is long enough for a bar."""
        return total > _LONG_BYTES or super().is_long(total)

    def amount(self, done: int, total: int) -> str:
        """Return what is done, for a line."""
        return f"{format_bytes(done)} of {format_bytes(total)}"

    def columns(self) -> tuple[ProgressColumn, ...]:
        """Return the columns between the bar and the remaining time."""
        return (DownloadColumn(binary_units=True), _Speed())


class ShareProgress(WorkProgress):
    """A progress bar over several pieces of work, one after the other; shows the completed share.

    Attributes:
        pieces: Number of pieces.
        piece: Number of the current piece, from 0.
    """

    def __init__(self, what: str, pieces: int, *, shown: bool) -> None:
        """Start without a bar, before the first piece."""
        super().__init__(what, shown=shown)
        self.pieces, self.piece = pieces, 0

    def __call__(self, done: int, total: int) -> None:
        """Update the bar: ``done`` of ``total`` of the current piece."""
        super().__call__(self.piece * total + done, self.pieces * total)

    def amount(self, done: int, total: int) -> str:
        """Return what is done, for a line."""
        return f"{done / total:.0%}"

    def columns(self) -> tuple[ProgressColumn, ...]:
        """Return the columns between the bar and the remaining time."""
        return (TaskProgressColumn(),)


class _Speed(ProgressColumn):
    """The rate in binary units; rich's own column has decimal units only."""

    def render(self, task: Task) -> Text:
        """Return the rate of the last seconds, or of the finished task."""
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{format_bytes(speed)}/s", style="progress.data.speed")
