"""Readers of CSV, TSV, JSON Lines and JSON files, which yield rows with their line numbers."""

from __future__ import annotations

import codecs
import csv
import gzip
import json
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, count
from pathlib import Path
from typing import Any, Literal, Protocol, TextIO

from fullshard.errors import DataError
from fullshard.program.data.reading.delimiter import find_delimiter, named_delimiter, shown
from fullshard.program.data.reading.long_cells import LONG_CELLS
from fullshard.program.data.reading.quoting import Quotes, Quoting, look_at_quotes

_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_OPTIONS = "data.encoding (of rows to predict or evaluate: --encoding)"
_LONE_CR = re.compile("\r(?!\n)")
_LOOKED_AT = 2**16
"""Characters of a file in which its line ends are looked for."""

_UNPACK = "unpack it, or compress it with gzip"
_NO_TABLE = (
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
)
"""Beginnings of files that are no tables of text, what they are, and what to do."""

_PAGE = ("a web page", "download the file itself, not the page that shows it")
_WEB_PAGES = tuple((mark, *_PAGE) for mark in (b"<!doctype html", b"<html"))

_BYTE_ESCAPES = range(0xDC80, 0xDD00)
"""Code points to which surrogateescape decodes the bytes 0x80 to 0xff that are not valid text."""


@dataclass(frozen=True)
class Row:
    """A row before it is checked."""

    line: int  # line where it starts, from 1; its number if the table has no lines
    cells: Mapping[str, object]  # cells by column name
    problem: str | None = None  # why it could not be read, or None


class RowReader(Protocol):
    """Reader of one table; rows can be read several times."""

    @property
    def where(self) -> str:
        """Name of the table in messages."""
        ...

    @property
    def notes(self) -> tuple[str, ...]:
        """Messages for the user about how it is read."""
        ...

    def columns(self) -> list[str]:
        """Return the columns in order; a duplicate name is listed twice."""
        ...

    def rows(self, wanted: Sequence[str]) -> Iterator[Row]:
        """Yield the rows in order, with at least those of the wanted columns that they have."""
        ...


def encoding_problem(text: str, encoding: str) -> str | None:
    """Describe the first character that is not valid text, or return None; undecodable bytes are lone surrogates."""
    found = None if text.isascii() else _LONE_SURROGATE.search(text)
    if found is None:
        return None
    code = ord(found.group())
    if code in _BYTE_ESCAPES:
        byte = code - 0xDC00
        return f"byte 0x{byte:02x} is not {encoding.upper()}: save the file as UTF-8, or set {_OPTIONS} to its encoding"
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
    """Raise DataError, with what it is, for a file that is no table but of a kind that is known by its first bytes."""
    first = _first_bytes(path)
    # A text of lines may begin like a web page.
    for mark, what, remedy in _NO_TABLE if path.suffix.lower() == ".txt" else (*_NO_TABLE, *_WEB_PAGES):
        if first.lstrip().lower().startswith(mark.lower()):
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


def csv_records(lines: Iterable[str], delimiter: str, *, strict: bool) -> Iterator[tuple[int, list[str] | csv.Error]]:
    r"""Yield the records of a CSV text with the lines where they start; empty lines are skipped.

    Line breaks and other separators inside quoted cells are kept. An unreadable record yields its error, and reading
    continues with the next line.

    Args:
        lines: The text, split only at ``\n``.
        delimiter: Delimiter of cells.
        strict: Whether unclosed or unescaped quotes are an error.
    """
    with LONG_CELLS:
        reader = csv.reader(lines, delimiter=delimiter, strict=strict)
        line = 1
        while True:
            record: list[str] | csv.Error
            try:
                record = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                record = error
            if record:
                yield line, record
            line = reader.line_num + 1


def plain_records(lines: Iterable[str], delimiter: str) -> Iterator[tuple[int, list[str]]]:
    r"""Yield the cells of each line that is not empty, with its number; quotes are characters like any other.

    Args:
        lines: The text, split only at ``\n``.
        delimiter: Delimiter of cells.
    """
    for number, line in enumerate(lines, start=1):
        text = line.rstrip("\r\n")
        if text:
            yield number, text.split(delimiter)


def distinct(names: Sequence[str]) -> tuple[str, ...]:
    """Return names of which each comes once: further ones of a name have a number, as in ``id, id_2``.

    A number never makes a name that is among ``names``, also further on: that column keeps its own.
    """
    found: dict[str, None] = {}
    for name in names:
        numbered = (one for number in count(2) if (one := f"{name}_{number}") not in names)
        found[next(one for one in chain((name,), numbered) if one not in found)] = None
    return tuple(found)


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


