"""The delimiter of a CSV file: found in its header and first rows, outside quoted cells."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Literal

from fullshard.errors import DataError

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
    fitting = list(counts)
    if "," in fitting or not fitting:
        return ","
    if len(fitting) > 1:
        listed = " or ".join(f"{shown(one)} ({counts[one] + 1} columns)" for one in fitting)
        raise DataError(f"{path}: cells may be separated by {listed}: set data.delimiter to the one that does.")
    return fitting[0]


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
