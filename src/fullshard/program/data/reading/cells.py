"""Conversion of cells to text, for every kind of table."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from decimal import Decimal

from fullshard.program.data.reading.bad_rows import UnusableRowError
from fullshard.program.data.reading.tables import Number, encoding_problem


def cell_text(name: str, cell: object) -> str:
    """Return the text of a cell unchanged; the items of a list are joined with spaces. Errors name the column.

    Raises:
        UnusableRowError: The cell is missing, or is not text, a number or a list of them.
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

    Raises:
        UnusableRowError: As for :func:`cell_text`, or all texts are blank.
    """
    if isinstance(cell, (list, tuple)) and not join:
        texts = [_scalar_text(name, item, "a list with ") for item in cell]
    else:
        texts = [cell_text(name, cell)]
    references = tuple(dict.fromkeys(text for text in texts if text.strip()))
    if not references:
        raise UnusableRowError(f"column {name!r} is empty")
    return references


def cell_weight(name: str, cell: object) -> float:
    """Return a row's weight; the cell is a number or its text.

    Raises:
        UnusableRowError: It is missing, not a number, or not positive and finite.
    """
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
