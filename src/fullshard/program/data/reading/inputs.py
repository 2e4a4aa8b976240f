"""Reading of rows to predict for: only the source is read, every row counts, and files of plain lines are allowed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from fullshard.errors import DataError
from fullshard.program.data.examples import InputRow, InputTable, SourceSpec
from fullshard.program.data.reading.columns import parse_template
from fullshard.program.data.reading.split import read_sources, with_rows_of
from fullshard.program.data.reading.tables import empty, encoding_problem, open_lines
from fullshard.program.data.reading.wikihow import cleaned_article

LINES_SUFFIX = ".txt"
"""Suffix of files whose lines are the rows."""

_SOURCES = {"wikihow": "text", "phrasebank": "sentence"}
"""Source columns of formats that have their own reader for rows with targets."""


def read_inputs(path: Path, spec: SourceSpec, *, asks_turns: bool = False) -> InputTable:
    """Read the source of each row of a file; any process.

    In a ``.txt`` file each line is a row. In other files the source is the spec's ``template`` or ``source_column``,
    the only column, or the columns known by name, joined as in training; blank lines are skipped.

    Args:
        path: The file; its suffix gives the format.
        spec: Encoding and columns; the files it names are not read.
        asks_turns: Whether the rows are for a model trained on conversations: then the JSON text of a list of turns in
            a ``prompt`` without its completion is a conversation.

    Returns:
        All rows in order, each with the reason if it cannot be used.

    Raises:
        DataError: The file cannot be read or is empty, no row can be used, or the source column is ambiguous.
        ConfigError: The template is malformed.
    """
    lines = path.suffix.lower() == LINES_SUFFIX
    table = InputTable(_lines(path, spec.encoding)) if lines else _table(path, spec, asks_turns=asks_turns)
    first = table.rows[0]
    if all(row.problem is not None for row in table.rows):
        raise DataError(
            f"{path}: none of its {len(table.rows):,} rows can be used. The first is line {first.line}: "
            f"{first.problem}."
        )
    return table


def _table(path: Path, spec: SourceSpec, *, asks_turns: bool) -> InputTable:
    column = spec.source_column or _SOURCES.get(spec.format)
    # Where columns are given, the source also stands in for the target, which may not exist.
    target = spec.target_column
    if spec.template is not None:
        column, target = None, parse_template(spec.template)[0][0]
    elif column is not None:
        target = column
    here = replace(spec, dataset_name=None, format="auto", source_column=column, target_column=target)
    # Text with a target of its own was trained on as text, even if it is JSON.
    from_text = spec.target_column in (None, spec.source_column)
    own = with_rows_of(path, here, here.encoding)
    table = read_sources(own, "validation", from_text=from_text, asks_turns=asks_turns)
    if spec.format != "wikihow":
        return table
    return replace(table, rows=[replace(row, source=cleaned_article(row.source)) for row in table.rows])


def _lines(path: Path, encoding: str) -> list[InputRow]:
    with open_lines(path, encoding) as lines:
        texts = [line.rstrip("\r\n") for line in lines]
    if not texts:
        raise empty(path)
    return [_line(text, line, encoding) for line, text in enumerate(texts, start=1)]


def _line(text: str, line: int, encoding: str) -> InputRow:
    problem = encoding_problem(text, encoding)
    if problem is not None:
        return InputRow("", line, problem)  # undecodable text could not be written to the predictions either
    return InputRow(text, line, None if text.strip() else "it is empty")