class CsvFile:
    """A CSV or TSV file with a header."""

    def __init__(
        self, path: Path, encoding: str, delimiter: str | None = None, quoting: Literal["auto", "none", "csv"] = "auto"
    ) -> None:
        """Prepare to read ``path``; nothing is read yet.

        Args:
            path: The file.
            encoding: Its encoding.
            delimiter: Delimiter of cells; None: found in the header and the first rows.
            quoting: What quotes are (``data.quoting``); auto: found in one pass over the file.
        """
        self.where = str(path)
        self.starts: LineStarts | None = None  # set by a caller that needs the positions of lines
        self.named: tuple[str, ...] = ()  # messages about the file's name, for ``notes``
        self._path, self._encoding, self._given = path, encoding, delimiter
        self._asked: Literal["auto", "none", "csv"] = quoting

    @property
    def notes(self) -> tuple[str, ...]:
        """Messages if the delimiter was found and is not a comma, if quotes are text, or if they may join rows."""
        found = shown(self._delimiter)
        how = f"{self.where}: cells are separated by {found}, as its header and first rows show (data.delimiter)."
        quotes = None if self._asked == "none" else self._quotes.note(self.where)
        is_news = self._given is None and self._delimiter != ","
        return (*self.named, *([how] if is_news else []), *([] if quotes is None else [quotes]))

    @property
    def quoting(self) -> Quoting:
        """What quotes are: ``csv``, they enclose cells, or ``none``, they are characters of the text."""
        return self._quotes.quoting if self._asked == "auto" else self._asked

    @property
    def delimiter(self) -> str:
        """What separates its cells."""
        return self._delimiter

    def columns(self) -> list[str]:
        """Return the header's names, without blanks around them."""
        with open_lines(self._path, self._encoding) as lines:
            return self._header(self._records(lines))

    def rows(self, wanted: Sequence[str]) -> Iterator[Row]:
        """Yield the rows below the header, with all cells."""
        del wanted
        with open_lines(self._path, self._encoding) as text:
            lines = text if self.starts is None else self.starts.noting(text)
            records = self._records(lines)
            header = distinct(self._header(records))
            for line, record in records:
                if isinstance(record, csv.Error):
                    raise DataError(
                        f"{self.where}:{line}: the CSV is malformed from here on ({record}), and the rest cannot be "
                        "parsed; data.max_bad_rows does not help. Put cells with quotes, delimiters or line "
                        "breaks in double quotes and double the quotes in them, or convert the file to JSON Lines. "
                        "If quotes are characters of its text, set data.quoting: none."
                    )
                problem = encoding_problem("".join(record), self._encoding)
                if problem is None and len(record) != len(header):
                    problem = f"the row has {len(record)} cells, the header {len(header)}"
                yield Row(line, dict(zip(header, record, strict=False)), problem)

    def row_at(self, lines: Iterator[str]) -> Row:
        """Return the row that starts at the first of the lines, which :meth:`rows` yielded before; its line is 0."""
        _, record = next(self._records(lines))
        assert not isinstance(record, csv.Error), "a row that was read before"
        return Row(0, dict(zip(self._names, record, strict=True)))

    @cached_property
    def _names(self) -> tuple[str, ...]:
        return distinct(self.columns())

    @cached_property
    def _delimiter(self) -> str:
        if self._given is not None:
            return self._given
        with open_lines(self._path, self._encoding) as lines:
            return find_delimiter(lines, self._path, self._asked)

    @cached_property
    def _quotes(self) -> Quotes:
        """What a pass over the file says of its quotes; as asked if the user said what they are."""
        with open_lines(self._path, self._encoding) as lines, LONG_CELLS:
            found = look_at_quotes(lines, self._delimiter)
        return found if self._asked == "auto" else Quotes(self._asked, found.swallowing)

    def _records(self, lines: Iterable[str]) -> Iterator[tuple[int, list[str] | csv.Error]]:
        if self.quoting == "none":
            return plain_records(lines, self._delimiter)
        return csv_records(lines, self._delimiter, strict=True)

    def _header(self, records: Iterator[tuple[int, list[str] | csv.Error]]) -> list[str]:
        """Consume and return the first record that is not blank."""
        for line, record in records:
            if isinstance(record, csv.Error):
                problem = str(record)
            elif not "".join(record).strip() or (line == 1 and named_delimiter(self._delimiter.join(record))):
                continue
            else:
                problem = encoding_problem("".join(record), self._encoding)
                if problem is None:
                    return [name.strip() for name in record]
            raise DataError(f"{self.where}:{line}: the header cannot be read: {problem}.")
        raise empty(self._path)


