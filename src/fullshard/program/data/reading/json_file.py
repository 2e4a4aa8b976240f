"""JSON Lines and JSON files, whose numbers keep their notation."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

from fullshard.errors import DataError
from fullshard.program.data.reading.row import Row, TextRows
from fullshard.program.data.reading.text_file import empty, encoding_problem, open_lines


class Number(str):
    """A JSON number in its original notation."""

    __slots__ = ()


class JsonLinesFile(TextRows):
    """A file with a JSON object on each line."""

    def columns(self) -> list[str]:
        """Return the keys of all objects, in order of appearance."""
        seen: dict[str, None] = {}
        blank = True
        for row in self.rows(()):
            blank = False
            seen.update(dict.fromkeys(row.cells))
        if blank:
            raise empty(self._path)
        return list(seen)

    def rows(self, wanted: Sequence[str]) -> Iterator[Row]:
        """Yield the objects; blank lines are skipped."""
        del wanted
        with self._lines() as lines:
            for line, raw in enumerate(lines, start=1):
                if raw.strip():
                    problem = encoding_problem(raw, self._encoding)
                    yield Row(line, {}, problem) if problem else _json_row(line, raw.rstrip("\r\n"))

    def row_at(self, lines: Iterator[str]) -> Row:
        """Return the row on the first of the lines, which :meth:`rows` yielded before; its line is 0."""
        return _json_row(0, next(lines).rstrip("\r\n"))


class JsonFile(TextRows):
    """A JSON file: a list of objects, an object with one such list, an object of columns, or a list of texts."""

    def columns(self) -> list[str]:
        """Return the keys of all objects, in order of appearance."""
        return list(dict.fromkeys(key for item in self._items if isinstance(item, dict) for key in item))

    def rows(self, wanted: Sequence[str]) -> Iterator[Row]:
        """Yield the objects, numbered from 1."""
        del wanted
        for number, item in enumerate(self._items, start=1):
            if not isinstance(item, dict):
                yield Row(number, {}, f"the item is a JSON {type(item).__name__}, not an object")
                continue
            texts = (cell for cell in item.values() if isinstance(cell, str))
            yield Row(number, item, next(filter(None, (encoding_problem(t, self._encoding) for t in texts)), None))

    @cached_property
    def _items(self) -> list[Any]:
        """All rows; JSON can only be parsed completely."""
        with open_lines(self._path, self._encoding) as lines:
            text = lines.read()
        if not text.strip():
            raise empty(self._path)
        try:
            value = parse_json(text)
        except ValueError as error:
            hint = " If each line is an object, set data.format: jsonl." if "Extra data" in str(error) else ""
            raise DataError(f"{self._path} is not valid JSON: {error}.{hint}") from error
        items = _items_of(value)
        if items is None:
            raise DataError(
                f"{self._path} is neither a list of objects or texts, nor an object with one such list, nor an object "
                f"of columns of equal length; it is a JSON {type(value).__name__}. Convert it to JSON Lines."
            )
        if not items:
            raise DataError(f"{self._path} has no rows: at least one is needed.")
        return items


def parse_json(text: str) -> Any:
    """Parse a JSON value, keeping numbers as written, as :class:`Number`: 1.50 must not become 1.5.

    Raises:
        ValueError: It is malformed, or nested too deeply.
    """
    try:
        return json.loads(text, parse_int=Number, parse_float=Number)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _json_row(line: int, raw: str) -> Row:
    """Parse the object on one line."""
    try:
        value = parse_json(raw)
    except json.JSONDecodeError as error:
        return Row(line, {}, f"broken JSON: {error.msg.removesuffix(' at')} at column {error.colno}")
    except ValueError as error:
        return Row(line, {}, f"broken JSON: {error}")
    if not isinstance(value, dict):
        return Row(line, {}, f"the line is a JSON {type(value).__name__}, not an object")
    return Row(line, value)


def _items_of(value: Any) -> list[Any] | None:
    """Return the rows of a JSON value; None if it is not a table."""
    if isinstance(value, list):
        is_text = all(isinstance(item, str) and not isinstance(item, Number) for item in value)
        return [{"text": item} for item in value] if is_text else value
    if not isinstance(value, dict) or not value:
        return None
    lists = [item for item in value.values() if isinstance(item, list) and any(isinstance(row, dict) for row in item)]
    if len(lists) == 1:
        return lists[0]
    # pandas writes each column as an object from row number to cell.
    columns = [list(item.values()) if isinstance(item, dict) else item for item in value.values()]
    if not all(isinstance(column, list) and len(column) == len(columns[0]) for column in columns):
        return None
    return [dict(zip(value, cells, strict=True)) for cells in zip(*columns, strict=True)]
