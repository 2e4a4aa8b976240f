"""The index of a table that is too large to tokenize first: the start of each usable row, found in one pass."""

from __future__ import annotations

import json
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from itertools import compress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from fullshard.errors import DataError
from fullshard.program.data.examples import Example, SourceSpec
from fullshard.program.data.reading.conversations import SystemTurnCounts, answers_as_rows
from fullshard.program.data.reading.holdout import Sides
from fullshard.program.data.reading.opened import OpenedTable
from fullshard.program.data.reading.sample import Sample, sample_notes
from fullshard.program.data.reading.split import open_table, sides_of
from fullshard.program.data.reading.tables import (
    CsvFile,
    JsonFile,
    JsonLinesFile,
    LineStarts,
    Row,
    has_own_line_ends,
    is_gzip,
)

T = TypeVar("T")

ROWS_NAME = "rows.jsonl"
"""Name of the copy of the rows that a cache entry keeps for a table without access to single rows."""

ANSWERS_NAME = "answers"
"""Name of the file that holds, for each row, the number of the answer within its conversation, from 0."""

_FLUSHED_ROWS = 1 << 16
_COLUMNS = {"starts": "q", "source_characters": "i", "target_characters": "i", "weights": "d", ANSWERS_NAME: "i"}
"""The index's files, each with its :mod:`array` type code."""


def index_to(
    directory: Path, spec: SourceSpec, sample: Sample | None, most_labels: int, *, by_answer: bool = False
) -> dict[str, Any]:
    """Write where each usable training row starts, and its lengths in characters; a ``build`` for ``cached``.

    Memory does not grow with the file (a sample takes some bytes a row while it is drawn). A CSV, TSV or JSON Lines
    file in UTF-8 is read in place later. Other tables, such as Parquet or compressed files, have no access to single
    rows: the columns in use are copied as JSON Lines.

    Args:
        directory: Directory of the files.
        spec: Where the rows come from.
        sample: The rows of the table to draw, for which it is read once more; None: all.
        most_labels: Maximum distinct targets of a label set.
        by_answer: Make a row of each learned answer of a conversation, with the history before it.

    Returns:
        Columns, notes, skipped rows, labels, and other values for ``open_stream``.

    Raises:
        DataError, ConfigError: See :func:`~fullshard.program.data.read_split`.
    """
    drawn = None if sample is None else sample.drawn(_texts(spec))
    table = open_table(spec, "train")
    if isinstance(table.reader, JsonFile):
        raise DataError(
            f"{table.reader.where} is JSON in one piece, which data.streaming cannot read row by row. Convert it to "
            "JSON Lines, or leave streaming out."
        )
    in_place, sides = reads_in_place(table, spec), sides_of(spec, table.reader.where)
    targets, system_turns, rows = TargetCounts(most_labels), SystemTurnCounts(), 0
    with ExitStack() as stack:
        idle = {name for name, wanted in (("weights", spec.weight_column), (ANSWERS_NAME, by_answer)) if not wanted}
        files = {name: stack.enter_context((directory / name).open("wb")) for name in _COLUMNS if name not in idle}
        columns = {name: array(_COLUMNS[name]) for name in files}
        every = _training_rows(table, sides)
        if in_place:
            found = _drawn(_in_place(table, every), drawn)
        else:
            found = _copied(table, _drawn(every, drawn), directory / ROWS_NAME)
        for start, example in found:
            system_turns.add(example)
            for answer, row in enumerate(answers_as_rows([example]) if by_answer else [example]):
                rows += 1
                targets.add(row.target)
                values = (start, len(row.source), len(row.target), row.weight, answer)
                for name, value in zip(_COLUMNS, values, strict=True):
                    if name in columns:
                        columns[name].append(value)
            if len(columns["starts"]) >= _FLUSHED_ROWS:
                _flush(columns, files)
        _flush(columns, files)
    notes = table.notes() if sides is None else (*table.notes(), sides.note())
    notes += () if drawn is None else sample_notes(drawn, "train")
    return {
        "rows": rows,
        "columns": table.known,
        "notes": notes,
        "skipped": table.bad.beyond_shown,
        "conversations": table.holds_conversations,
        "system_turns": system_turns.common,
        "in_place": in_place,
        "quoting": table.reader.quoting if isinstance(table.reader, CsvFile) else None,
        "labels": targets.labels,
        "majority": targets.majority,
    }


