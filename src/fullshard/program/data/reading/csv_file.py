"""CSV and TSV files: their delimiter, what their quotes are, and their rows."""

from __future__ import annotations

import csv
import re
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import Literal

from fullshard.errors import DataError
from fullshard.program.data.reading.row import Row, TextRows, distinct
from fullshard.program.data.reading.text_file import empty, encoding_problem, open_lines

Quoting = Literal["none", "csv"]

DELIMITERS = (",", ";", "\t", "|")
"""Delimiters that are recognised."""

_FIRST_ROWS = 20
"""Rows below the header that must have as many delimiters as the header."""

_MOST_LINES = 100
"""Lines in which header and first rows are looked for if quotes are text."""

# A quote opens a cell only where a cell begins, whichever delimiter the file has. Possessive, so that a doubled quote
# at the end of a line is never taken for the closing one.
_OPENING = r'(?:^|(?<=[,;\t|]))"'
_INSIDE = r'[^"]*+(?:""[^"]*+)*+'
_QUOTED_CELL = re.compile(f'{_OPENING}{_INSIDE}"')
_OPEN_CELL = re.compile(_OPENING)
_REST_OF_CELL = re.compile(f'{_INSIDE}"')
_BLANK = ' ",;\t|\r\n'
"""Characters of a line that cannot be a header."""

_SEPARATOR_LINE = re.compile('^"?sep=(.)"?$', re.IGNORECASE)
"""A first line that Excel writes and reads, which names the file's delimiter."""

_SHARE_OF_ROWS = 0.9
"""A cell of several lines has swallowed rows if at least this share of its lines has as many cells as the header."""

_FEWEST_LINES = 4
"""Lines of such cells from which on they count, since the delimiters in a text of few lines may agree by chance. In a
comma-separated file of each cell, where they often do; otherwise of all together."""

_MANY_LINES = 10
"""Lines of a cell from which on it is named in a file of one column, where every line looks like a row."""

_SHOWN_CELLS = 5


class _LongCells:
    """Raises the csv module's limit of 131,072 characters a cell while a file is read, then restores it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._readers = self._before = 0

    def __enter__(self) -> None:
        with self._lock:
            if self._readers == 0:  # the limit is global to the module and shared by all threads
                self._before = csv.field_size_limit(2**31 - 1)
            self._readers += 1

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            self._readers -= 1
            if self._readers == 0:
                csv.field_size_limit(self._before)


_LONG_CELLS = _LongCells()


def csv_records(lines: Iterable[str], delimiter: str, *, strict: bool) -> Iterator[tuple[int, list[str] | csv.Error]]:
    r"""Yield the records of a CSV text with the lines where they start; empty lines are skipped.

    Line breaks and other separators inside quoted cells are kept; ``lines`` is split only at ``\n``. An unreadable
    record yields its error, and reading continues with the next line. If ``strict``, unclosed or unescaped quotes are
    errors.
    """
    with _LONG_CELLS:
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


class CsvFile(TextRows):
    """A CSV or TSV file with a header."""

    def __init__(
        self, path: Path, encoding: str, delimiter: str | None = None, quoting: Literal["auto", "none", "csv"] = "auto"
    ) -> None:
        """Prepare to read ``path``.

        The ``delimiter`` of None is found in the header and the first rows, and what quotes are (``quoting``, as
        ``data.quoting``) with auto in one pass over the file.
        """
        super().__init__(path, encoding)
        self._given = delimiter
        self._asked: Literal["auto", "none", "csv"] = quoting

    @property
    def notes(self) -> tuple[str, ...]:
        """Messages if the delimiter was found and is not a comma, if quotes are text, or if they may join rows."""
        found = shown(self.delimiter)
        how = f"{self.where}: cells are separated by {found}, as its header and first rows show (data.delimiter)."
        quotes = None if self._asked == "none" else self._quotes.note(self.where)
        is_news = self._given is None and self.delimiter != ","
        return (*self.named, *([how] if is_news else []), *([] if quotes is None else [quotes]))

    @property
    def quoting(self) -> Quoting:
        """What quotes are: ``csv``, they enclose cells, or ``none``, they are characters of the text."""
        return self._quotes.quoting if self._asked == "auto" else self._asked

    @cached_property
    def delimiter(self) -> str:
        """What separates its cells."""
        if self._given is not None:
            return self._given
        with open_lines(self._path, self._encoding) as lines:
            return find_delimiter(lines, self._path, self._asked)

    def columns(self) -> list[str]:
        """Return the header's names, without blanks around them."""
        with open_lines(self._path, self._encoding) as lines:
            return self._header(self._records(lines))

    def rows(self, wanted: Sequence[str]) -> Iterator[Row]:
        """Yield the rows below the header, with all cells."""
        del wanted
        with self._lines() as lines:
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
    def _quotes(self) -> Quotes:
        """What a pass over the file says of its quotes; as asked if the user said what they are."""
        with open_lines(self._path, self._encoding) as lines, _LONG_CELLS:
            found = look_at_quotes(lines, self.delimiter)
        return found if self._asked == "auto" else Quotes(self._asked, found.swallowing)

    def _records(self, lines: Iterable[str]) -> Iterator[tuple[int, list[str] | csv.Error]]:
        if self.quoting == "none":  # quotes are characters like any other
            texts = ((line, text.rstrip("\r\n")) for line, text in enumerate(lines, start=1))
            return ((line, text.split(self.delimiter)) for line, text in texts if text)
        return csv_records(lines, self.delimiter, strict=True)

    def _header(self, records: Iterator[tuple[int, list[str] | csv.Error]]) -> list[str]:
        """Consume and return the first record that is not blank."""
        for line, record in records:
            if isinstance(record, csv.Error):
                problem = str(record)
            elif not "".join(record).strip() or (line == 1 and named_delimiter(self.delimiter.join(record))):
                continue
            else:
                problem = encoding_problem("".join(record), self._encoding)
                if problem is None:
                    return [name.strip() for name in record]
            raise DataError(f"{self.where}:{line}: the header cannot be read: {problem}.")
        raise empty(self._path)


