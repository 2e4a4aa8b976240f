"""The file or stream that predictions are written to, in the format of its suffix, one record for each row."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from fullshard.errors import ConfigError

SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".txt")
"""Suffixes whose format is written; without a suffix it is JSON Lines."""

_COLUMNS = ("input", "prediction", "problem", "truncated")

Record = Mapping[str, Any]


def require_suffix(path: Path) -> None:
    """Check that the file's suffix names a format that can be written; any process.

    Raises:
        ConfigError: It does not.
    """
    if path.suffix and path.suffix.lower() not in SUFFIXES:
        raise ConfigError(
            f"-o {path}: predictions are written as {', '.join(SUFFIXES)}, by the file's suffix; got {path.suffix}."
        )


class RowWriter:
    """Writes records to an open text file: a line of JSON, an item of a list, a row of cells or a line of text each."""

    def __init__(self, out: TextIO, suffix: str) -> None:
        """Write to ``out`` in the format of ``suffix``; nothing is written yet."""
        self._out = out
        self._suffix = suffix.lower()
        self._cells: Any = None
        if self._suffix in (".csv", ".tsv"):
            self._cells = csv.writer(out, delimiter="," if self._suffix == ".csv" else "\t", lineterminator="\n")
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
                self._cells.writerow(_COLUMNS)
            self._cells.writerow([_cell(record.get(name)) for name in _COLUMNS])
        elif self._suffix == ".txt":
            # One line for each row: line breaks inside a text would shift all later rows.
            self._out.write(" ".join((record["prediction"] or "").splitlines()) + "\n")
        else:
            before = "" if self._suffix != ".json" else ",\n" if self._written else "[\n"
            after = "" if self._suffix == ".json" else "\n"
            self._out.write(before + json.dumps(record, ensure_ascii=False) + after)


def _cell(value: object) -> object:
    return "true" if value is True else "" if value is None else value