def reads_in_place(table: OpenedTable, spec: SourceSpec) -> bool:
    """Return True if single rows of a table can be read where they are."""
    if not isinstance(table.reader, CsvFile | JsonLinesFile):
        return False
    path, is_utf8 = Path(table.reader.where), spec.encoding.lower().replace("_", "-") in ("utf-8", "utf8", "ascii")
    return is_utf8 and not is_gzip(path) and not has_own_line_ends(path, spec.encoding)


class TargetCounts:
    """Counts distinct targets of a table of any size in little memory.

    Attributes:
        labels: Number of rows of each target; None if there are too many distinct ones.
    """

    def __init__(self, most: int) -> None:
        """Start empty; ``most`` is the maximum number of distinct targets."""
        self.labels: dict[str, int] | None = {}
        self._most = most
        self._counts: Counter[str] = Counter()

    def add(self, target: str) -> None:
        """Count a row, until there are too many targets."""
        if self.labels is None:
            return
        self._counts[target] += 1
        self.labels = self._counts if len(self._counts) <= self._most else None

    @property
    def majority(self) -> str:
        """The most frequent target, the first of equals; with too many targets, among the rows counted so far."""
        return self._counts.most_common(1)[0][0]


def training_texts(spec: SourceSpec, sample: Sample | None) -> Iterator[Example]:
    """Yield the training rows, or a sample of them, without keeping them; any process.

    Raises:
        DataError, ConfigError: See :func:`~fullshard.program.data.read_split`; a limit on unusable rows is not applied.
    """
    return _drawn(_texts(spec), None if sample is None else sample.drawn(_texts(spec)))


def _texts(spec: SourceSpec) -> Iterator[Example]:
    table = open_table(spec, "train")
    return (example for _, example in _training_rows(table, sides_of(spec, table.reader.where)))


def _training_rows(table: OpenedTable, sides: Sides | None) -> Iterator[tuple[Row, Example]]:
    """Yield every usable row that is not held out, with its example."""
    for row, example in table.usable_rows():
        if sides is None or sides.side(example) == "train":
            yield row, example


def _drawn(rows: Iterable[T], drawn: NDArray[np.bool_] | None) -> Iterator[T]:
    """Yield the drawn ones of all rows, or all of them; reads to the end in either case, so that rows are counted."""
    return iter(rows) if drawn is None else compress(rows, drawn)


def _in_place(table: OpenedTable, rows: Iterable[tuple[Row, Example]]) -> Iterator[tuple[int, Example]]:
    """Yield the byte offset of each row of a table, and its example."""
    reader = table.reader
    assert isinstance(reader, CsvFile | JsonLinesFile)
    reader.starts = starts = LineStarts(Path(reader.where))
    for row, example in rows:
        yield starts.take(row.line), example


def _copied(table: OpenedTable, rows: Iterable[tuple[Row, Example]], path: Path) -> Iterator[tuple[int, Example]]:
    """Copy each row to a file as JSON; yield its byte offset there, and its example."""
    start = 0
    with path.open("wb") as file:
        for row, example in rows:
            line = _as_line(row, table.wanted)
            file.write(line)
            yield start, example
            start += len(line)


def _as_line(row: Row, wanted: list[str]) -> bytes:
    """Return the cells in use as a line of JSON; types that JSON lacks, such as Decimal, become text."""
    return json.dumps({name: row.cells.get(name) for name in wanted}, default=str).encode() + b"\n"


def _flush(columns: dict[str, array[Any]], files: dict[str, Any]) -> None:
    for name, column in columns.items():
        column.tofile(files[name])
        del column[:]
