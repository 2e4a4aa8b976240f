"""Choice of the columns of preferences: a prompt, and a chosen and a rejected completion of it or one with a label."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from fullshard.errors import DataError
from fullshard.program.data.examples import Example, InputRow, SourceSpec
from fullshard.program.data.reading.cells import as_json, cell_of, cell_text, column_of, columns_read
from fullshard.program.data.reading.columns import PROMPTS, Recipe, choose, did_you_mean, prompt_of
from fullshard.program.data.reading.conversations import (
    COLUMNS,
    LOOKED_AT,
    ConversationRecipe,
    find_conversations,
    has_turns,
    is_turn,
    require_conversations,
    turns_of,
)
from fullshard.program.data.reading.ranked import RankedRecipe, equals_in, which_is_first
from fullshard.program.data.reading.row import Row, RowReader, UnusableRowError
from fullshard.program.data.reading.transcripts import TranscriptRecipe, are_transcripts
from fullshard.program.data.reading.unused import desirable, names_judgement

CHOSEN, REJECTED = "chosen", "rejected"
COMPLETION, LABEL = "completion", "label"


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

    prompt: str | None = None  # column of the prompt's turns; None: the others begin with them, or follow a text
    asks: Recipe | None = None  # of the prompt as a text, which is the user's turn
    are_texts: bool = False  # whether the completions are texts, which are the assistant's turns

    @property
    def columns(self) -> list[str]:
        """The columns that it reads."""
        more = [] if self.asks is None else self.asks.sources
        return [*super().columns, *([] if self.prompt is None else [self.prompt]), *more]

    def example(self, row: Row) -> Example:
        """Return the example of a row.

        Raises:
            UnusableRowError: A turn is malformed, or no turn of the assistant follows the prompt.
        """
        assert self.completion is not None, "find_paired_turns gives both columns"
        if row.problem is not None:
            raise UnusableRowError(row.problem)
        given = [] if self.prompt is None else turns_of(self.prompt, cell_of(row, self.prompt))
        if self.asks is not None:
            given = [{"role": "user", "content": self.asks.source(row)}]
        sides = {name: self._side(row, name) for name in (self.turns, self.completion)}
        if given and given[-1]["role"] == "assistant" and any(one[0] not in given for one in sides.values()):
            raise UnusableRowError(f"column {self.prompt!r} ends with an answer, and not with what is to be answered")
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

    def input_row(self, row: Row) -> InputRow:
        """Return the prompt to be answered; raises as :meth:`example`."""
        talk = self.example(row).conversation
        assert talk is not None, "its rows are conversations"
        asked = replace(talk, messages=talk.messages[: talk.answers[0]], answers=())
        return InputRow(asked.history_text, row.line, conversation=asked)

    def _side(self, row: Row, name: str) -> list[dict[str, Any]]:
        cell = cell_of(row, name)
        if not self.are_texts:
            return turns_of(name, cell)
        text = cell_text(name, cell)
        if not text.strip():
            raise UnusableRowError(f"column {name!r} is empty")
        return [{"role": "assistant", "content": text}]


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
        is_desirable = desirable(label)
        if is_desirable is None:
            raise UnusableRowError(f"column {self.label!r} holds {label!r}, which is neither true nor false")
        return replace(example, desirable=is_desirable)


def choose_labelled(reader: RowReader, columns: Sequence[str], spec: SourceSpec) -> LabelledRecipe:
    """Choose the columns of a prompt, a completion and its label.

    Raises:
        ConfigError: The template is malformed.
        DataError: A column does not exist or exists twice; the message lists the columns.
    """
    names = {name.strip().lower(): name for name in reversed(columns)}
    label = spec.label_column or names.get(LABEL)
    if label is None or column_of(label, columns) is None:
        listed = ", ".join(map(repr, columns))
        wrong = "" if label is None else f" It has no column {label!r}."
        raise DataError(
            f"{reader.where}: kto needs a prompt, a completion and whether it is desirable, true or false, in columns "
            f"named prompt, completion and label. Its columns: {listed}.{wrong} data.label_column names another column "
            "of the label."
        )
    spec = replace(spec, preferences="labels")
    if (talks := find_conversations(reader, columns, spec, completed=True)) is not None:
        return LabelledRecipe(talks, label)
    require_conversations(spec, reader.where)
    others = [name for name in columns if name != label]
    target = spec.target_column or names.get(COMPLETION)
    return LabelledRecipe(choose(replace(spec, target_column=target), others, reader.where), label)


def find_label(reader: RowReader, columns: Sequence[str]) -> str | None:
    """Return the column that says whether each completion is desirable; None: rows are no completions, or none says it.

    It is named ``label``, or is the only one with the name of a judgement whose labels are all of both kinds.
    """
    found = [name for name in columns if names_judgement(name) and _tells(reader, name)]
    found = [name for name in found if name.strip().lower() == LABEL] or found
    if len(found) != 1:
        return None
    others = [name for name in columns if name != found[0]]
    spec = SourceSpec(preferences="labels", label_column=found[0])
    if find_conversations(reader, others, spec, completed=True) is None:
        try:
            recipe = choose_labelled(reader, columns, spec).completed
        except DataError:
            return None
        # A known prompt: text and its class are no completion that is judged.
        if not isinstance(recipe, Recipe) or recipe.sources[0].strip().lower() not in PROMPTS:
            return None
    return found[0]


def _tells(reader: RowReader, name: str) -> bool:
    """Return whether a column calls rows of both kinds desirable or not, and says nothing else."""
    cells = [row.cells.get(name) for row in reader.rows([name]) if row.problem is None]
    return {desirable(cell) for cell in cells if cell is not None and str(cell).strip()} == {True, False}


def find_paired_turns(
    reader: RowReader, columns: Sequence[str], spec: SourceSpec, *, from_text: bool = True
) -> PairedTurns | None:
    """Return how rows become pairs of conversations; None if they are not.

    They are if one of the first 100 rows has turns, or unless ``from_text`` is false their JSON text, in both
    completions, or has the turns of a prompt beside two texts.
    """
    names = {name.strip().lower(): name for name in reversed(columns)}
    both = [spec.target_column or names.get(CHOSEN), spec.rejected_column or names.get(REJECTED)]
    found = [name for name in both if name is not None and column_of(name, columns)]
    if spec.template is not None or len({*found}) < len(both):
        return None
    prompt = spec.source_column or next((names[name] for name in PROMPTS if name in names), None)
    prompts = [] if prompt is None or column_of(prompt, columns) is None else [prompt]
    talks = [names[name] for name in COLUMNS if name in names and spec.source_column is None]
    rows = list(islice(reader.rows(columns_read([*found, *prompts, *talks], columns)), LOOKED_AT))

    def hold(some: Sequence[str]) -> bool:
        return any(all(_has_turns(row, name, is_plain=not from_text) for name in some) for row in rows)

    prompts, talks = [name for name in prompts if hold([name])], [name for name in talks if hold([name])]
    recipe = PairedTurns(found[0], found[1], names.get("system"), names.get("tools"), spec.train_on)
    if not hold(found):
        return replace(recipe, prompt=prompts[0], are_texts=True) if (prompts := prompts or talks) else None
    if prompts or not all(_answers(row, name) for row in rows for name in found):
        return replace(recipe, prompt=prompts[0] if prompts else None)
    # Both begin with the assistant: they follow a text, or a conversation in another column.
    if spec.source_column is None and prompt_of(columns, reader.where) is None:
        return replace(recipe, prompt=talks[0] if talks else None)
    asks = choose(replace(spec, target_column=found[0], preferences="pairs"), columns, reader.where)
    return replace(recipe, asks=asks)


def _has_turns(row: Row, name: str, *, is_plain: bool) -> bool:
    """Return True if a row has turns there as :func:`has_turns` says, or one turn by itself."""
    cell = row.cells.get(name)
    return is_turn(cell if is_plain else as_json(cell)) or has_turns(row, name, is_plain=is_plain)


def _answers(row: Row, name: str) -> bool:
    """Return True if a row's turns begin with the assistant, or cannot be read."""
    try:
        return turns_of(name, cell_of(row, name))[0]["role"] == "assistant"
    except UnusableRowError:
        return True


