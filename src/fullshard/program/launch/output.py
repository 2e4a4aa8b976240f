"""The output of ranks on the launcher's standard output and error, line by line, prefixed with the rank."""

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
"""Interval at which a progress bar is written if the output is not a terminal, in seconds."""

_LONGEST_LINE = 1 << 20
"""Bytes after which a line without an end is written in pieces."""

_CURSOR = re.compile(rb"\x1b\[[0-9;?]*[A-HJKSTfhl]")
"""Escape sequences that move the cursor, which make no sense once several ranks share a screen."""

_ERASE = b"\r\x1b[K"


@dataclass
class _Pending:
    """Output of a rank on a stream since its last complete line."""

    text: bytes = b""
    shown_s: float = 0.0


class Output:
    """Joins the output of ranks line by line. Several threads may use it.

    A progress bar is a line that is rewritten with carriage returns. On a terminal the bar of the lowest rank that has
    one stays at the bottom, below all lines. Otherwise it is written as a line every ten seconds, and once at the end.
    """

    def __init__(
        self, targets: Mapping[Stream, BinaryIO], *, columns: int | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Write to ``targets``.

        Args:
            targets: The file of each stream; may be the same.
            columns: Width of the terminal on standard error; None if it is not a terminal.
            clock: Returns seconds.
        """
        self._targets = targets
        self._columns = columns
        self._clock = clock
        self._lock = threading.Lock()
        self._pending: dict[tuple[int, Stream], _Pending] = {}
        self._bars: dict[tuple[int, Stream], bytes] = {}
        self._drawn = False

    def feed(self, rank: int, stream: Stream, data: bytes) -> None:
        """Process output of ``rank``."""
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
        """Finish a rank's stream; an unfinished line ends here."""
        with self._lock:
            pending = self._pending.pop((rank, stream), _Pending())
            self._bars.pop((rank, stream), None)
            if pending.text:
                self._line(rank, stream, pending.text)
            self._draw()

    def say(self, text: str) -> None:
        """Write a message of the launcher to standard error."""
        with self._lock:
            self._write("stderr", text.encode(errors="replace") + b"\n")
            self._draw()

    def _line(self, rank: int, stream: Stream, line: bytes) -> None:
        shown = _visible(line)
        if shown or not line:  # skips escape sequences alone
            self._write(stream, _prefix(rank) + shown + b"\n")

    def _bar(self, rank: int, stream: Stream, pending: _Pending) -> None:
        """Keep only the last state of a line that is rewritten."""
        shown = _visible(pending.text)
        pending.text = b"\r" + shown + (b"\r" if pending.text.endswith(b"\r") else b"")
        if self._columns is not None:
            self._bars[rank, stream] = shown
        elif self._clock() - pending.shown_s >= BAR_SECONDS:
            pending.shown_s = self._clock()
            self._write(stream, _prefix(rank) + shown + b"\n")

    def _draw(self) -> None:
        """Draw the lowest rank's bar at the bottom of the terminal."""
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
        self._targets[stream].write(data)
        self._targets[stream].flush()


def terminal_columns(standard_error: BinaryIO) -> int | None:
    """Return the width of the terminal on standard error; None if it is not a terminal."""
    return shutil.get_terminal_size().columns if standard_error.isatty() else None


def _prefix(rank: int) -> bytes:
    return f"[rank {rank}] ".encode()


def _visible(line: bytes) -> bytes:
    """Return the text of a line that a terminal would show: the last part written."""
    parts = [part for part in _CURSOR.sub(b"", line).split(b"\r") if part]
    return parts[-1] if parts else b""