def named_delimiter(line: str) -> str | None:
    """Return the delimiter that a first line such as ``sep=;`` names; None for any other line."""
    found = _SEPARATOR_LINE.match(line.rstrip("\r\n"))
    return found.group(1) if found else None


def find_delimiter(lines: Iterable[str], path: Path, quoting: Literal["auto", "none", "csv"] = "csv") -> str:
    r"""Return the delimiter of a CSV text whose ``lines`` end at ``\n``; a comma wherever that is possible.

    A first line ``sep=;`` names it. Otherwise a delimiter is possible if it occurs in the header and equally often in
    each of the first 20 rows, not counting those inside quoted cells, unless ``quoting`` (``data.quoting``) says that
    quotes are text; with auto, lone quotes hide none. If none is possible, the file has one column or broken rows, and
    a comma is returned.

    Raises:
        DataError: Several are possible, but not the comma.
    """
    lines = iter(lines)
    first = next(lines, "")
    named = named_delimiter(first)
    if named is not None:
        return named
    counts = possible_delimiters(chain([first], lines), quoting)
    if "," in counts or not counts:
        return ","
    if len(counts) > 1:
        listed = " or ".join(f"{shown(one)} ({count + 1} columns)" for one, count in counts.items())
        raise DataError(f"{path}: cells may be separated by {listed}: set data.delimiter to the one that does.")
    return next(iter(counts))


def possible_delimiters(lines: Iterable[str], quoting: Literal["auto", "none", "csv"]) -> dict[str, int]:
    """Return the delimiters that are possible, as for :func:`find_delimiter`, and how often each is in a row."""
    lines = iter(lines)
    head = list(islice(lines, _MOST_LINES + 1))
    counts = {} if quoting == "none" else _fitting(_unquoted(chain(head, lines)))
    return counts or ({} if quoting == "csv" else _fitting(head))


def _fitting(records: Iterable[str]) -> dict[str, int]:
    """Return the delimiters that occur in a header and equally often in each of the first rows, and how often."""
    records = iter(records)
    header = next((record for record in records if record.strip(_BLANK)), "")
    rows = list(islice((record for record in records if record.strip("\r\n")), _FIRST_ROWS))
    counts = {one: header.count(one) for one in DELIMITERS}
    return {one: count for one, count in counts.items() if count and all(row.count(one) == count for row in rows)}


def shown(delimiter: str) -> str:
    """Return a delimiter as text for messages."""
    return "a tab" if delimiter == "\t" else repr(delimiter)


def _unquoted(lines: Iterable[str]) -> Iterator[str]:
    """Yield each record without its quoted cells; a record of several lines counts once."""
    record, inside = "", False
    for line in lines:
        rest = line
        if inside:
            end = _REST_OF_CELL.match(line)
            if end is None:
                continue
            rest = line[end.end() :]
        # A mark stands for a quoted cell, so that a record of quoted cells only is not a blank line.
        rest = _QUOTED_CELL.sub("x", rest)
        opening = _OPEN_CELL.search(rest)
        inside = opening is not None
        record += "x" + rest[: opening.start()] if opening else rest
        if not inside:
            yield record
            record = ""


