"""Rows of a user's file: CSV or JSON Lines in, examples with their line numbers out."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fullshard.errors import DataError

SUFFIXES = (".csv", ".jsonl")
SHOWN_PROBLEMS = 5
CELL_LIMIT_CHARACTERS = 2**31 - 1
"""The csv module refuses cells above 131,072 characters unless told otherwise; articles can be longer."""


@dataclass(frozen=True)
class Example:
    """One row of a data file.

    Attributes:
        source: The text the model reads, as the file has it.
        target: The text the model is to write, as the file has it.
        line: Line of the file that the row starts on, from 1; the header of a CSV is line 1.
    """

    source: str
    target: str
    line: int


@dataclass(frozen=True)
class _Row:
    """A row before it is checked: its cells by column name, or why it could not be read."""

    line: int
    cells: dict[str, object]
    problem: str | None = None


def read_rows(path: str | Path, source_column: str, target_column: str) -> list[Example]:
    """Read every row of a ``.csv`` or ``.jsonl`` file. Any rank may call it, alone.

    Files are UTF-8, with or without a byte-order mark. Line breaks, quotes and delimiters inside quoted CSV cells are
    kept as they are, and so is a JSON number: its text is what the file has. Empty lines are no rows.

    Args:
        path: The file; its suffix says how it is read.
        source_column: Name of the column (CSV) or key (JSON Lines) that holds the source text.
        target_column: Name of the column or key that holds the target text.

    Returns:
        The rows in the order of the file.

    Raises:
        DataError: The file is missing, empty, not UTF-8 or of another format, a column does not exist (the message
            lists those that do), or rows are bad (the message counts them and shows the first with their lines).
    """
    path = Path(path)
    text = _read_text(path)
    if path.suffix.lower() == ".csv":
        columns, rows = _csv_rows(path, text)
    else:
        columns, rows = _jsonl_rows(text)
    wanted = (source_column, target_column)
    _require_columns(path, columns, wanted, rows)
    problems = [(row.line, problem) for row in rows if (problem := row.problem or _cell_problem(row, wanted))]
    if problems:
        raise DataError(_bad_rows_message(path, problems, len(rows)))
    if not rows:
        raise DataError(f"{path} has a header but no rows: at least one row below the header is needed.")
    return [Example(str(row.cells[source_column]), str(row.cells[target_column]), row.line) for row in rows]


def _read_text(path: Path) -> str:
    """The whole file as text, without its byte-order mark."""
    if path.suffix.lower() not in SUFFIXES:
        kinds = " or ".join(SUFFIXES)
        found = repr(path.suffix) if path.suffix else "no suffix"
        raise DataError(f"{path}: a data file must end in {kinds}; got {found}. Convert it first.")
    try:
        raw = path.read_bytes()
    except OSError as error:
        reason = error.strerror or error
        raise DataError(f"{path} cannot be read: {reason}. Give the path of an existing file.") from error
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        byte = raw[error.start]
        raise DataError(f"{path}:{line}: byte 0x{byte:02x} is not UTF-8. Save the file as UTF-8.") from error
    if not text.strip():
        raise DataError(f"{path} is empty ({len(raw)} bytes): at least one row is needed.")
    return text


def _csv_rows(path: Path, text: str) -> tuple[list[str], list[_Row]]:
    """Header and rows of a CSV file; stops at a row whose quoting is broken, since nothing after it can be trusted."""
    with _long_cells():
        records = _csv_records(text)
        header = next(records)
        if header.problem:
            raise DataError(f"{path}:{header.line}: the header cannot be read: {header.problem}.")
        columns = [str(name) for name in header.cells.values()]
        rows = []
        for record in records:
            cells = [str(cell) for cell in record.cells.values()]
            problem = record.problem
            if problem is None and len(cells) != len(columns):
                problem = f"the row has {len(cells)} cells, the header {len(columns)}"
            rows.append(_Row(record.line, dict(zip(columns, cells, strict=False)), problem))
    return columns, rows


def _csv_records(text: str) -> Iterator[_Row]:
    """Records of a CSV text, cells keyed by position; empty lines are left out."""
    # Splitting on "\n" alone (csv does the rest) keeps "\r" and other line separators inside quoted cells.
    reader = csv.reader((line + "\n" for line in text.split("\n")), strict=True)
    line = 1
    try:
        for record in reader:
            if record:
                yield _Row(line, {str(position): cell for position, cell in enumerate(record)})
            line = reader.line_num + 1
    except csv.Error as error:
        yield _Row(line, {}, f"the CSV is malformed from here on ({error})")


@contextmanager
def _long_cells() -> Iterator[None]:
    """Lift the csv module's limit on a cell's length and put it back."""
    before = csv.field_size_limit(CELL_LIMIT_CHARACTERS)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def _jsonl_rows(text: str) -> tuple[list[str], list[_Row]]:
    """Keys that occur anywhere in a JSON Lines text, in order of appearance, and its rows."""
    columns: dict[str, None] = {}
    rows = []
    for line, raw in enumerate(text.split("\n"), start=1):
        if not raw.strip():
            continue
        try:
            # Numbers stay as they are written: 1.50 is not to become 1.5.
            value = json.loads(raw, parse_int=str, parse_float=str)
        except json.JSONDecodeError as error:
            rows.append(_Row(line, {}, f"broken JSON: {error.msg} at column {error.colno}"))
            continue
        if not isinstance(value, dict):
            rows.append(_Row(line, {}, f"the line holds a JSON {type(value).__name__}, not an object"))
            continue
        columns.update(dict.fromkeys(value))
        rows.append(_Row(line, value))
    return list(columns), rows


def _require_columns(path: Path, columns: list[str], wanted: tuple[str, str], rows: list[_Row]) -> None:
    """Raise when a wanted column does not exist or exists twice."""
    if not columns and rows:
        return  # no row could be read at all: the rows' own problems say more
    listed = ", ".join(repr(name) for name in columns)
    for name in wanted:
        if columns.count(name) == 0:
            raise DataError(f"{path} has no column {name!r}. Its columns: {listed}.")
        if columns.count(name) > 1:
            raise DataError(f"{path} has {columns.count(name)} columns named {name!r}: rename all but one.")


def _cell_problem(row: _Row, wanted: tuple[str, str]) -> str | None:
    """What is wrong with the wanted cells of a row, or None."""
    for name in wanted:
        cell = row.cells.get(name)
        if cell is None:
            return f"column {name!r} is missing"
        if not isinstance(cell, str):
            return f"column {name!r} holds a {type(cell).__name__}, not text"
        if not cell.strip():
            return f"column {name!r} is empty"
    return None


def _bad_rows_message(path: Path, problems: list[tuple[int, str]], num_rows: int) -> str:
    """The number of bad rows and the first few of them."""
    lines = [f"{path}: {len(problems)} of {num_rows} rows cannot be used. Mend or remove them:"]
    lines += [f"  {path}:{line}: {problem}" for line, problem in problems[:SHOWN_PROBLEMS]]
    if len(problems) > SHOWN_PROBLEMS:
        lines.append(f"  ... and {len(problems) - SHOWN_PROBLEMS} more")
    return "\n".join(lines)
