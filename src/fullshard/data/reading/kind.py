"""What a file is by its content, where its name says something else."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from fullshard.data.reading.delimiter import find_delimiter
from fullshard.data.reading.tables import is_parquet, open_lines, parse_json
from fullshard.errors import DataError

_LOOKED_AT = 20
"""Number of lines that are looked at."""


def kind_of(path: Path, named: str, encoding: str) -> str:
    """Return a file's format by its content, if that is plain, else the one that its name says.

    Args:
        path: The file; any process, alone.
        named: The format by its suffix: csv, tsv, jsonl, json or parquet.
        encoding: The encoding of a text file.

    Raises:
        DataError: It cannot be read, or has text of another kind where JSON is expected.
    """
    if named == "parquet" or is_parquet(path):
        return "parquet"
    with open_lines(path, encoding) as text:
        lines = list(islice((line for line in text if line.strip()), _LOOKED_AT))
    first = lines[0].lstrip("\ufeff").strip() if lines else ""
    if not first.startswith(("{", "[")):
        return _of_text(path, named, lines)
    objects = [isinstance(_parsed(line), dict) for line in lines]
    # A second object tells JSON Lines from one object; broken lines may be between.
    if objects[0] and (named != "json" or objects.count(True) > 1):
        return "jsonl"
    if named == "json":
        return named
    return "json" if _is_one_value(path, encoding, first) else named


def kind_note(path: Path, named: str, kind: str) -> Iterator[str]:
    """Yield the message about a file that is read as another format than its name says, if it is."""
    if kind != named:
        yield f"{path} is named as {named}, and its content is {kind}: it is read as that (data.format)."


def _of_text(path: Path, named: str, lines: list[str]) -> str:
    """Return the format of lines that are not JSON."""
    if len(lines) < 2 or "\0" in lines[0] or named == "csv" or (named == "tsv" and "\t" in lines[0]):
        return named
    found = find_delimiter(lines, path, "auto")
    if found not in lines[0]:
        return named
    if named == "tsv":
        return "csv"
    raise DataError(
        f"{path} is named as {named}, but its lines look like those of a CSV file: {lines[0].strip()[:60]!r}. Rename "
        "it to .csv, or set data.format: csv."
    )


def _is_one_value(path: Path, encoding: str, first: str) -> bool:
    """Return whether a file is one JSON list of objects, or one object over several lines."""
    with open_lines(path, encoding) as text:
        value = _parsed(text.read())
    if isinstance(value, list):
        return bool(value) and isinstance(value[0], dict)
    return isinstance(value, dict) and _parsed(first) is None


def _parsed(text: str) -> object:
    """Return the value of a JSON text; None if it is not JSON."""
    try:
        return parse_json(text)
    except ValueError:
        return None
