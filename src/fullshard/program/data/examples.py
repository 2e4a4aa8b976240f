"""Types shared by all of data: example, conversation, the rows of a split, and where rows come from."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal

from fullshard.errors import DataError

Split = Literal["train", "validation"]

Turn = Mapping[str, Any]
"""One turn of a conversation: its role and content, and other keys that a chat template may read."""


@dataclass(frozen=True)
class Conversation:
    """Turns of a conversation, some of whose assistant answers are learned. Indices count from 0."""

    # each turn's role (system, user, assistant, tool, ...) and content, and other keys that a chat template may read
    messages: tuple[Turn, ...]
    # indices of the learned turns, in order, the last turn among them; empty: a history to be answered
    answers: tuple[int, ...]
    tools: tuple[Any, ...] = ()  # descriptions of the tools that the assistant may call
    left_out: int = 0  # turns after the last answer, which are not learned

    @property
    def history(self) -> tuple[Turn, ...]:
        """The turns before the last answer; all of them if there is none."""
        return self.messages[:-1] if self.answers else self.messages

    @property
    def system_turns(self) -> tuple[Turn, ...]:
        """The turns of the system or the developer at the beginning."""
        return tuple(takewhile(lambda turn: turn["role"] in ("system", "developer"), self.history))

    def without_oldest(self) -> Conversation | None:
        """Return it without its oldest turns, up to the user's next turn; None if the user has no later turn.

        Turns of the system at the beginning stay.
        """
        start, end = len(self.system_turns), len(self.history)
        later = next((place for place in range(start + 1, end) if self.messages[place]["role"] == "user"), None)
        if later is None:
            return None
        answers = tuple(answer - (later - start) for answer in self.answers if answer >= later)
        return replace(self, messages=self.messages[:start] + self.messages[later:], answers=answers)

    @property
    def history_text(self) -> str:
        """The history as text: the tools if there are any, then a line for each turn, with its role."""
        tools = [f"tools: {_as_json(self.tools)}"] if self.tools else []
        return "\n".join([*tools, *(f"{turn['role']}: {turn_text(turn)}" for turn in self.history)])


def asked(text: str, earlier: Sequence[Turn] = (), answer: str | None = None) -> Conversation:
    """Return a text as the user's turn after earlier turns; with an answer, which is learned, else to be answered.

    Rows of plain text are rendered by it for training, evaluation, prediction and chat.
    """
    turns = (*earlier, {"role": "user", "content": text})
    if answer is None:
        return Conversation(turns, ())
    return Conversation((*turns, {"role": "assistant", "content": answer}), (len(turns),))


def turn_text(turn: Turn) -> str:
    """Return a turn's content, followed by its tool calls as JSON."""
    calls = turn.get("tool_calls")
    return turn["content"] + (_as_json(calls) if calls else "")


def _as_json(value: Any) -> str:
    """Format JSON as transformers' ``tojson`` does in chat templates."""
    return json.dumps(value, ensure_ascii=False)


@dataclass(frozen=True)
class Example:
    """One row."""

    source: str  # the input text as in the data, or the filled-in template; without the prefix
    # correct targets, at least one. Training uses the first. Of plain text, the text itself
    references: tuple[str, ...]
    # line of the file where the row starts, from 1 (the header of a CSV is line 1); the row's number, from 1, if the
    # data has no lines
    line: int
    # the row's turns, if it is a conversation: source and reference are then its history and its last answer as text
    conversation: Conversation | None = None
    weight: float = 1.0  # factor on the loss of its tokens, positive
    # the prompt with the completion that the target is preferred to; None: there is none
    rejected: Example | None = None
    desirable: bool | None = None  # whether the target is; None: rows have no labels

    @property
    def target(self) -> str:
        """The target text: the first reference."""
        return self.references[0]

    @property
    def as_conversation(self) -> Conversation:
        """The row's conversation; a source and its target are the turns of user and assistant."""
        return self.conversation or asked(self.source, answer=self.target)

    def after(self, system_turns: Sequence[Turn]) -> Example:
        """Return a row of plain text as a conversation that begins with the system's turns; a conversation as it is."""
        if self.conversation is not None:
            return self
        conversation = asked(self.source, system_turns, self.target)
        return replace(self, source=conversation.history_text, conversation=conversation)


