"""Two completions of equal rank, and the column that says which of them is better."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Protocol

from fullshard.errors import DataError
from fullshard.program.data.examples import Example
from fullshard.program.data.reading.cells import cell_of
from fullshard.program.data.reading.row import Row, RowReader, UnusableRowError
from fullshard.program.data.reading.unused import code_of, judging

_ENDING = re.compile(r"(?:(?<=[\W_])[a-z]|(?<=[^\d])\d+)$")
"""What tells two names apart: a number, or a letter by itself."""

_INSIDE = re.compile(r"(?:(?<=[\W_])|^)(?:[a-z]|\d+|chosen|rejected)(?=[\W_]|$)|\d+$")

_ANSWERS = """response responses answer answers completion completions output outputs reply replies candidate candidates
summary generation generations solution solutions conversation conversations message messages assistant model chat"""
"""Words that names of completions have."""

_IN_ORDER = (("0", "1"), ("1", "2"), ("a", "b"), ("first", "second"))
"""Labels that name two completions by their order, if a column has both."""

_MOST_SHOWN = 6


class PairRecipe(Protocol):
    """How the cells of a row become an example with a rejected completion."""

    @property
    def columns(self) -> list[str]:
        """The distinct names that it reads."""
        ...

    @property
    def notes(self) -> tuple[str, ...]:
        """Messages for the user."""
        ...

    def example(self, row: Row) -> Example:
        """Return the example of a row."""
        ...


@dataclass(frozen=True)
class RankedRecipe:
    """How the cells of a row become an example whose target is the completion that a label calls the better one."""

    completed: PairRecipe  # of the two completions in the order of their columns
    label: str
    is_first: Mapping[str, bool]  # whether the first one is better, by the label as of :func:`code_of`
    notes: tuple[str, ...]

    @property
    def columns(self) -> list[str]:
        """The distinct names that it reads."""
        return [*self.completed.columns, self.label]

    def example(self, row: Row) -> Example:
        """Return the example of a row.

        Raises:
            UnusableRowError: A cell is unusable, or the label names neither completion.
        """
        example = self.completed.example(row)
        label = cell_of(row, self.label)
        is_first = self.is_first.get(code_of(label))
        if is_first is None:
            raise UnusableRowError(f"column {self.label!r} holds {label!r}, which names neither completion")
        if is_first or example.rejected is None:
            return example
        return replace(example.rejected, rejected=replace(example, rejected=None))


def equals_in(columns: Sequence[str]) -> tuple[str, str] | None:
    """Return the two columns of completions of equal rank: alike but for a number or a letter; None: there are none."""
    stems: dict[str, list[str]] = {}
    for name in columns:
        text = name.strip().lower()
        if (end := _ENDING.search(text)) is not None:
            stems.setdefault(text[: end.start()], []).append(name)
    # Of names such as model_a beside conversation_a, the model's may only say who answered.
    words = {stem: [word for word in re.split(r"[\W\d_]+", stem) if word] for stem in stems}
    found = [stem for stem, names in stems.items() if len(names) == 2 and {*_ANSWERS.split()} & {*words[stem]}]
    found = [stem for stem in found if words[stem] != ["model"]] or found
    found = [stem for stem in found if len(words[stem]) == 1] or found
    return (stems[found[0]][0], stems[found[0]][1]) if len(found) == 1 else None


def ranking(reader: RowReader, columns: Sequence[str], pair: Iterable[str]) -> list[str]:
    """Return the columns that may say which of a pair is better."""
    stems = {_ENDING.sub("", name.strip().lower()) for name in pair}
    names = [name for name in columns if _ENDING.sub("", name.strip().lower()) not in stems]
    # One for each completion, such as score_a and score_b, does not name the better one.
    twins = {name for one, other in combinations(names, 2) if _are_twins(one, other) for name in (one, other)}
    return judging(reader, [name for name in names if name not in twins])


def _are_twins(one: str, other: str) -> bool:
    """Return whether two names differ in a number or a letter by itself, or in the names of two completions."""
    return one != other and len({_INSIDE.sub("#", name.strip().lower()) for name in (one, other)}) == 1


def which_is_first(reader: RowReader, label: str, names: tuple[str, str]) -> dict[str, bool]:
    """Return what each label of a column says: True if the first of two columns has the better completion.

    A label is the name of a column, its ending, or a name with the same ending. Other labels name them by their order,
    if the column has both.

    Raises:
        DataError: The labels do not tell.
    """
    labels = dict.fromkeys(code_of(cell_of(row, label)) for row in reader.rows([label]) if row.problem is None)
    own = _by_name(names)
    found = {one: own[key] for one in labels for key in (one, _ending(one)) if key in own}
    odd = [one for one in labels if re.fullmatch(r"[+-]?\d+", one) and one not in found]
    if found and not odd:
        return found
    numbered = all(_ending(name).isdigit() for name in names)
    for first, second in () if numbered and odd else _IN_ORDER:
        if {first, second} <= labels.keys() and not {*odd} - {first, second}:
            return {first: True, second: False}
    shown = ", ".join(list(labels)[:_MOST_SHOWN]) + (", ..." if len(labels) > _MOST_SHOWN else "")
    raise DataError(
        f"{reader.where}: column {label!r} (data.label_column) does not tell which of {names[0]!r} and {names[1]!r} is "
        f"better: it holds {shown}. It needs the names of the two columns, or what they end in."
    )


def _by_name(names: tuple[str, str]) -> dict[str, bool]:
    own = {code_of(names[0]): True, code_of(names[1]): False}
    first, second = map(_ending, names)
    return own | ({first: True, second: False} if first and second and first != second else {})


def _ending(name: str) -> str:
    end = _ENDING.search(name.strip().lower())
    return "" if end is None else end.group()