def find_transcripts(reader: RowReader, columns: Sequence[str], spec: SourceSpec) -> TranscriptRecipe | None:
    """Return how rows become pairs of texts that begin with their prompt; None if they are not."""
    names = {name.strip().lower(): name for name in reversed(columns)}
    both = (spec.target_column or names.get(CHOSEN), spec.rejected_column or names.get(REJECTED))
    if spec.template or spec.source_column or prompt_of(columns, reader.where) or None in both or both[0] == both[1]:
        return None
    chosen, rejected = str(both[0]), str(both[1])
    rows = list(islice(reader.rows(columns), LOOKED_AT))
    if not are_transcripts(rows, (chosen, rejected), [name for name in columns if name not in both]):
        return None
    note = (
        f"{reader.where}: {chosen!r} and {rejected!r} are texts that begin alike: what both begin with is the prompt, "
        "up to the end of a word"
    )
    return TranscriptRecipe(chosen, rejected, (note,))


def holds_preferences(columns: Sequence[str]) -> bool:
    """Return whether columns are those of preferences by their names."""
    names = {name.lower() for name in columns}
    return {CHOSEN, REJECTED} <= names and any(name in names for name in PROMPTS)


def choose_pairs(
    reader: RowReader, columns: Sequence[str], spec: SourceSpec
) -> PreferenceRecipe | PairedTurns | TranscriptRecipe | RankedRecipe:
    """Choose the columns of two completions of a prompt, and with ``spec.label_column`` that of the better one.

    Raises:
        ConfigError: The template is malformed.
        DataError: A column does not exist or exists twice, or labels do not tell which completion is better.
    """
    if spec.label_column is None:
        return _pairs(reader, columns, spec)
    label = spec.label_column
    if column_of(label, columns) is None:
        raise DataError(
            f"{reader.where} has no column {label!r} (data.label_column). Its columns: {', '.join(map(repr, columns))}."
        )
    others = [name for name in columns if name != label]
    if spec.target_column is None and spec.rejected_column is None and (equals := equals_in(others)) is not None:
        spec = replace(spec, target_column=equals[0], rejected_column=equals[1])
    pairs = _pairs(reader, others, spec)
    first, second = both_of(pairs)
    is_first = which_is_first(reader, label, (first, second))
    said = "; ".join(f"{one} is {first if is_it else second!s}" for one, is_it in is_first.items())
    notes = (*pairs.notes, f"{reader.where}: the better completion is said by {label!r} (data.label_column): {said}")
    return RankedRecipe(pairs, label, is_first, notes)