def in_pairs(rows: Sequence[Example]) -> list[Example]:
    """Return two rows for each preference: the prompt with the chosen completion, and with the rejected one."""
    both = ((replace(row, references=row.references[:1], rejected=None), row.rejected) for row in rows)
    return [row for pair in both for row in pair if row is not None]


def with_unrelated(rows: Sequence[Example]) -> list[Example]:
    """Return each row, and its prompt with the completion of the next row of another prompt, the first after the last.

    Raises:
        DataError: All rows have one prompt.
    """
    others = list(rows)
    for row in [*range(len(rows)), *range(len(rows))][::-1]:  # twice: the end's next ones are known after a round
        after = (row + 1) % len(rows)
        others[row] = rows[after] if rows[after].source != rows[row].source else others[after]
    if any(one.source == other.source for one, other in zip(rows, others, strict=True)):
        raise DataError("All rows have the same prompt, and kto compares a prompt's completion with another prompt's.")
    return [one for row, other in zip(rows, others, strict=True) for one in (row, _answered(row, other))]


def _answered(row: Example, other: Example) -> Example:
    """Return a row with another one's target, of conversations with its last answer."""
    talk, turns = row.conversation, () if other.conversation is None else other.conversation.messages[-1:]
    if talk is not None:
        talk = replace(talk, messages=(*talk.history, *turns), answers=(len(talk.history),))
    return replace(row, references=other.references[:1], conversation=talk, desirable=None)


@dataclass(frozen=True)
class InputRow:
    """One row to predict for."""

    source: str  # as in :class:`Example`; empty where it could not be read
    line: int  # as in :class:`Example`
    problem: str | None = None  # why it cannot be used; None: it can
    conversation: Conversation | None = None  # the history to be answered, if the row has turns
    cells: Mapping[str, object] = field(default_factory=dict)  # its cells by column, as read; empty: a line of text

    @property
    def is_plain(self) -> bool:
        """True if it can be used and is not a conversation."""
        return self.problem is None and self.conversation is None

    @property
    def example(self) -> Example:
        """The row as the model reads it; the target is not used."""
        text = self.source if self.conversation is None else self.conversation.history_text
        return Example(text, (text,), self.line, self.conversation)

    def after(self, earlier: Sequence[Turn]) -> InputRow:
        """Return a row of plain text as the user's turn after earlier turns; other rows as they are."""
        return replace(self, conversation=asked(self.source, earlier)) if self.is_plain else self


@dataclass(frozen=True)
class InputTable:
    """The rows to predict for: all of them, in the order of the data."""

    rows: list[InputRow]
    notes: tuple[str, ...] = ()  # as in :class:`Table`
    columns: tuple[str, ...] = ()  # the distinct names of all columns, in order; empty: lines of text
    delimiter: str | None = None  # what separates the cells of a CSV or TSV file
    quoted: bool = True  # False: quotes in that file are characters of its texts


@dataclass(frozen=True)
class SourceSpec:
    """Where rows come from: the options of the same names in the run file's ``data`` section."""

    train_file: Path | None = None
    validation_file: Path | None = None
    dataset_name: str | None = None
    dataset_config_name: str | None = None
    train_split: str = "train"
    validation_split: str | None = "validation"
    validation_fraction: float = 0.0
    format: Literal["auto", "csv", "tsv", "jsonl", "json", "parquet", "text", "wikihow", "phrasebank"] = "auto"
    encoding: str = "utf-8"
    delimiter: str | None = None
    quoting: Literal["auto", "none", "csv"] = "auto"
    text_column: str | None = None
    source_column: str | None = None
    target_column: str | None = None
    target_lists: Literal["references", "join"] = "references"
    template: str | None = None
    max_bad_rows: int = 0
    train_on: Literal["assistant", "last"] = "assistant"
    weight_column: str | None = None
    rejected_column: str | None = None
    label_column: str | None = None
    missing_values: Literal["empty", "text"] = "empty"
    held_out_by: Literal["classes", "source"] = "classes"
    # whether rows are a prompt with a chosen and a rejected completion, or a completion with a label; None: neither
    preferences: Literal["pairs", "labels"] | None = None


@dataclass(frozen=True)
class Table:
    """The rows of one split."""

    examples: list[Example]  # the examples in the order of the data
    # messages for the user: columns chosen by name, skipped rows with their lines
    notes: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()  # a line for each skipped row, if the notes do not show all
