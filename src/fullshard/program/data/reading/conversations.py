"""Rows that are conversations: OpenAI's messages, ShareGPT's conversations, prompts and completions of turns."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Literal

from fullshard.errors import DataError
from fullshard.program.data.examples import Conversation, Example, InputRow, SourceSpec, Turn, turn_text
from fullshard.program.data.reading.cells import as_json, cell_of, cell_text, column_of, columns_read
from fullshard.program.data.reading.json_file import Number
from fullshard.program.data.reading.row import Row, RowReader, UnusableRowError
from fullshard.program.data.reading.text_file import encoding_problem


@dataclass(frozen=True)
class MessageFormat:
    """A convention of chat data. To have another one recognised, add it to :data:`FORMATS`, and its roles."""

    columns: tuple[str, ...]  # columns with lists of turns, by lower-case name
    role: str  # key of a turn's role
    content: str  # key of a turn's text


FORMATS = (
    MessageFormat(("messages",), "role", "content"),  # OpenAI
    MessageFormat(("conversations", "conversation"), "from", "value"),  # ShareGPT
)
"""The message formats that are known. The first of their columns that the data has is used, and in each turn the first
role that it has, so that a column may have turns of any format."""

ROLES = {
    "assistant": ("assistant", "gpt", "chatgpt", "bing", "bard", "model", "bot", "function_call"),
    "user": ("user", "human"),
    "system": ("system",),
    "developer": ("developer",),
    "tool": ("tool", "function", "observation", "function_response", "tool_response"),
}
"""Each role with the names used for it in data of any format."""

_ROLE_OF = {name: role for role, names in ROLES.items() for name in names}
COLUMNS = tuple(name for one in FORMATS for name in one.columns)
"""Names of columns with lists of turns, in lower case."""
_MAY_BE_BLANK = ("system", "developer", "tool")
_COMMON = 0.95
"""Share of the conversations that must begin with the same system turns for these to be recorded."""
_MOST_SYSTEM_TURNS = 1000
_SHOWN_CHARACTERS = 60
LOOKED_AT = 100
"""Number of rows in which a list of turns is looked for."""


@dataclass(frozen=True)
class ConversationRecipe:
    """How the cells of a row become a conversation."""

    turns: str  # column of the turns; of a prompt and its completion, the prompt's
    completion: str | None  # column of the completion's turns, or None
    system: str | None  # column of the system's turn for conversations without one, or None
    tools: str | None  # column of the tools' descriptions, or None
    train_on: Literal["assistant", "last"]  # which of the assistant's turns are learned
    text_too: bool = False  # whether a cell that is no list of turns is text to be asked
    # on how it was chosen; the note on conversations needs all rows: see :func:`conversation_note`
    notes: tuple[str, ...] = ()

    @property
    def columns(self) -> list[str]:
        """The columns that it reads."""
        return [name for name in (self.turns, self.completion, self.system, self.tools) if name is not None]

    def example(self, row: Row) -> Example:
        """Return the example of a row.

        Raises:
            UnusableRowError: A turn is malformed, or no turn of the assistant can be learned.
        """
        messages = self._messages(row)
        given = len(messages)
        if self.completion is not None:
            messages += turns_of(self.completion, cell_of(row, self.completion))
            return self.learned(row, messages, given, self.completion)
        return self.learned(row, messages, 0, self.turns)

    def learned(self, row: Row, messages: Sequence[Turn], first: int, where: str) -> Example:
        """Return the example of turns whose answers from the ``first`` turn on are learned; ``where`` names a column.

        Raises:
            UnusableRowError: There is none.
        """
        answers = [index for index in range(first, len(messages)) if _is_learned(messages, index)]
        if not answers:
            raise UnusableRowError(f"column {where!r} has no turn of the assistant that answers another turn")
        kept = tuple(_without_weight(message) for message in messages[: answers[-1] + 1])
        chosen = tuple(answers if self.train_on == "assistant" else answers[-1:])
        left_out = len(messages) - len(kept)
        conversation = Conversation(kept, chosen, self._tools(row), left_out)
        return Example(conversation.history_text, (turn_text(kept[-1]),), row.line, conversation)

    def input_row(self, row: Row) -> InputRow:
        """Return the history to be answered: without the assistant's turns at the end.

        Raises:
            UnusableRowError: A turn is malformed, or nothing is left.
        """
        if self.text_too and row.problem is None and not has_turns(row, self.turns, is_plain=False):
            text = cell_text(self.turns, cell_of(row, self.turns))
            if not text.strip():
                raise UnusableRowError(f"column {self.turns!r} is empty")
            return InputRow(text, row.line)
        messages = self._messages(row)
        while messages and messages[-1]["role"] == "assistant":
            messages.pop()
        if not messages:
            raise UnusableRowError(f"column {self.turns!r} has no turn to answer")
        conversation = Conversation(tuple(map(_without_weight, messages)), (), self._tools(row))
        return InputRow(conversation.history_text, row.line, conversation=conversation)

    def _messages(self, row: Row) -> list[dict[str, Any]]:
        if row.problem is not None:
            raise UnusableRowError(row.problem)
        return self.after_system(row, turns_of(self.turns, cell_of(row, self.turns)))

    def after_system(self, row: Row, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return a row's turns after those of its system column, unless they begin with one.

        Raises:
            UnusableRowError: That column holds no text.
        """
        system = None if self.system is None else row.cells.get(self.system)
        if system is None or messages[0]["role"] in ("system", "developer"):
            return messages
        if not isinstance(system, str):
            raise UnusableRowError(f"column {self.system!r} holds a {type(system).__name__}, not text")
        return [{"role": "system", "content": system}, *messages] if system.strip() else messages

    def _tools(self, row: Row) -> tuple[Any, ...]:
        tools: Any = None if self.tools is None else row.cells.get(self.tools)
        if isinstance(tools, str):
            try:
                tools = json.loads(tools) if tools.strip() else None
            except ValueError as error:
                raise UnusableRowError(f"column {self.tools!r} is not JSON: {error}") from error
        if not isinstance(tools, list | None):
            raise UnusableRowError(f"column {self.tools!r} holds a {type(tools).__name__}, not a list of tools")
        return tuple(_plain(tools or ()))


