"""Standard output and error that may become unwritable: ``| head``, a full disk, a terminal that goes away.

A program that trains outlives its output. What it cannot write is dropped: its result is in files. A command whose
result is its output ends with an error that is not an ``OSError``, which libraries treat as their own.
"""

from __future__ import annotations

import io
import os
import select
import sys
from typing import Any

from fullshard.errors import DataError


class UnreadOutputError(Exception):
    """Standard output has no reader any more, as after ``| head``; the command ends without a message."""


class _Descriptor(io.RawIOBase):
    """The file descriptor of a standard stream.

    Attributes:
        outlived: True if what cannot be written is dropped.
    """

    def __init__(self, number: int, name: str, *, outlived: bool) -> None:
        self.outlived = outlived
        self.name = f"<{name}>"
        self._number = number
        self._failed = False

    def fileno(self) -> int:
        return self._number

    def isatty(self) -> bool:
        return os.isatty(self._number)

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        """Write all of ``data``, which has bytes.

        Raises:
            UnreadOutputError: A pipe has no reader any more. Only the first time: Python flushes again when it ends.
            DataError: It cannot be written for another reason; also only the first time.
        """
        rest = memoryview(data).cast("B")
        size = len(rest)
        try:
            while rest:
                try:
                    rest = rest[os.write(self._number, rest) :]
                except BlockingIOError:  # another process made the pipe or terminal non-blocking
                    select.select([], [self._number], [])
        except OSError as error:
            self._fail(error)
        return size

    def _fail(self, error: OSError) -> None:
        first, self._failed = not self._failed, True
        if not first or self._number == 2:
            return
        if self.outlived:
            print(f"fullshard: standard output is lost ({error.strerror}); the run continues", file=sys.stderr)
        elif isinstance(error, BrokenPipeError):
            raise UnreadOutputError from error
        else:
            raise DataError(f"Standard output cannot be written: {error.strerror}.") from error


_guarded: dict[str, _Descriptor] = {}


def guard_streams(*, outlived: bool = False) -> None:
    """Guard this process's standard streams; called first in every process, and again to change ``outlived``.

    A closed one becomes /dev/null: the next file that is opened would get its number, and messages with it.

    Args:
        outlived: True if the program continues without its standard output. No program ends because of standard error.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)  # noqa: FBT003 (the function takes no keywords)
    os.close(number)
    if sys.stdin is None:
        sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)), encoding="utf-8")
    for number, name in ((1, "stdout"), (2, "stderr")):
        if name in _guarded:
            _guarded[name].outlived |= outlived
        elif getattr(sys, name) is getattr(sys, f"__{name}__"):  # else replaced, as by a test
            _guarded[name] = _Descriptor(number, name, outlived=outlived or name == "stderr")
            setattr(sys, name, _wrapped(_guarded[name], getattr(sys, name)))


def _wrapped(descriptor: _Descriptor, before: io.TextIOWrapper | None) -> io.TextIOWrapper:
    """Return a text stream with the settings that Python gave the stream before."""
    if before is None:
        return io.TextIOWrapper(io.BufferedWriter(descriptor), encoding="utf-8", errors="backslashreplace")
    before.flush()
    buffer = descriptor if before.write_through else io.BufferedWriter(descriptor)
    return io.TextIOWrapper(
        buffer,  # type: ignore[arg-type]  # a raw stream if Python runs unbuffered, as Python itself does
        encoding=before.encoding,
        errors=before.errors,
        line_buffering=before.line_buffering,
        write_through=before.write_through,
    )
