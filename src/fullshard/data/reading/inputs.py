"""Rows to predict for: only the source is read, and a file may have plain lines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from fullshard.data.examples import Example, SourceSpec, Table
from fullshard.data.reading.columns import parse_template
from fullshard.data.reading.split import read_sources, read_split
from fullshard.data.reading.wikihow import cleaned_article
from fullshard.errors import DataError

LINES_SUFFIX = ".txt"
"""Suffix of files whose lines are the rows."""

_SOURCES = {"wikihow": "text", "phrasebank": "sentence"}
"""Source columns of formats that have their own reader for rows with targets."""


def read_inputs(path: Path, spec: SourceSpec) -> Table:
    """Read the sources of a file's rows. Any process can call it.

    In a ``.txt`` file each line is a row. In other files the source is the spec's ``template`` or ``source_column``,
    the only column, or the columns known by name, joined as in training. Empty lines are skipped.

    Args:
        path: The file; its suffix gives the format.
        spec: Encoding and columns; the files it names are not read.

    Returns:
        The rows in order; their references are not meaningful.

    Raises:
        DataError: The file cannot be read or is empty, or the source column is ambiguous.
        ConfigError: The template is malformed.
    """
    if path.suffix.lower() == LINES_SUFFIX:
        return Table(_lines(path, spec.encoding))
    column = spec.source_column or _SOURCES.get(spec.format)
    here = replace(
        spec,
        train_file=None,
        validation_file=path,
        validation_fraction=0.0,
        dataset_name=None,
        format="auto",
        source_column=column if spec.template is None else None,
    )
    if spec.template is not None:
        names, _ = parse_template(spec.template)
        return read_split(replace(here, target_column=names[0]), "validation")
    if column is None:
        return read_sources(here, "validation")
    # The source is read as its own target, a column that always exists.
    table = read_split(replace(here, source_column=column, target_column=column), "validation")
    if spec.format != "wikihow":
        return table
    return replace(table, examples=[replace(row, source=cleaned_article(row.source)) for row in table.examples])


def _lines(path: Path, encoding: str) -> list[Example]:
    try:
        text = path.read_text(encoding="utf-8-sig" if encoding.lower() in ("utf-8", "utf8") else encoding)
    except (OSError, UnicodeDecodeError, LookupError) as error:
        raise DataError(f"{path} cannot be read: {error}.") from error
    rows = [Example(line, (line,), number) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
    if not rows:
        raise DataError(f"{path} is empty: at least one line with text is needed.")
    return rows