def find_conversations(
    reader: RowReader,
    columns: Sequence[str],
    spec: SourceSpec,
    *,
    completed: bool,
    from_text: bool = True,
    asks_turns: bool = False,
) -> ConversationRecipe | None:
    """Return how rows become conversations; None if they are not.

    A column named by ``spec.source_column`` or by one of :data:`FORMATS`, or a ``prompt`` with its ``completion``, has
    conversations if one of the first 100 rows has a list of objects there, or the JSON text of a list of turns.

    Args:
        reader: The rows.
        columns: The names of their columns.
        spec: Columns; with a template, or a target column besides the source, rows are not conversations.
        completed: Whether rows have answers; else a prompt needs no completion.
        from_text: Whether JSON text may be turns.
        asks_turns: Whether the rows are for a model trained on conversations, so that the JSON text of a prompt
            without its completion is turns too.
    """
    if spec.template is not None or spec.target_column not in (None, spec.source_column):
        return None
    names = {name.strip().lower(): name for name in reversed(columns)}
    pair = [names[name] for name in ("prompt", "completion") if name in names]
    if spec.source_column is not None:
        candidates = [[spec.source_column]] if column_of(spec.source_column, columns) else []
    else:
        candidates = [[names[name]] for name in COLUMNS if name in names]
        candidates += [pair] if "prompt" in names and (len(pair) == 2 or not completed) else []
    for chosen in candidates:
        # A prompt without its completion may be text of any kind, also JSON.
        is_lone = chosen == pair and len(pair) == 1
        is_plain = not from_text or (is_lone and not asks_turns)
        looked_at = islice(reader.rows(columns_read(chosen, columns)), LOOKED_AT)
        if any(all(has_turns(row, name, is_plain=is_plain) for name in chosen) for row in looked_at):
            completion = chosen[1] if len(chosen) == 2 and completed else None
            found = ConversationRecipe(chosen[0], completion, names.get("system"), names.get("tools"), spec.train_on)
            return replace(found, text_too=is_lone and asks_turns)
    return None


