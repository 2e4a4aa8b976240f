"""Choice of the columns of preferences: a prompt, and a chosen and a rejected completion of it or one with a label."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice

from fullshard.errors import DataError
from fullshard.program.data.examples import Example, SourceSpec
from fullshard.program.data.reading.cells import cell_of, cell_text, column_of, columns_read
from fullshard.program.data.reading.columns import Recipe, choose, did_you_mean
from fullshard.program.data.reading.conversations import (
    LOOKED_AT,
    ConversationRecipe,
    find_conversations,
    has_turns,
    require_conversations,
    turns_of,
)
from fullshard.program.data.reading.row import Row, RowReader, UnusableRowError

PROMPTS = ("prompt", "question", "instruction", "input")
"""Names of prompts, in lower case; the first that a table has is read."""

CHOSEN, REJECTED = "chosen", "rejected"
COMPLETION, LABEL = "completion", "label"
_LABELS = {"true": True, "1": True, "false": False, "0": False}


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
        example = self.accepted.example(row)
        rejected = cell_text(self.rejected, cell_of(row, self.rejected))
        if not rejected.strip():
            raise UnusableRowError(f"column {self.rejected!r} is empty")
        return replace(example, rejected=replace(example, references=(rejected,)))


@dataclass(frozen=True)
class PairedTurns(ConversationRecipe):
    """How the cells of a row become two conversations that begin alike; ``turns`` and ``completion`` are their columns.

    The chosen and the rejected turns follow those of the prompt, or begin with the prompt themselves: it is then their
    longest common beginning, as in TRL's ``extract_prompt``.
    """

    prompt: str | None = None  # column of the prompt's turns; None: the others begin with them

    @property
    def columns(self) -> list[str]:
        """The columns that it reads."""
        return [*super().columns, *([] if self.prompt is None else [self.prompt])]

    def example(self, row: Row) -> Example:
        """Return the example of a row.

        Raises:
            UnusableRowError: A turn is malformed, or no turn of the assistant follows the prompt.
        """
        assert self.completion is not None, "find_paired_turns gives both columns"
        if row.problem is not None:
            raise UnusableRowError(row.problem)
        given = [] if self.prompt is None else turns_of(self.prompt, cell_of(row, self.prompt))
        sides = {name: turns_of(name, cell_of(row, name)) for name in (self.turns, self.completion)}
        if not all(turns[: len(given)] == given for turns in sides.values()):
            sides = {name: [*given, *turns] for name, turns in sides.items()}
        chosen, rejected = sides.values()
        differ = (place for place, (one, other) in enumerate(zip(chosen, rejected, strict=False)) if one != other)
        first = len(given) or next(differ, min(len(chosen), len(rejected)) - 1)
        for name, turns in sides.items():
            if first == 0 or [turn["role"] for turn in turns[first : first + 1]] != ["assistant"]:
                raise UnusableRowError(
                    f"column {name!r} has no answer of the assistant to the turns that both begin with"
                )
        examples = []
        for name, turns in sides.items():
            complete = self.after_system(row, turns)
            examples.append(self.learned(row, complete, first + len(complete) - len(turns), name))
        return replace(examples[0], rejected=examples[1])


@dataclass(frozen=True)
class LabelledRecipe:
    """How the cells of a row become an example that is desirable or not."""

    completed: Recipe | ConversationRecipe  # of the prompt and its completion
    label: str

    @property
    def columns(self) -> list[str]:
        """The distinct names that it reads."""
        return [*self.completed.columns, self.label]

    @property
    def notes(self) -> tuple[str, ...]:
        """Messages about columns chosen by name."""
        return self.completed.notes

    def example(self, row: Row) -> Example:
        """Return the example of a row.

        Raises:
            UnusableRowError: A cell is missing, empty or of the wrong type.
        """
        example = self.completed.example(row)
        label = cell_of(row, self.label)
        desirable = _LABELS.get(str(label).strip().lower())
        if desirable is None:
            raise UnusableRowError(f"column {self.label!r} holds {label!r}, which is neither true nor false")
        return replace(example, desirable=desirable)


def choose_labelled(reader: RowReader, columns: Sequence[str], spec: SourceSpec) -> LabelledRecipe:
    """Choose the columns of a prompt, a completion and its label.

    Raises:
        ConfigError: The template is malformed.
        DataError: A column does not exist or exists twice; the message lists the columns.
    """
    names = {name.strip().lower(): name for name in reversed(columns)}
    if LABEL not in names:
        raise DataError(
            f"{reader.where}: kto needs a prompt, a completion and whether it is desirable, true or false, in columns "
            f"named prompt, completion and label. Its columns: {', '.join(map(repr, columns))}."
        )
    if (talks := find_conversations(reader, columns, spec, completed=True)) is not None:
        return LabelledRecipe(talks, names[LABEL])
    require_conversations(spec, reader.where)
    source, target = spec.source_column, spec.target_column or names.get(COMPLETION)
    if source is None and spec.template is None:
        source = next((names[name] for name in PROMPTS if name in names), None)
    others = [name for name in columns if name != names[LABEL]]
    recipe = choose(replace(spec, source_column=source, target_column=target), others, reader.where)
    return LabelledRecipe(recipe, names[LABEL])


def holds_labels(reader: RowReader, columns: Sequence[str]) -> bool:
    """Return whether columns are those of completions with labels, by their names and the first 100 labels."""
    names = {name.strip().lower(): name for name in reversed(columns)}
    if not {COMPLETION, LABEL} <= names.keys() or not any(name in names for name in PROMPTS):
        return False
    rows = islice(reader.rows([names[LABEL]]), LOOKED_AT)
    return all(str(row.cells.get(names[LABEL])).strip().lower() in _LABELS for row in rows if row.problem is None)


def find_paired_turns(
    reader: RowReader, columns: Sequence[str], spec: SourceSpec, *, from_text: bool = True
) -> PairedTurns | None:
    """Return how rows become pairs of conversations; None if they are not.

    They are if one of the first 100 rows has a list of turns, or unless ``from_text`` is false its JSON text, in both
    completions.
    """
    names = {name.strip().lower(): name for name in reversed(columns)}
    both = [spec.target_column or names.get(CHOSEN), spec.rejected_column or names.get(REJECTED)]
    found = [name for name in both if name is not None and column_of(name, columns)]
    if spec.template is not None or len({*found}) < len(both):
        return None
    prompt = spec.source_column or next((names[name] for name in PROMPTS if name in names), None)
    prompts = [] if prompt is None or column_of(prompt, columns) is None else [prompt]
    rows = list(islice(reader.rows(columns_read([*found, *prompts], columns)), LOOKED_AT))

    def hold(some: Sequence[str]) -> bool:
        return any(all(has_turns(row, name, is_plain=not from_text) for name in some) for row in rows)

    if not hold(found):
        return None
    prompt = prompts[0] if prompts and hold(prompts) else None
    return PairedTurns(found[0], found[1], names.get("system"), names.get("tools"), spec.train_on, prompt=prompt)


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
    if missing or column_of(rejected or "", columns) is None or chosen == rejected:
        problem = f"set {' and '.join(missing)}" if missing else f"it has no column {rejected!r}"
        problem = f"{chosen!r} is both of them" if chosen is not None and chosen == rejected else problem
        raise DataError(
            f"{where}: preferences need a prompt, a chosen and a rejected completion, in columns named prompt, chosen "
            f"and rejected or as the settings name them: {problem}.{did_you_mean(rejected or '', columns)} Its "
            f"columns: {listed}."
        )
    assert rejected is not None, "it was asked for"
    if list(columns).count(rejected) > 1:
        raise DataError(f"{where} has {list(columns).count(rejected)} columns named {rejected!r}: rename all but one.")
    recipe = choose(replace(spec, source_column=source, target_column=chosen), columns, where)
    by_name = (spec.source_column or spec.template, spec.target_column, spec.rejected_column)
    note = f"{where}: prompt is {' and '.join(map(repr, recipe.sources))}, chosen {chosen!r}, rejected {rejected!r}"
    notes = (f"{note}, found by name.",) if None in by_name else ()
    return PreferenceRecipe(replace(recipe, notes=notes), rejected)
