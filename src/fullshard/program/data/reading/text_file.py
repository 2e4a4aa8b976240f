"""Text files of rows: opening them, what they are by their first bytes, and where their lines start."""

from __future__ import annotations

import codecs
import gzip
import re
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from fullshard.errors import DataError

_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_OPTIONS = "data.encoding (of rows to predict or evaluate: --encoding)"
_LONE_CR = re.compile("\r(?!\n)")
_LOOKED_AT = 2**16
"""Characters of a file in which its line ends are looked for."""

_UNPACK = "unpack it, or compress it with gzip"
_PAGE = ("a web page", "download the file itself, not the page that shows it")
_NO_ROWS = (
    (b"PK\x03\x04", "a zip archive or an Excel workbook", "unpack the archive, or save the sheet as CSV"),
    (b"\xd0\xcf\x11\xe0", "an Excel workbook (.xls)", "save the sheet as CSV"),
    (b"PAR1", "a Parquet file", "give it the suffix .parquet, or set data.format: parquet"),
    (b"ARROW1", "an Arrow file", "convert it to Parquet"),
    (b"BZh", "compressed with bzip2", _UNPACK),
    (b"\xfd7zXZ", "compressed with xz", _UNPACK),
    (b"\x28\xb5\x2f\xfd", "compressed with zstandard", _UNPACK),
    (b"SQLite format 3\0", "an SQLite database", "export the table as CSV"),
    (b"%PDF-", "a PDF", "extract its table as CSV"),
    (b"version https://git-lfs", "a pointer of Git LFS", "fetch the file itself: git lfs pull"),
    (b"<!doctype html", *_PAGE),
    (b"<html", *_PAGE),
)
"""Beginnings of files that are no rows of text, what they are, and what to do."""


def encoding_problem(text: str, encoding: str) -> str | None:
    """Describe the first character that is not valid text, or return None; undecodable bytes are lone surrogates."""
    found = None if text.isascii() else _LONE_SURROGATE.search(text)
    if found is None:
        return None
    code = ord(found.group())
    if 0xDC80 <= code < 0xDD00:  # to these, surrogateescape decodes the bytes 0x80 to 0xff that are not valid text
        remedy = f"save the file as UTF-8, or set {_OPTIONS} to its encoding"
        return f"byte 0x{code - 0xDC00:02x} is not {encoding.upper()}: {remedy}"
    return f"\\u{code:04x} is half of a character"


@contextmanager
def open_lines(path: Path, encoding: str) -> Iterator[TextIO]:
    r"""Open a text file, gzipped or not, whose lines end only at ``\n``; at ``\r`` if that is how its lines end.

    A file is gzipped if its first bytes say so, whatever its name. A byte-order mark is removed. An undecodable byte
    becomes a lone surrogate, so that the rest of the file stays readable.

    Raises:
        DataError: The file cannot be read or decoded, is not text, or the encoding is unknown.
    """
    try:
        name = codecs.lookup(encoding).name
    except LookupError as error:
        raise DataError(f"data.encoding: {encoding!r} is not an encoding of Python, such as utf-8.") from error
    codec = "utf-8-sig" if name == "utf-8" else name
    try:
        opened = gzip.open if is_gzip(path) else open
        require_no_other_kind(path)
        with opened(path, "rt", encoding=codec, errors="surrogateescape", newline="") as text:
            end = "\r" if _ends_in_cr(text.read(_LOOKED_AT)) else "\n"  # type: ignore[reportArgumentType]
        with opened(path, "rt", encoding=codec, errors="surrogateescape", newline=end) as lines:
            yield lines  # type: ignore[reportReturnType]
    except (OSError, EOFError, zlib.error) as error:
        raise unreadable(path, error) from error
    except UnicodeError as error:
        raise DataError(f"{path} cannot be decoded as {encoding}: {error}. Set {_OPTIONS} to its encoding.") from error


def is_gzip(path: Path) -> bool:
    """Return whether a file is gzipped, by its first bytes; False for a missing file."""
    return _first_bytes(path).startswith(b"\x1f\x8b")


def is_parquet(path: Path) -> bool:
    """Return whether a file is Parquet, by its first bytes; False for a missing file."""
    return _first_bytes(path).startswith(b"PAR1")


def has_own_line_ends(path: Path, encoding: str) -> bool:
    r"""Return whether a file's lines end with ``\r`` alone, so that :func:`open_lines` ends them there."""
    with open_lines(path, encoding) as lines:
        return next(iter(lines), "").endswith("\r")


def _first_bytes(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(64)
    except OSError:
        return b""


def require_no_other_kind(path: Path) -> None:
    """Raise DataError, with what it is, for a file of another kind that is known by its first bytes."""
    first = _first_bytes(path).lstrip().lower()
    for mark, what, remedy in _NO_ROWS:
        # A text of lines may begin like a web page.
        if first.startswith(mark.lower()) and not (mark.startswith(b"<") and path.suffix.lower() == ".txt"):
            raise DataError(f"{path} is {what}, not a table that can be read: {remedy}.")


def _ends_in_cr(head: str) -> bool:
    r"""Return whether lines end with ``\r`` alone: the first line does, and more of them than with ``\n``."""
    lone = _LONE_CR.search(head)
    if lone is None or 0 <= head.find("\n") < lone.start():
        return False
    return len(_LONE_CR.findall(head)) > head.count("\n")


def unreadable(path: Path, error: Exception) -> DataError:
    """Return the error for a file that cannot be opened or read."""
    reason = getattr(error, "strerror", None) or error
    return DataError(f"{path} cannot be read: {reason}. Give the path of an existing file.")


def empty(path: Path) -> DataError:
    """Return the error for an empty file."""
    return DataError(f"{path} is empty ({path.stat().st_size} bytes): at least one row is needed.")


class LineStarts:
    """The byte at which each line of a UTF-8 file starts, noted while the file is read once."""

    def __init__(self, path: Path) -> None:
        """Begin at the first line, after a byte-order mark."""
        with path.open("rb") as file:
            marked = file.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8
        self._next = len(codecs.BOM_UTF8) if marked else 0
        self._starts: dict[int, int] = {}

    def noting(self, lines: Iterable[str]) -> Iterator[str]:
        """Yield the lines of :func:`open_lines` unchanged."""
        for number, line in enumerate(lines, start=1):
            self._starts[number] = self._next
            # Surrogates encode back to the undecodable bytes, so byte positions stay right.
            self._next += len(line.encode("utf-8", "surrogateescape"))
            yield line

    def take(self, line: int) -> int:
        """Return where a line starts, and forget the lines before it."""
        start = self._starts[line]
        self._starts = {number: place for number, place in self._starts.items() if number > line}
        return start