def both_of(pairs: PreferenceRecipe | PairedTurns | TranscriptRecipe) -> tuple[str, str]:
    """Return the columns of the two completions."""
    if isinstance(pairs, PairedTurns):
        return pairs.turns, str(pairs.completion)
    if isinstance(pairs, TranscriptRecipe):
        return pairs.chosen, pairs.rejected
    return pairs.accepted.target, pairs.rejected


def _pairs(
    reader: RowReader, columns: Sequence[str], spec: SourceSpec
) -> PreferenceRecipe | PairedTurns | TranscriptRecipe:
    if (turns := find_paired_turns(reader, columns, spec)) is not None:
        return turns
    require_conversations(spec, reader.where)
    return find_transcripts(reader, columns, spec) or choose_preferences(spec, columns, reader.where)


def choose_preferences(spec: SourceSpec, columns: Sequence[str], where: str) -> PreferenceRecipe:
    """Choose the columns of the preferences of the data that messages call ``where``.

    Raises:
        ConfigError: The template is malformed.
        DataError: A column does not exist or exists twice; the message lists the columns.
    """
    names = {name.lower(): name for name in reversed(columns)}
    prompt = spec.source_column or spec.template or prompt_of(columns, where)
    chosen, rejected = spec.target_column or names.get(CHOSEN), spec.rejected_column or names.get(REJECTED)
    asked = {"data.source_column": prompt, "data.target_column": chosen, "data.rejected_column": rejected}
    missing = [key for key, value in asked.items() if value is None]
    if missing or column_of(rejected or "", columns) is None or chosen == rejected:
        raise _no_preferences(missing, chosen, rejected, columns, where)
    assert rejected is not None, "it was asked for"
    if list(columns).count(rejected) > 1:
        raise DataError(f"{where} has {list(columns).count(rejected)} columns named {rejected!r}: rename all but one.")
    recipe = choose(replace(spec, target_column=chosen, preferences="pairs"), columns, where)
    by_name = (spec.source_column or spec.template, spec.target_column, spec.rejected_column)
    note = f"{where}: prompt is {' and '.join(map(repr, recipe.sources))}, chosen {chosen!r}, rejected {rejected!r}"
    notes = (f"{note}, found by name.",) if None in by_name else ()
    return PreferenceRecipe(replace(recipe, notes=notes), rejected)


def _no_preferences(
    missing: Sequence[str], chosen: str | None, rejected: str | None, columns: Sequence[str], where: str
) -> DataError:
    """Return the error for columns that are no preferences."""
    problem = f"set {' and '.join(missing)}" if missing else f"it has no column {rejected!r}"
    problem = f"{chosen!r} is both of them" if chosen is not None and chosen == rejected else problem
    equals = equals_in(columns) if chosen is None and rejected is None else None
    if equals is not None:
        problem = (
            f"{equals[0]!r} and {equals[1]!r} are of equal rank: set data.label_column to the column that says which "
            "is better, or data.target_column and data.rejected_column"
        )
    hint = did_you_mean(rejected or "", columns) if rejected not in columns else ""
    return DataError(
        f"{where}: preferences need a prompt, a chosen and a rejected completion, in columns named prompt, chosen and "
        f"rejected or as the settings name them: {problem}.{hint} Its columns: {', '.join(map(repr, columns))}."
    )
