"""Columns that are not used: named in one line, and asked about where they may say which rows are good."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Literal

from fullshard.program.data.reading.row import RowReader

_LOOKED_AT = 100
"""Rows in which values of columns are looked at."""

_MOST_NAMED = 20

_GOOD = """true 1 +1 yes y good up 👍 like liked positive pos accept accepted approved correct right helpful
desirable chosen preferred pass passed upvote upvoted thumbsup"""
_BAD = """false 0 -1 no n bad down 👎 dislike disliked negative neg reject rejected disapproved incorrect wrong
unhelpful undesirable fail failed downvote downvoted thumbsdown"""
_DESIRABLE = {
    **dict.fromkeys((*_GOOD.split(), "thumbs up", "thumb up"), True),
    **dict.fromkeys((*_BAD.split(), "thumbs down", "thumb down"), False),
}
"""What a label says of a row, by its text as of :func:`code_of`."""

_JUDGING = """label labels feedback score scores rating ratings rated rate rank ranking ranks vote votes upvotes upvoted
downvotes thumb thumbs thumbsup like likes liked good bad better best worse worst winner won preferred preference
prefers chosen rejected accepted acceptable approved quality correct correctness incorrect helpful helpfulness reward
rewards grade stars desirable undesirable judgement judgment verdict satisfied satisfaction safe
safer harmless toxic harmful"""
"""Words in names of columns that may say which rows are good."""

_COUNTING = """id ids index idx num number count counts length len tokens turns line row year month day"""
"""Words in names of columns whose small numbers say something else."""

_SMALL = range(-10, 11)

KNOWN_INPUTS = ("history", "system", "system_prompt", "tools", "context", "input")
"""Columns that known data gives to the model beside the source."""


def code_of(cell: object) -> str:
    """Return a label's text in one spelling: lower case, single blanks for underscores, whole numbers without a dot."""
    text = re.sub(r"[\s_]+", " ", str(cell)).strip().lower()
    whole = re.fullmatch(r"([+-]?\d+)\.0*", text)
    return whole[1] if whole else text


def desirable(cell: object) -> bool | None:
    """Return whether a label calls its row desirable; None: it says neither."""
    return _DESIRABLE.get(code_of(cell))


def names_judgement(name: str) -> bool:
    """Return whether a column's name is that of a label, a score or a rank."""
    return not {*_JUDGING.split()}.isdisjoint(_words(name))


def judging(reader: RowReader, columns: Sequence[str]) -> list[str]:
    """Return the columns that look like a label, score or rank, by their names or their first 100 values."""
    values: dict[str, list[object]] = {name: [] for name in columns}
    for row in islice(reader.rows(list(columns)), _LOOKED_AT) if columns else ():
        for name, found in values.items():
            found += [cell for cell in [row.cells.get(name)] if cell is not None and str(cell).strip()]
    return [name for name, found in values.items() if names_judgement(name) or _holds_judgements(name, found)]


def unused_note(
    columns: Sequence[str], used: Iterable[str], asked: Sequence[str], kind: Literal["pairs", "labels"] | None
) -> str | None:
    """Return a message about the columns that are not used, those that are ``asked`` about first; None: all are used.

    ``kind`` is what the rows are, as ``SourceSpec.preferences``.
    """
    known = {name.lower() for name in used}
    left = [name for name in dict.fromkeys(columns) if name.lower() not in known]
    if not left:
        return None
    ordered = [*(name for name in left if name in asked), *(name for name in left if name not in asked)]
    named = [f"{name!r}{'?' * (name in asked)}" for name in ordered[:_MOST_NAMED]]
    more = f" and {len(ordered) - _MOST_NAMED} more" if len(ordered) > _MOST_NAMED else ""
    parts = [f"not used: {', '.join(named)}{more}."]
    doubtful = [name for name in left if name in asked]
    if doubtful:
        parts.append(f"{doubtful[0]!r} looks like a label, score or rank: {_REMEDIES[kind].format(doubtful[0])}.")
    if any(name.lower() in KNOWN_INPUTS for name in left):
        parts.append(
            "data.template joins columns into the source; earlier turns and system turns are read from conversations, "
            "such as a column messages."
        )
    return " ".join(parts)


_REMEDIES = {
    None: (
        "if it says which rows are good, training.objective: kto learns from that (data.label_column: {}), "
        "data.weight_column weighs rows by it, or leave the bad rows out of the file; otherwise go on"
    ),
    "pairs": "if it says which of two completions is better, set data.label_column: {}; otherwise go on",
    "labels": "if it says which completions are desirable, set data.label_column: {}; otherwise go on",
}
"""What to do with such a column, by what the rows are."""


def _holds_judgements(name: str, cells: Sequence[object]) -> bool:
    """Return whether cells are true or false, good or bad, or small whole numbers that are repeated."""
    codes = {code_of(cell) for cell in cells}
    if not codes:
        return False
    if codes <= _DESIRABLE.keys() and not codes <= {"0", "1", "-1"}:
        return True
    is_small = all(re.fullmatch(r"[+-]?\d{1,2}", code) and int(code) in _SMALL for code in codes)
    return is_small and len(codes) < len(cells) and {*_COUNTING.split()}.isdisjoint(_words(name))


def _words(name: str) -> list[str]:
    spaced = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name)
    return re.split(r"[\W\d_]+", spaced.lower())
