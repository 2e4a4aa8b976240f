"""Quotes of a CSV or TSV file: whether they enclose cells, or are characters of the text like any other."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal

from fullshard.program.data.reading.delimiter import named_delimiter

Quoting = Literal["none", "csv"]

_SHARE_OF_ROWS = 0.9
"""A cell of several lines has swallowed rows if at least this share of its lines has as many cells as the header."""

_FEWEST_LINES = 4
"""Lines of such cells from which on they count, since the delimiters in a text of few lines may agree by chance. In a
comma-separated file of each cell, where they often do; otherwise of all together."""

_MANY_LINES = 10
"""Lines of a cell from which on it is named in a file of one column, where every line looks like a row."""

_SHOWN_CELLS = 5


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
        cells: list[str] | None
        try:
            cells = next(reader)
        except csv.Error:
            cells, self.is_broken = None, True
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
        blank = not line.replace(delimiter, "").strip() or (number == 1 and named_delimiter(line))
        if not blank:
            return number, line
    return 0, None
