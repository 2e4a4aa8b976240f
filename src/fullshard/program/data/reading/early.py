"""A first look at a run's tables, before ranks start: columns and empty files; it imports no torch."""

from __future__ import annotations

from itertools import islice

from fullshard.errors import DataError
from fullshard.program.data.examples import SourceSpec, Split
from fullshard.program.data.reading.conversations import LOOKED_AT
from fullshard.program.data.reading.json_file import JsonFile, JsonLinesFile
from fullshard.program.data.reading.split import open_rows, open_split

_MOST_BYTES = 64 << 20
"""Size of a JSON file up to which it is read in full: as one value, its first rows cannot be read alone."""


def require_rows(spec: SourceSpec, split: Split) -> None:
    """Check that a split's file has the columns that are asked for and a row; one process, before the ranks.

    Datasets, WikiHow's file and large JSON lists are left to the ranks.

    Raises:
        DataError: The file cannot be read, is empty, or its columns do not fit.
        ConfigError: The template is malformed.
    """
    file = spec.train_file if split == "train" else spec.validation_file
    if file is None or spec.format == "wikihow":
        return
    reader = open_split(spec, split)
    if isinstance(reader, JsonFile) and not isinstance(reader, JsonLinesFile) and file.stat().st_size > _MOST_BYTES:
        return
    columns = None
    if isinstance(reader, JsonLinesFile):
        columns = list(dict.fromkeys(name for row in islice(reader.rows(()), LOOKED_AT) for name in row.cells))
    try:
        opened = open_rows(spec, split, columns)
    except DataError:
        if columns is None:
            raise
        opened = open_rows(spec, split)  # a later row may have the column: all of them are read
    if next(iter(opened.reader.rows(opened.wanted)), None) is None:
        opened.notes()
