"""Values inside cells: objects of JSON or Arrow, or JSON text, reached by names with dots such as translation.en."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

from fullshard.errors import DataError
from fullshard.program.data.reading.bad_rows import UnusableRowError
from fullshard.program.data.reading.tables import Row, RowReader, parse_json

_LOOKED_AT = 100
"""Number of rows in which names inside of cells are looked for."""


def column_of(name: str, columns: Sequence[str]) -> str | None:
    """Return the column that a name is of: itself, or the longest part before a dot that is a column; None: neither."""
    while name not in columns:
        name, dot, _ = name.rpartition(".")
        if not dot:
            return None
    return name


def columns_read(names: Iterable[str], columns: Sequence[str]) -> list[str]:
    """Return the distinct columns of a table that must be read for names."""
    return list(dict.fromkeys(column_of(name, columns) or name for name in names))


def cell_of(row: Row, name: str) -> object:
    """Return a row's cell, or with a name such as ``translation.en`` the value inside of it; None: it has none.

    JSON text is read as what it says. Of a list of objects it is the list of their values.

    Raises:
        UnusableRowError: The cell holds nothing with names, or no such name.
    """
    column = column_of(name, list(row.cells))
    if column is None or column == name:
        return row.cells.get(name)
    return _inside(row.cells[column], name.removeprefix(f"{column}."), column)


def as_json(cell: object) -> object:
    """Return the list or object that a cell's text is the JSON of; other cells as they are."""
    if not isinstance(cell, str) or not cell.lstrip().startswith(("{", "[")):
        return cell
    try:
        return parse_json(cell)
    except ValueError:
        return cell


def nested_names(reader: RowReader, columns: Sequence[str]) -> list[str]:
    """Return the columns of a table, those of objects replaced by the names inside of them, from the first 100 rows."""
    found: dict[str, dict[str, None]] = {name: {} for name in columns}
    for row in islice(reader.rows(columns), _LOOKED_AT):
        for name in found:
            found[name].update(dict.fromkeys(_names(row.cells.get(name), name)))
    return [inner for name, names in found.items() for inner in names or (name,)]


@contextmanager
def with_inner_names(reader: RowReader, columns: Sequence[str]) -> Iterator[None]:
    """Add the names inside of a table's cells, if there are any, to an error about its columns."""
    try:
        yield
    except DataError as error:
        inner = [name for name in nested_names(reader, columns) if name not in columns]
        if not inner:
            raise
        listed = ", ".join(map(repr, inner))
        raise DataError(
            f"{error}\nInside of its cells are {listed}: columns and templates may name them so."
        ) from error


def _names(cell: object, name: str) -> Iterator[str]:
    cell = as_json(cell)
    if isinstance(cell, Mapping):
        for key, value in cell.items():
            yield from list(_names(value, f"{name}.{key}")) or [f"{name}.{key}"]


def _inside(cell: object, name: str, where: str) -> object:
    """Return the value that a name is of inside a cell."""
    cell = as_json(cell)
    if cell is None:
        return None
    if isinstance(cell, list):
        return [_inside(item, name, where) for item in cell]
    if not isinstance(cell, Mapping):
        raise UnusableRowError(f"column {where!r} holds a {type(cell).__name__}, and no object with {name!r}")
    inner: Any = column_of(name, list(cell))
    if inner is None:
        raise UnusableRowError(f"column {where!r} has no {name!r}, but {', '.join(map(repr, cell)) or 'nothing'}")
    return cell[inner] if inner == name else _inside(cell[inner], name.removeprefix(f"{inner}."), f"{where}.{inner}")
