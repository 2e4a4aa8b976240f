"""What a cell holds, as text: every kind of table ends up here."""

from __future__ import annotations

import math
from decimal import Decimal

from fullshard.data.bad_rows import UnusableRowError
from fullshard.data.tables import encoding_problem


def cell_text(name: str, cell: object) -> str:
    """The text of a cell as it is; pieces of a list are joined by a space.

    Args:
        name: The column, for messages.
        cell: What the table holds there.

    Raises:
        UnusableRowError: The cell is missing, or holds something else than text, numbers and lists of them.
    """
    if isinstance(cell, (list, tuple)):
        return " ".join(text for item in cell if (text := _scalar_text(name, item, "a list with ")).strip())
    return _scalar_text(name, cell)


def cell_references(name: str, cell: object, *, join: bool) -> tuple[str, ...]:
    """The texts of a target cell: one, or with a list its items, each once and none empty.

    Args:
        name: The column, for messages.
        cell: What the table holds there.
        join: Whether a list is one text in pieces.

    Raises:
        UnusableRowError: As of :func:`cell_text`, or nothing but blanks is there.
    """
    if isinstance(cell, (list, tuple)) and not join:
        texts = [_scalar_text(name, item, "a list with ") for item in cell]
    else:
        texts = [cell_text(name, cell)]
    references = tuple(dict.fromkeys(text for text in texts if text.strip()))
    if not references:
        raise UnusableRowError(f"column {name!r} is empty")
    return references


def _scalar_text(name: str, cell: object, inside: str = "") -> str:
    """Text and numbers as text."""
    if isinstance(cell, str):
        problem = encoding_problem(cell, "utf-8")
        if problem is not None:
            raise UnusableRowError(f"column {name!r}: {problem}")
        return cell
    if cell is None:
        raise UnusableRowError(f"column {name!r} holds {inside}nothing" if inside else f"column {name!r} is missing")
    number = isinstance(cell, (int, float, Decimal)) and not isinstance(cell, bool)
    if not number:
        raise UnusableRowError(f"column {name!r} holds {inside}a {type(cell).__name__}, not text")
    if not math.isfinite(cell):  # type: ignore[reportArgumentType]
        raise UnusableRowError(f"column {name!r} holds {inside}{cell}, not text")
    return str(cell)
