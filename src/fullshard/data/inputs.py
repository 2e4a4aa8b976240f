"""Rows to write texts for: only the source is looked at, and a file may be plain lines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from fullshard.data.columns import parse_template
from fullshard.data.examples import Example, SourceSpec, Table
from fullshard.data.sources import read_sources, read_split
from fullshard.data.wikihow import mended_article
from fullshard.errors import DataError

LINES_SUFFIX = ".txt"
"""Of files whose lines are the rows."""

_SOURCES = {"wikihow": "text", "phrasebank": "sentence"}
"""Source columns of formats that are read by rules of their own when they come with targets."""


def read_inputs(path: Path, spec: SourceSpec) -> Table:
    """The sources of a file's rows. Any process may call it, alone.

    Of a ``.txt`` file each line is a row. Of others the source is the spec's ``template`` or ``source_column``, the
    only column there is, or those that are known by their names, joined as in training. Empty lines are no rows.

    Args:
        path: The file; its suffix says how it is read.
        spec: Encoding and columns; the files it names are not read.

    Returns:
        The rows in order; their references are of no use.

    Raises:
        DataError: The file cannot be read or is empty, or it is not clear which column is the source.
        ConfigError: The template cannot be understood.
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
    # Rows are read with the source as their own target: what is there always.
    table = read_split(replace(here, source_column=column, target_column=column), "validation")
    if spec.format != "wikihow":
        return table
    return replace(table, examples=[replace(row, source=mended_article(row.source)) for row in table.examples])


def _lines(path: Path, encoding: str) -> list[Example]:
    try:
        text = path.read_text(encoding="utf-8-sig" if encoding.lower() in ("utf-8", "utf8") else encoding)
    except (OSError, UnicodeDecodeError, LookupError) as error:
        raise DataError(f"{path} cannot be read: {error}.") from error
    rows = [Example(line, (line,), number) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
    if not rows:
        raise DataError(f"{path} is empty: at least one line with text is needed.")
    return rows
