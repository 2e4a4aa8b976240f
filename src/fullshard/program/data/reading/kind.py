"""What a file is by its content: its format, where its name says something else."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from fullshard.errors import DataError
from fullshard.program.data.reading.cells import column_of
from fullshard.program.data.reading.csv_file import find_delimiter, named_delimiter, possible_delimiters
from fullshard.program.data.reading.json_file import parse_json
from fullshard.program.data.reading.text_file import is_parquet, open_lines

_LOOKED_AT = 20
"""Number of lines that are looked at."""

_CHARACTERS = 2**16
"""Characters of a file that are looked at to tell whether it is one JSON value."""

_CUT = 12
"""Characters of an escape or a word of JSON that may be incomplete where a text is cut."""

_FEWEST_ROWS = 3
"""Rows with as many delimiters as the header that make a file named .tsv one with this delimiter."""


def kind_of(path: Path, named: str, encoding: str, wanted: Sequence[str] = ()) -> str:
    """Return a file's format by its content, if that is plain, else the one that its name says; any process, alone.

    ``named`` is the format by its suffix: csv, tsv, jsonl, json, parquet or text. ``wanted`` are the columns that
    the run file names.

    Raises:
        DataError: It cannot be read, or has text of another kind where JSON is expected.
    """
    if named == "parquet" or is_parquet(path):
        return "parquet"
    with open_lines(path, encoding) as text:
        lines = list(islice((line for line in text if line.strip()), _LOOKED_AT))
    first = lines[0].lstrip("\ufeff").strip() if lines else ""
    objects = [line.lstrip("\ufeff \t").startswith("{") and isinstance(_parsed(line), dict) for line in lines]
    if not first.startswith(("{", "[")):
        # A first line that is no JSON may be a bad row; prose may quote an object.
        if named == "text":
            return named
        if named not in ("csv", "tsv") and any(objects):
            return "jsonl"
        return _of_text(path, named, lines, wanted)
    # A second object tells JSON Lines from one object; broken lines may be between.
    if objects[0] and (named != "json" or objects.count(True) > 1):
        return "jsonl"
    # So do objects on most lines, where the first line is broken.
    if named == "json" and objects.count(True) > max(1, len(lines) // 2):
        return "jsonl"
    if named == "json":
        return named
    return "json" if _is_one_value(path, encoding, first) else named


def _of_text(path: Path, named: str, lines: list[str], wanted: Sequence[str]) -> str:
    """Return the format of lines that are not JSON."""
    if len(lines) < 2 or "\0" in lines[0] or named == "csv" or (named == "tsv" and "\t" in lines[0]):
        return named
    if named == "tsv":
        return "csv" if _is_separated(lines, wanted) else named
    if find_delimiter(lines, path, "auto") not in lines[0]:
        return named
    raise DataError(
        f"{path} is named as {named}, but its lines look like those of a CSV file: {lines[0].strip()[:60]!r}. Rename "
        "it to .csv, or set data.format: csv."
    )


def _is_separated(lines: list[str], wanted: Sequence[str]) -> bool:
    """Return whether lines without tabs in their header are cells with another delimiter, rather than one column.

    A comma in a text is no delimiter: each row must have as many as the header. Few rows may agree by chance, unless a
    wanted column is in the header.
    """
    header = lines[0].lstrip("\ufeff").strip()
    if named_delimiter(header):
        return True
    if header in wanted:
        return False
    names = [[name.strip(' "') for name in header.split(one)] for one in possible_delimiters(lines, "auto")]
    has_wanted = any(column_of(one, found) for found in names for one in wanted)
    return bool(names) and (has_wanted or len(lines) > _FEWEST_ROWS)


def _is_one_value(path: Path, encoding: str, first: str) -> bool:
    """Return whether a file begins as one JSON list of objects, or one object over several lines."""
    with open_lines(path, encoding) as text:
        head = text.read(_CHARACTERS)
    is_cut = len(head) == _CHARACTERS
    head = head.lstrip("\ufeff").lstrip()
    try:
        parse_json(head)
    except json.JSONDecodeError as error:
        if not (is_cut and (error.msg.startswith("Unterminated string") or error.pos >= len(head) - _CUT)):
            return False
    except ValueError:
        return False
    return bool(re.match(r"\[\s*\{", head)) or (head.startswith("{") and _parsed(first) is None)


def _parsed(text: str) -> object:
    """Return the value of a JSON text; None if it is not JSON."""
    try:
        return parse_json(text)
    except ValueError:
        return None