@dataclass
class Quotes:
    """What the quotes of a file are, by how its lines and cells come out."""

    quoting: Quoting = "csv"
    # cells, by the first and the last line of their rows, whose line breaks may be those of rows
    swallowing: list[tuple[int, int]] = field(default_factory=list)

    def note(self, where: str) -> str | None:
        """Return the message about cells that swallow rows, or about quotes that are text; None: there is nothing."""
        if not self.swallowing:
            return None
        first, last = self.swallowing[0]
        if self.quoting == "none":
            joined = f"lines {first} to {last} would be one row" if last > first else f"line {first} would be broken"
            return (
                f"{where}: quotes are characters of the text (data.quoting: none): they do not pair up cell by cell. "
                f"As quotes of CSV, {joined}."
            )
        shown = ", ".join(f"{first} to {last}" for first, last in self.swallowing[:_SHOWN_CELLS])
        more = f" and {len(self.swallowing) - _SHOWN_CELLS:,} more" if len(self.swallowing) > _SHOWN_CELLS else ""
        return (
            f"{where}: a quoted cell goes over lines {shown}{more}, which look like rows of their own. If the quotes "
            "there are characters of the text, set data.quoting: none."
        )


def look_at_quotes(lines: Iterator[str], delimiter: str) -> Quotes:
    r"""Return what the quotes of a CSV text are, whose ``lines`` end at ``\n``; one pass over all of them.

    Both readings are compared where a quote begins a cell. Quotes enclose cells as long as the rows that only this
    reading makes complete, and the cells that they enclose, are at least as many as the lines that it joins or cannot
    read although each has as many cells as the header. Quotes in the header's names always enclose cells.
    """
    opens_cell = re.compile(f'(?:^|{re.escape(delimiter)})"')
    number, header = _header(lines, delimiter)
    if header is None or opens_cell.search(header):
        return Quotes()
    width = header.count(delimiter) + 1
    quotes, enclosing, swallowed, broken = Quotes(), 0, 0, False
    for line in lines:
        number += 1
        if not opens_cell.search(line):
            continue
        record = _Record(lines, delimiter, width)
        counts = record.read(line)
        if record.swallows:
            swallowed += record.filled if counts else 0
            broken = broken or record.is_broken
            quotes.swallowing.append((number, number + record.lines - 1))
        else:
            enclosing += counts
        number += record.lines - 1
    if swallowed > enclosing and (broken or swallowed >= _FEWEST_LINES):
        quotes.quoting = "none"
    return quotes


class _Record:
    """One record that a quote may have made longer than its line."""

    def __init__(self, rest: Iterator[str], delimiter: str, width: int) -> None:
        self.lines = self.filled = 0  # its lines, and those that are not blank
        self.swallows = False  # whether its lines look like rows of their own
        self.is_broken = False  # whether it cannot be read with quotes that enclose cells
        self._rest, self._delimiter, self._width = rest, delimiter, width
        self._rows = 0

    def read(self, first: str) -> bool:
        """Read the record that starts with a line, and return whether it says what the file's quotes are."""
        reader = csv.reader(self._counted(chain([first], self._rest)), delimiter=self._delimiter, strict=True)
        cells: list[str] | None = None
        try:
            cells = next(reader)
        except csv.Error:
            self.is_broken = True
        is_complete = cells is not None and len(cells) == self._width
        look_like_rows = self._rows >= _SHARE_OF_ROWS * self.filled
        if self._width == 1 and cells is not None:
            self.swallows = self.lines > _MANY_LINES
            return not self.swallows and is_complete
        # Doubled quotes are how CSV writes a quote: a text without quoting hardly has them.
        has_doubled = any('"' in cell and ("\n" in cell or "\r" in cell) for cell in cells or ())
        self.swallows = look_like_rows and not has_doubled and (self.lines > 1 or cells is None)
        is_chance = is_complete and self._delimiter == "," and self.filled < _FEWEST_LINES
        return not is_chance if self.swallows else is_complete

    def _counted(self, lines: Iterator[str]) -> Iterator[str]:
        for line in lines:
            self.lines += 1
            self._rows += line.count(self._delimiter) + 1 == self._width
            self.filled += bool(line.strip())
            yield line


def _header(lines: Iterator[str], delimiter: str) -> tuple[int, str | None]:
    """Consume the lines up to the first that is not blank; return its number and text."""
    for number, line in enumerate(lines, start=1):
        if line.replace(delimiter, "").strip() and not (number == 1 and named_delimiter(line)):
            return number, line
    return 0, None
