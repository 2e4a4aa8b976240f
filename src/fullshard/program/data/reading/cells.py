"""Cells of rows of any format as text, and values inside of them, by names with dots such as translation.en."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from decimal import Decimal
from itertools import islice
from typing import Any

from fullshard.errors import DataError
from fullshard.program.data.examples import Example
from fullshard.program.data.reading.json_file import Number, parse_json
from fullshard.program.data.reading.row import Row, RowReader, UnusableRowError
from fullshard.program.data.reading.text_file import encoding_problem

_MISSING = {"nan", "-nan", "null", "none", "n/a", "<na>", "#na", "#n/a", "#n/a n/a", "nat"}
_MISSING |= {"1.#ind", "-1.#ind", "1.#qnan", "-1.#qnan"}
"""Texts in lower case that are written for missing values: those that pandas reads so, and NaT, which it writes."""

_LOOKED_AT = 100
"""Number of rows in which names inside of cells are looked for."""


def cell_text(name: str, cell: object) -> str:
    """Return the text of a cell unchanged; the items of a list are joined with spaces.

    Raises:
        UnusableRowError: The cell, whose column it names, is missing, or is not text, a number or a list of them.
    """
    if isinstance(cell, (list, tuple)):
        return " ".join(text for item in cell if (text := _scalar_text(name, item, "a list with ")).strip())
    return _scalar_text(name, cell)


def cell_json(cell: object) -> str:
    """Return a cell as JSON, with numbers in the notation that they were read in; dates and the like become text.

    NaN and infinity become null: JSON has neither.
    """
    if isinstance(cell, Number):
        return str(cell)
    if isinstance(cell, Mapping):
        pairs = (f"{json.dumps(str(key), ensure_ascii=False)}: {cell_json(one)}" for key, one in cell.items())
        return f"{{{', '.join(pairs)}}}"
    if isinstance(cell, (list, tuple)):
        return f"[{', '.join(map(cell_json, cell))}]"
    if isinstance(cell, float) and not math.isfinite(cell):
        return "null"
    return json.dumps(cell, ensure_ascii=False, default=str)


def cell_references(name: str, cell: object, *, join: bool) -> tuple[str, ...]:
    """Return the texts of a target cell: one, or the distinct non-empty items of a list; with ``join`` a list is one.

    Raises UnusableRowError as :func:`cell_text`, and if all texts are blank.
    """
    if isinstance(cell, (list, tuple)) and not join:
        texts = [_scalar_text(name, item, "a list with ") for item in cell]
    else:
        texts = [cell_text(name, cell)]
    references = tuple(dict.fromkeys(text for text in texts if text.strip()))
    if not references:
        raise UnusableRowError(f"column {name!r} is empty")
    return references


def is_missing(text: str) -> bool:
    """Return whether a text is what is written for a missing value, such as NaN or None."""
    return text.strip().lower() in _MISSING or text.strip() == "NA"


def require_values(example: Example) -> None:
    """Raise UnusableRowError if a row's target, or its rejected one, is only what is written for a missing value."""
    for one in (example, example.rejected):
        if one is not None and is_missing(one.target):
            raise UnusableRowError(
                f"the target is {one.target.strip()!r}, as tables write a missing value (data.missing_values: text "
                "takes it as a text)"
            )


def cell_weight(name: str, cell: object) -> float:
    """Return a row's weight; raises UnusableRowError unless the cell is a positive finite number or its text."""
    text = _scalar_text(name, cell).strip() if not isinstance(cell, float) else str(cell)
    try:
        weight = float(text)
    except ValueError:
        weight = math.nan
    if not (math.isfinite(weight) and weight > 0):
        shown = repr(text) if text else "nothing"
        raise UnusableRowError(
            f"column {name!r} holds {shown}; a weight is a positive number. To give a row no weight, leave it out"
        )
    return weight


def _scalar_text(name: str, cell: object, inside: str = "") -> str:
    """Return text or a number as text."""
    if isinstance(cell, str):
        problem = encoding_problem(cell, "utf-8")
        if problem is not None:
            raise UnusableRowError(f"column {name!r}: {problem}")
        return str(cell)
    if cell is None:
        raise UnusableRowError(f"column {name!r} holds {inside}nothing" if inside else f"column {name!r} is missing")
    number = isinstance(cell, (int, float, Decimal)) and not isinstance(cell, bool)
    if not number:
        names = list(cell) if isinstance(cell, dict) and not inside else []
        hint = f": name what is inside of it, such as {name}.{names[0]}" if names else ""
        raise UnusableRowError(f"column {name!r} holds {inside}a {type(cell).__name__}, not text{hint}")
    if not math.isfinite(cell):  # type: ignore[reportArgumentType]
        raise UnusableRowError(f"column {name!r} holds {inside}{cell}, not text")
    return str(cell)


def column_of(name: str, columns: Sequence[str]) -> str | None:
    """Return the column that a name is of: itself, or the longest part before a dot that is a column; None: neither."""
    while name not in columns:
        name, dot, _ = name.rpartition(".")
        if not dot:
            return None
    return name


def columns_read(names: Iterable[str], columns: Sequence[str]) -> list[str]:
    """Return the distinct columns that must be read for names."""
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
    """Return the columns, those of objects alone replaced by the names inside of them, from the first 100 rows."""
    found: dict[str, dict[str, None]] = {name: {} for name in columns}
    for row in islice(reader.rows(columns), _LOOKED_AT):
        for name in found:
            cell = row.cells.get(name)
            # A column of texts, of which some are JSON, is named itself too.
            found[name].update(
                dict.fromkeys(_names(cell, name) if cell in (None, "") else [*_names(cell, name)] or [name])
            )
    return [inner for name, names in found.items() for inner in ([name] if name in names else names or (name,))]


@contextmanager
def with_inner_names(reader: RowReader, columns: Sequence[str]) -> Iterator[None]:
    """Add the names inside of cells, if there are any, to an error about columns."""
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
