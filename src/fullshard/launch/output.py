"""What ranks print, on the launcher's own standard output and error: whole lines, each with its rank in front."""

from __future__ import annotations

import re
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import BinaryIO, Literal

Stream = Literal["stdout", "stderr"]

BAR_SECONDS = 10.0
"""How often the state of a progress bar is written where nobody watches a terminal."""

_LONGEST_LINE = 1 << 20
"""Bytes after which a line that does not end is written in parts."""

_CURSOR = re.compile(rb"\x1b\[[0-9;?]*[A-HJKSTfhl]")
"""What moves the cursor: it would be about a screen that a rank has to itself."""

_ERASE = b"\r\x1b[K"


@dataclass
class _Pending:
    """What a rank has written on a stream since its last whole line."""

    text: bytes = b""
    shown_s: float = 0.0


class Output:
    """Joins the output of ranks, line by line. Safe to use from several threads.

    A progress bar is a line that is written over and over (a carriage return). On a terminal the bar of the lowest
    rank that shows one stays at the bottom, below the lines of all; elsewhere its last state is a line, and one every
    ten seconds until then.

    Attributes:
        closed: Whether nobody reads any more, as after ``| head``.
    """

    def __init__(
        self, targets: Mapping[Stream, BinaryIO], *, columns: int | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Write to ``targets``.

        Args:
            targets: Where each stream goes; may be one file.
            columns: Width of the terminal that standard error is; None: it is none.
            clock: Tells seconds.
        """
        self.closed = False
        self._targets = targets
        self._columns = columns
        self._clock = clock
        self._lock = threading.Lock()
        self._pending: dict[tuple[int, Stream], _Pending] = {}
        self._bars: dict[tuple[int, Stream], bytes] = {}
        self._drawn = False

    def feed(self, rank: int, stream: Stream, data: bytes) -> None:
        """Take what ``rank`` has written."""
        with self._lock:
            pending = self._pending.setdefault((rank, stream), _Pending(shown_s=self._clock()))
            *lines, pending.text = (pending.text + data).split(b"\n")
            for line in lines:
                self._bars.pop((rank, stream), None)
                self._line(rank, stream, line)
            if len(pending.text) > _LONGEST_LINE and b"\r" not in pending.text:
                self._line(rank, stream, pending.text)
                pending.text = b""
            elif b"\r" in pending.text:
                self._bar(rank, stream, pending)
            self._draw()

    def end(self, rank: int, stream: Stream) -> None:
        """A rank will write no more: a line that it has not ended ends here."""
        with self._lock:
            pending = self._pending.pop((rank, stream), _Pending())
            self._bars.pop((rank, stream), None)
            if pending.text:
                self._line(rank, stream, pending.text)
            self._draw()

    def say(self, text: str) -> None:
        """Write the launcher's own words to standard error."""
        with self._lock:
            self._write("stderr", text.encode(errors="replace") + b"\n")
            self._draw()

    def _line(self, rank: int, stream: Stream, line: bytes) -> None:
        shown = _visible(line)
        if shown or not line:  # not what only moved the cursor
            self._write(stream, _prefix(rank) + shown + b"\n")

    def _bar(self, rank: int, stream: Stream, pending: _Pending) -> None:
        """The line that is written over and over: remember its last state only."""
        shown = _visible(pending.text)
        pending.text = b"\r" + shown + (b"\r" if pending.text.endswith(b"\r") else b"")
        if self._columns is not None:
            self._bars[rank, stream] = shown
        elif self._clock() - pending.shown_s >= BAR_SECONDS:
            pending.shown_s = self._clock()
            self._write(stream, _prefix(rank) + shown + b"\n")

    def _draw(self) -> None:
        """Show the lowest rank's bar at the bottom of the terminal, and no other."""
        if self._bars:
            rank, stream = min(self._bars)
            text = (_prefix(rank) + self._bars[rank, stream]).decode(errors="replace")
            self._put("stderr", _ERASE + text[: (self._columns or 80) - 1].encode())
            self._drawn = True
        elif self._drawn:
            self._put("stderr", _ERASE)
            self._drawn = False

    def _write(self, stream: Stream, line: bytes) -> None:
        if self._drawn:
            self._put("stderr", _ERASE)
            self._drawn = False
        self._put(stream, line)

    def _put(self, stream: Stream, data: bytes) -> None:
        if self.closed:
            return
        try:
            self._targets[stream].write(data)
            self._targets[stream].flush()
        except OSError:  # BrokenPipeError after | head; a full disk behind a file
            self.closed = True


def terminal_columns(standard_error: BinaryIO) -> int | None:
    """The width of the terminal that standard error is; None where it is none."""
    return shutil.get_terminal_size().columns if standard_error.isatty() else None


def _prefix(rank: int) -> bytes:
    return f"[rank {rank}] ".encode()


def _visible(line: bytes) -> bytes:
    """What a terminal would show of a line: what was written last."""
    parts = [part for part in _CURSOR.sub(b"", line).split(b"\r") if part]
    return parts[-1] if parts else b""
