"""What a file is by its content, where its name says something else."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from fullshard.errors import DataError
from fullshard.program.data.reading.delimiter import find_delimiter, named_delimiter, possible_delimiters
from fullshard.program.data.reading.nested import column_of
from fullshard.program.data.reading.tables import is_parquet, open_lines, parse_json

_LOOKED_AT = 20
"""Number of lines that are looked at."""

_CHARACTERS = 2**16
"""Characters of a file that are looked at to tell whether it is one JSON value."""

_CUT = 12
"""Characters of an escape or a word of JSON that may be incomplete where a text is cut."""

_FEWEST_ROWS = 3
"""Rows with as many delimiters as the header that make a table named .tsv one with this delimiter."""


def kind_of(path: Path, named: str, encoding: str, wanted: Sequence[str] = ()) -> str:
    """Return a file's format by its content, if that is plain, else the one that its name says.

    Args:
        path: The file; any process, alone.
        named: The format by its suffix: csv, tsv, jsonl, json or parquet.
        encoding: The encoding of a text file.
        wanted: Names of columns that the run file gives.

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
        # A first line that is no JSON may be a bad row.
        is_table = named in ("csv", "tsv") or not any(objects)
        return _of_text(path, named, lines, wanted) if is_table else "jsonl"
    # A second object tells JSON Lines from one object; broken lines may be between.
    if objects[0] and (named != "json" or objects.count(True) > 1):
        return "jsonl"
    # So do objects on most lines, where the first line is broken.
    if named == "json" and objects.count(True) > max(1, len(lines) // 2):
        return "jsonl"
    if named == "json":
        return named
    return "json" if _is_one_value(path, encoding, first) else named


def kind_note(path: Path, named: str, kind: str) -> Iterator[str]:
    """Yield the message about a file that is read as another format than its name says, if it is."""
    if kind != named:
        yield f"{path} is named as {named}, and its content is {kind}: it is read as that (data.format)."


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
    if not _begins_as_json(head, is_cut=is_cut):
        return False
    return bool(re.match(r"\[\s*\{", head)) or (head.startswith("{") and _parsed(first) is None)


def _begins_as_json(head: str, *, is_cut: bool) -> bool:
    """Return whether a text is JSON, or if it ``is_cut``, the beginning of one."""
    try:
        parse_json(head)
    except json.JSONDecodeError as error:
        return is_cut and (error.msg.startswith("Unterminated string") or error.pos >= len(head) - _CUT)
    except ValueError:
        return False
    return True


def _parsed(text: str) -> object:
    """Return the value of a JSON text; None if it is not JSON."""
    try:
        return parse_json(text)
    except ValueError:
        return None