class JsonLinesFile:
    """A file with a JSON object on each line."""

    notes: tuple[str, ...] = ()

    def __init__(self, path: Path, encoding: str) -> None:
        """Prepare to read ``path``; nothing is read yet."""
        self.where = str(path)
        self.starts: LineStarts | None = None  # set by a caller that needs the positions of lines
        self._path, self._encoding = path, encoding

    def columns(self) -> list[str]:
        """Return the keys of all objects, in order of appearance."""
        seen: dict[str, None] = {}
        blank = True
        for row in self.rows(()):
            blank = False
            seen.update(dict.fromkeys(row.cells))
        if blank:
            raise empty(self._path)
        return list(seen)

    def rows(self, wanted: Sequence[str]) -> Iterator[Row]:
        """Yield the objects; blank lines are skipped."""
        del wanted
        with open_lines(self._path, self._encoding) as text:
            lines = text if self.starts is None else self.starts.noting(text)
            for line, raw in enumerate(lines, start=1):
                if raw.strip():
                    problem = encoding_problem(raw, self._encoding)
                    yield Row(line, {}, problem) if problem else _json_row(line, raw.rstrip("\r\n"))

    def row_at(self, lines: Iterator[str]) -> Row:
        """Return the row on the first of the lines, which :meth:`rows` yielded before; its line is 0."""
        return _json_row(0, next(lines).rstrip("\r\n"))


class JsonFile:
    """A JSON file: a list of objects, an object with one such list, or an object of columns."""

    notes: tuple[str, ...] = ()

    def __init__(self, path: Path, encoding: str) -> None:
        """Prepare to read ``path``; nothing is read yet."""
        self.where = str(path)
        self._path, self._encoding = path, encoding

    def columns(self) -> list[str]:
        """Return the keys of all objects, in order of appearance."""
        return list(dict.fromkeys(key for item in self._items if isinstance(item, dict) for key in item))

    def rows(self, wanted: Sequence[str]) -> Iterator[Row]:
        """Yield the objects, numbered from 1."""
        del wanted
        for number, item in enumerate(self._items, start=1):
            if not isinstance(item, dict):
                yield Row(number, {}, f"the item is a JSON {type(item).__name__}, not an object")
                continue
            texts = (cell for cell in item.values() if isinstance(cell, str))
            yield Row(number, item, next(filter(None, (encoding_problem(t, self._encoding) for t in texts)), None))

    @cached_property
    def _items(self) -> list[Any]:
        """All rows; JSON can only be parsed completely."""
        with open_lines(self._path, self._encoding) as lines:
            text = lines.read()
        if not text.strip():
            raise empty(self._path)
        try:
            value = parse_json(text)
        except ValueError as error:
            hint = " If each line is an object, set data.format: jsonl." if "Extra data" in str(error) else ""
            raise DataError(f"{self._path} is not valid JSON: {error}.{hint}") from error
        items = _items_of(value)
        if items is None:
            raise DataError(
                f"{self._path} is neither a list of objects, nor an object with one such list, nor an object of "
                f"columns of equal length; it is a JSON {type(value).__name__}. Convert it to JSON Lines."
            )
        if not items:
            raise DataError(f"{self._path} has no rows: at least one is needed.")
        return items


class Number(str):
    """A JSON number in its original notation."""

    __slots__ = ()


def parse_json(text: str) -> Any:
    """Parse a JSON value, keeping numbers as written, as :class:`Number`: 1.50 must not become 1.5.

    Raises:
        ValueError: It is malformed, or nested too deeply.
    """
    try:
        return json.loads(text, parse_int=Number, parse_float=Number)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _json_row(line: int, raw: str) -> Row:
    """Parse the object on one line."""
    try:
        value = parse_json(raw)
    except json.JSONDecodeError as error:
        return Row(line, {}, f"broken JSON: {error.msg.removesuffix(' at')} at column {error.colno}")
    except ValueError as error:
        return Row(line, {}, f"broken JSON: {error}")
    if not isinstance(value, dict):
        return Row(line, {}, f"the line is a JSON {type(value).__name__}, not an object")
    return Row(line, value)


def _items_of(value: Any) -> list[Any] | None:
    """Return the rows of a JSON value; None if it is not a table."""
    if isinstance(value, list):
        return value
    if not isinstance(value, dict) or not value:
        return None
    lists = [item for item in value.values() if isinstance(item, list) and any(isinstance(row, dict) for row in item)]
    if len(lists) == 1:
        return lists[0]
    # pandas writes each column as an object from row number to cell.
    columns = [list(item.values()) if isinstance(item, dict) else item for item in value.values()]
    if not all(isinstance(column, list) and len(column) == len(columns[0]) for column in columns):
        return None
    return [dict(zip(value, cells, strict=True)) for cells in zip(*columns, strict=True)]
