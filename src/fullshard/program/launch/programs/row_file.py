"""The file or stream that predictions are written to, in the format of its suffix, one record for each row."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from fullshard.program.data import InputRow, InputTable, cell_json, distinct
from fullshard.program.train.evaluation.predict import RowPrediction

FOUND = ("prediction", "problem", "truncated")
"""What is written after the columns of a row."""

Record = Mapping[str, Any]


@dataclass(frozen=True)
class RecordColumns:
    """The columns of a record: those of the row, then what was found for it."""

    row: tuple[str, ...] = ("input",)  # columns of the rows; of lines of text, one
    found: tuple[str, ...] = FOUND  # names of :data:`FOUND` in the record
    delimiter: str = ","  # between the cells of a .csv file
    quoted: bool = True  # False: quotes in cells are written as they are, like those of the table

    @classmethod
    def of(cls, table: InputTable, *, same_format: bool) -> RecordColumns:
        """Return the columns for a table; ``same_format`` if they are written in the format of the table."""
        if not table.columns:
            return cls()
        # A column of the rows keeps its name, also where it is that of something found.
        found = distinct((*table.columns, *FOUND))[len(table.columns) :]
        if not same_format:
            return cls(table.columns, found)
        return cls(table.columns, found, table.delimiter or ",", table.quoted)

    @property
    def names(self) -> tuple[str, ...]:
        """All columns, in order."""
        return (*self.row, *self.found)

    @property
    def notes(self) -> tuple[str, ...]:
        """A line for the user for each name that the rows have already."""
        renamed = [(old, new) for old, new in zip(FOUND, self.found, strict=True) if old != new]
        return tuple(f"the rows have a column {old!r} already: the new one is {new!r}" for old, new in renamed)

    def record(self, row: InputRow, made: RowPrediction) -> Record:
        """Return the record of a row."""
        values = made.as_dict()
        cells = {"input": values["input"]} if self.row == ("input",) and not row.cells else row.cells
        return {**cells, **{new: values[old] for old, new in zip(FOUND, self.found, strict=True) if old in values}}


class RowWriter:
    """Writes records to an open text file: a line of JSON, an item of a list, a row of cells or a line of text each."""

    def __init__(self, out: TextIO, suffix: str, columns: RecordColumns | None = None) -> None:
        """Write to ``out`` in the format of ``suffix``; nothing is written yet. No columns: those of lines of text."""
        self._out = out
        self._suffix = suffix.lower()
        self._columns = columns or RecordColumns()
        self._cells: Any = None
        if self._suffix in (".csv", ".tsv"):
            delimiter = self._columns.delimiter if self._suffix == ".csv" else "\t"
            self._cells = csv.writer(_Lines(out), delimiter=delimiter)
            if not self._columns.quoted:
                self._cells = _PlainRows(out, delimiter)
        self._written = 0

    def write(self, records: Sequence[Record]) -> None:
        """Write records and flush, so that a reader of a pipe sees them immediately.

        Raises:
            OSError: The pipe has no reader any more, or the file cannot be written.
        """
        for record in records:
            self._write(record)
            self._written += 1
        self._out.flush()

    def end(self) -> None:
        """Complete the file, even if there are no records.

        Raises:
            OSError: It cannot be written.
        """
        if self._suffix == ".json":
            self._out.write("\n]\n" if self._written else "[]\n")
        self._out.flush()

    def _write(self, record: Record) -> None:
        if self._cells is not None:
            if not self._written:
                self._cells.writerow(map(_encodable, self._columns.names))
            self._cells.writerow([_encodable(_cell(record.get(name))) for name in self._columns.names])
        elif self._suffix == ".txt":
            # One line for each row: line breaks inside a text would shift all later rows.
            self._out.write(" ".join((record[self._columns.found[0]] or "").splitlines()) + "\n")
        else:
            before = "" if self._suffix != ".json" else ",\n" if self._written else "[\n"
            after = "" if self._suffix == ".json" else "\n"
            self._out.write(before + _encodable(cell_json(record)) + after)


@dataclass(frozen=True)
class _Lines:
    r"""What ``csv`` writes its rows to: they end with ``\n``.

    ``csv`` is left to end them with ``\r\n``: it quotes line breaks only if they are part of its own line end.
    """

    out: TextIO

    def write(self, row: str) -> int:
        return self.out.write(row.removesuffix("\r\n") + "\n")


@dataclass(frozen=True)
class _PlainRows:
    """Writes rows without quoting, in which a cell cannot hold a delimiter or a line break: they become spaces."""

    out: TextIO
    delimiter: str

    def writerow(self, cells: Iterable[str]) -> None:
        plain = (" ".join(cell.replace(self.delimiter, " ").splitlines()) for cell in cells)
        self.out.write(self.delimiter.join(plain) + "\n")


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return json.dumps(value)  # NaN and infinity are text here
    return str(value) if isinstance(value, str) else cell_json(value)


def _encodable(text: str) -> str:
    """Return a text with halves of characters as escapes: a cell of another encoding or of JSON may have them."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()