@dataclass
class TurnCounts:
    """Accumulated counts of conversations."""

    conversations: int = 0
    turns: int = 0
    left_out: int = 0  # turns after a last answer

    def add(self, example: Example) -> None:
        """Count one, if the row is one."""
        if example.conversation is not None:
            self.conversations += 1
            self.turns += len(example.conversation.messages)
            self.left_out += example.conversation.left_out


class SystemTurnCounts:
    """Counts the system's turns that conversations begin with, in bounded memory."""

    def __init__(self) -> None:
        """Start without conversations."""
        self._counts: Counter[str] = Counter()
        self._conversations = 0

    def add(self, example: Example) -> None:
        """Count a row's, if it is a conversation."""
        if example.conversation is None:
            return
        self._conversations += 1
        turns = json.dumps(example.conversation.system_turns)
        if turns in self._counts or len(self._counts) < _MOST_SYSTEM_TURNS:
            self._counts[turns] += 1

    @property
    def common(self) -> list[dict[str, Any]] | None:
        """The turns of at least 95 % of the conversations, empty if those have none; None: they differ."""
        turns, count = max(self._counts.items(), key=lambda found: found[1], default=("[]", 0))
        return json.loads(turns) if self._conversations and count >= _COMMON * self._conversations else None


def asked_note(system_turns: Sequence[Turn], source: str) -> str:
    """Return a line for the user about rows of plain text that are read as the user's turn of a conversation.

    ``source`` says where the system's turns are from, or why there are none.
    """
    text = "; ".join(turn_text(turn) for turn in system_turns)
    shown = repr(text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…")
    after = f"after the system turn {shown}" if system_turns else "without a system turn"
    return f"plain text is read as the user's turn of a conversation, {after}: {source}"


def conversation_note(recipe: ConversationRecipe, counts: TurnCounts, where: str) -> str:
    """Return a line for the user with the number of conversations and what is learned of them."""
    turns = counts.turns / counts.conversations
    columns = recipe.turns if recipe.completion is None else f"{recipe.turns} and {recipe.completion}"
    learned = "every assistant turn" if recipe.train_on == "assistant" else "the last assistant turn"
    learned += "" if recipe.completion is None else " of the completion"
    after = f"; {counts.left_out:,} turns after a last answer are left out" if counts.left_out else ""
    return (
        f"{where}: {columns}: {counts.conversations:,} conversations of {turns:.1f} turns on average, loss on "
        f"{learned} (data.train_on){after}"
    )


def require_conversations(spec: SourceSpec, where: str) -> None:
    """Raise DataError if an option for conversations, ``data.train_on: last``, is set for rows that are none."""
    if spec.train_on != "assistant":
        raise DataError(
            f"{where}: data.train_on: {spec.train_on} applies to conversations, and its rows are none: no column "
            f"{', '.join(COLUMNS[:-1])} or {COLUMNS[-1]} has lists of turns. Leave it out, or name the column in "
            "data.source_column."
        )


def answers_as_rows(examples: Iterable[Example]) -> list[Example]:
    """Return a row for each learned answer of each conversation, with the history before it; other rows as they are."""
    rows: list[Example] = []
    for example in examples:
        whole = example.conversation
        if whole is None:
            rows.append(example)
            continue
        for place in whole.answers:
            part = replace(whole, messages=whole.messages[: place + 1], answers=(place,))
            target = (turn_text(whole.messages[place]),)
            rows.append(Example(part.history_text, target, example.line, part, example.weight))
    return rows


def opening(conversation: Conversation) -> str:
    """Return the turns before the assistant's first answer as text, equal for conversations that begin alike."""
    first = next(i for i in range(len(conversation.messages)) if _is_answer(conversation.messages, i))
    return replace(conversation, messages=conversation.messages[:first], answers=()).history_text


def _is_answer(messages: Sequence[Mapping[str, Any]], index: int) -> bool:
    """Return True if a turn is the assistant's and follows another turn."""
    return index > 0 and messages[index]["role"] == "assistant"


def _is_learned(messages: Sequence[Mapping[str, Any]], index: int) -> bool:
    """Return True if an answer is learned; OpenAI's format excludes those of weight 0."""
    return _is_answer(messages, index) and messages[index].get("weight", 1) != 0


def _without_weight(message: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in message.items() if key != "weight"}


def has_turns(row: Row, name: str, *, is_plain: bool) -> bool:
    """Return True if a row has turns there, or unless text ``is_plain``, the JSON text of turns with roles."""
    try:
        cell = cell_of(row, name)
    except UnusableRowError:
        return False
    if not isinstance(cell, str):
        return isinstance(cell, list) and any(isinstance(turn, Mapping) for turn in cell)
    turns = None if is_plain else as_json(cell)
    keys = {one.role for one in FORMATS}
    return isinstance(turns, list) and any(isinstance(turn, Mapping) and keys & turn.keys() for turn in turns)


def is_turn(cell: object) -> bool:
    """Return True if a cell is one turn: an object with a role."""
    return isinstance(cell, Mapping) and any(one.role in cell for one in FORMATS)


def turns_of(name: str, cell: object) -> list[dict[str, Any]]:
    """Return the turns of a cell, a list or one turn, with roles renamed to their standard names."""
    if cell is None:
        raise UnusableRowError(f"column {name!r} is missing")
    cell = as_json(cell)
    if is_turn(cell):
        cell = [cell]
    if not isinstance(cell, list):
        raise UnusableRowError(f"column {name!r} holds a {type(cell).__name__}, not a list of turns")
    if not cell:
        raise UnusableRowError(f"column {name!r} has no turns")
    return [_turn(f"column {name!r}, turn {number}", turn) for number, turn in enumerate(cell, start=1)]


def _turn(where: str, turn: object) -> dict[str, Any]:
    """Return one turn with role and content."""
    if not isinstance(turn, Mapping):
        raise UnusableRowError(f"{where} is a {type(turn).__name__}, not an object with role and content")
    format = next((one for one in FORMATS if turn.get(one.role) is not None), None)
    if format is None:
        roles, found = " nor ".join(one.role for one in FORMATS), ", ".join(map(repr, turn)) or "nothing"
        raise UnusableRowError(f"{where} has neither {roles}, but {found}")
    named = turn[format.role]
    role = _ROLE_OF.get(named.strip().lower()) if isinstance(named, str) else None
    if role is None:
        raise UnusableRowError(f"{where} has the unknown role {named!r}; known are {', '.join(_ROLE_OF)}")
    # Of a format that a turn does not use, a key is the turn's own, such as ``text`` beside role and content.
    known = {key for one in FORMATS if turn.get(one.role) is not None for key in (one.role, one.content)}
    more = {key: _plain(value) for key, value in turn.items() if key not in known and value is not None}
    content = _content(f"{where} ({named})", turn.get(format.content), may_lack=bool(more.get("tool_calls")))
    if not content.strip() and role not in _MAY_BE_BLANK and not more.get("tool_calls"):
        raise UnusableRowError(f"{where} ({named}) is empty")
    return {"role": role, "content": content, **more}


def _content(where: str, content: object, *, may_lack: bool) -> str:
    """Return a turn's text; the parts of a list are joined."""
    if content is None and may_lack:
        return ""
    parts = content if isinstance(content, list) else [content]
    texts: list[str] = []
    for part in parts:
        text = part.get("text") if isinstance(part, Mapping) and part.get("type", "text") == "text" else part
        if not isinstance(text, str):
            kind = f"a part of type {part.get('type')!r}" if isinstance(part, Mapping) else f"a {type(part).__name__}"
            raise UnusableRowError(f"{where} has no content" if part is None else f"{where} holds {kind}, not text")
        problem = encoding_problem(text, "utf-8")
        if problem is not None:
            raise UnusableRowError(f"{where}: {problem}")
        texts.append(str(text))
    return "".join(texts)


def _plain(value: Any) -> Any:
    """Convert values of JSON or Arrow: numbers become numbers, and keys without a value are dropped."""
    if isinstance(value, Number):
        return json.loads(value)
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items() if item is not None}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
