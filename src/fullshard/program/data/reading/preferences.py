"""Choice of the columns of preferences: a prompt, and a chosen and a rejected completion of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fullshard.errors import DataError
from fullshard.program.data.examples import Example, SourceSpec
from fullshard.program.data.reading.cells import cell_of, cell_text, column_of
from fullshard.program.data.reading.columns import Recipe, choose
from fullshard.program.data.reading.row import Row, UnusableRowError

PROMPTS = ("prompt", "question", "instruction", "input")
"""Names of prompts, in lower case; the first that a table has is read."""

CHOSEN, REJECTED = "chosen", "rejected"


@dataclass(frozen=True)
class PreferenceRecipe:
    """How the cells of a row become an example with a rejected completion."""

    accepted: Recipe  # of the prompt and the chosen completion
    rejected: str  # column of the other one

    @property
    def columns(self) -> list[str]:
        """The distinct names that it reads."""
        return [*self.accepted.columns, self.rejected]

    @property
    def notes(self) -> tuple[str, ...]:
        """Messages about columns chosen by name."""
        return self.accepted.notes

    def example(self, row: Row) -> Example:
        """Return the example of a row.

        Raises:
            UnusableRowError: A cell is missing, empty or not text.
        """
        for name in self.columns if row.problem is None else ():
            cell = cell_of(row, name)
            if isinstance(cell, (list, tuple)) and any(isinstance(one, Mapping) for one in cell):
                raise UnusableRowError(f"column {name!r} holds turns of a conversation; preferences are read as texts")
        example = self.accepted.example(row)
        rejected = cell_text(self.rejected, cell_of(row, self.rejected))
        if not rejected.strip():
            raise UnusableRowError(f"column {self.rejected!r} is empty")
        return replace(example, rejected=rejected)


def holds_preferences(columns: Sequence[str]) -> bool:
    """Return whether columns are those of preferences by their names."""
    names = {name.lower() for name in columns}
    return {CHOSEN, REJECTED} <= names and any(name in names for name in PROMPTS)


def choose_preferences(spec: SourceSpec, columns: Sequence[str], where: str) -> PreferenceRecipe:
    """Choose the columns of the preferences of the data that messages call ``where``.

    Raises:
        ConfigError: The template is malformed.
        DataError: A column does not exist or exists twice; the message lists the columns.
    """
    names = {name.lower(): name for name in reversed(columns)}
    source, chosen, rejected = spec.source_column, spec.target_column, spec.rejected_column
    if source is None and spec.template is None:
        source = next((names[name] for name in PROMPTS if name in names), None)
    chosen, rejected = chosen or names.get(CHOSEN), rejected or names.get(REJECTED)
    asked = {
        "data.source_column": source or spec.template,
        "data.target_column": chosen,
        "data.rejected_column": rejected,
    }
    missing = [key for key, value in asked.items() if value is None]
    listed = ", ".join(map(repr, columns))
    if missing or column_of(rejected or "", columns) is None:
        problem = f"set {' and '.join(missing)}" if missing else f"it has no column {rejected!r}"
        raise DataError(
            f"{where}: preferences need a prompt, a chosen and a rejected completion, in columns named prompt, chosen "
            f"and rejected or as the settings name them: {problem}. Its columns: {listed}."
        )
    assert rejected is not None, "it was asked for"
    if list(columns).count(rejected) > 1:
        raise DataError(f"{where} has {list(columns).count(rejected)} columns named {rejected!r}: rename all but one.")
    recipe = choose(replace(spec, source_column=source, target_column=chosen), columns, where)
    by_name = (spec.source_column or spec.template, spec.target_column, spec.rejected_column)
    note = f"{where}: prompt is {' and '.join(map(repr, recipe.sources))}, chosen {chosen!r}, rejected {rejected!r}"
    notes = (f"{note}, found by name.",) if None in by_name else ()
    return PreferenceRecipe(replace(recipe, notes=notes), rejected)
