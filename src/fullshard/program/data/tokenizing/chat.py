"""Conversations rendered with a tokenizer's chat template: prompt, completion, and the learned tokens."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any

from fullshard.errors import DataError
from fullshard.program.data.examples import Conversation
from fullshard.program.data.tokenizing.ragged import Encoded, EncodedRows, Ragged

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_REMEDY = (
    "Set data.train_on: last, or mark the assistant's turns in the template with {% generation %}. If the rows are "
    "not conversations, set data.chat_template: false."
)

_PLAIN_TOOLS = "{% if tools %}tools: {{ tools | tojson }}\n{% endif %}"

_PLAIN_TURN = (
    "{{ message.role }}: {{ message.content }}{% if message.tool_calls %}{{ message.tool_calls | tojson }}{% endif %}"
)

_PLAIN_TURNS = (
    "{% for message in messages %}{% if not loop.first %}{{ '\\n' }}{% endif %}"
    f"{_PLAIN_TURN}{{% if message.role == 'assistant' %}}{{{{ eos_token }}}}{{% endif %}}{{% endfor %}}"
)

_PLAIN_ANSWER = "{% if add_generation_prompt %}{{ '\\n' }}assistant:{% endif %}"


class UnrenderedRowError(DataError):
    """A row that the chat template cannot render; ``place`` is its index among the rows."""

    def __init__(self, message: str, place: int) -> None:
        super().__init__(message)
        self.place = place


@dataclass(frozen=True)
class _Rendered:
    """The rendered texts of one conversation, and its ids if the template marks what is learned."""

    prompt: str
    full: str
    turns: tuple[tuple[str, str], ...] = ()  # for each learned answer, the full text before it and up to its end
    ids: list[int] = field(default_factory=list)  # of the full text, with ``spans``
    spans: list[int] | None = None  # None: from the offsets of the turns


@dataclass(frozen=True)
class _Chat:
    """The ids of one conversation."""

    prompt: list[int]
    completion: list[int]
    spans: list[int]


def encode_chats(
    rows: Sequence[Conversation], tokenizer: PreTrainedTokenizerBase, prefix: str, limits: tuple[int, int]
) -> EncodedRows:
    """Encode conversations in the chat template: source and target together are that of the complete conversation.

    The source, the prompt, goes up to the start of the last answer. The target is that answer and the end of its turn,
    empty for a history to be answered.

    The learned tokens are those that the template marks with ``{% generation %}``; where it has no marks, each answer
    begins where the template of the turns before it ends (with the beginning of the assistant's turn), and ends where
    the template of the turns up to it ends. A token over such a border belongs to what follows.

    A prompt that is too long loses its oldest turns, then the end of its longest text; an answer that is too long loses
    its end. The template itself is not cut.

    Args:
        rows: Conversations with answers, or histories to be answered.
        tokenizer: A tokenizer with a chat template.
        prefix: Text put before the user's first turn.
        limits: Maximum tokens of a prompt and of a completion, including the template's.

    Raises:
        DataError: The template of a beginning is not the beginning of the template, the template fails or marks other
            turns than the assistant's, or a limit leaves no room for a token of text.
    """
    rows = [_prefixed(row, prefix) for row in rows]
    chats = _encode_rows(rows, tokenizer)
    lengths = [(len(chat.prompt), len(chat.completion)) for chat in chats]
    for place, (prompt, completion) in enumerate(lengths):
        if prompt > limits[0] or completion > limits[1]:
            try:
                chats[place] = _shortened(rows[place], tokenizer, limits)
            except UnrenderedRowError as error:
                raise UnrenderedRowError(str(error), place) from error
    return EncodedRows(
        Encoded.of([chat.prompt for chat in chats], [prompt for prompt, _ in lengths]),
        Encoded.of([chat.completion for chat in chats], [completion for _, completion in lengths]),
        Ragged.from_rows([chat.spans for chat in chats]),
    )


def _prefixed(row: Conversation, prefix: str) -> Conversation:
    first = next((place for place, turn in enumerate(row.messages) if turn["role"] == "user"), None)
    return row if first is None or not prefix else _with_text(row, first, prefix + row.messages[first]["content"])


def _with_text(row: Conversation, place: int, text: str) -> Conversation:
    turn = {**row.messages[place], "content": text}
    return replace(row, messages=(*row.messages[:place], turn, *row.messages[place + 1 :]))


def _encode_rows(rows: Sequence[Conversation], tokenizer: PreTrainedTokenizerBase) -> list[_Chat]:
    """Encode conversations without adding special tokens, which the template contains."""
    # Whether the template marks what the assistant writes and the tokenizer can locate it.
    by_marks = bool(tokenizer.is_fast) and _GENERATION.search(str(tokenizer.chat_template)) is not None
    rendered = []
    for place, row in enumerate(rows):
        try:
            rendered.append(_render(row, tokenizer, by_marks=by_marks))
        except DataError as error:
            raise UnrenderedRowError(str(error), place) from error
    texts = list(dict.fromkeys(text for one in rendered for text in (one.prompt, one.full, *chain(*one.turns))))
    encode: Any = tokenizer
    ids = dict(zip(texts, encode(text=texts, add_special_tokens=False, verbose=False)["input_ids"], strict=True))
    chats = []
    for one in rendered:
        full = ids[one.full]
        border = _common(ids[one.prompt], full)
        spans = one.spans
        if spans is None:
            spans = [_common(ids[text], full) for text in chain(*one.turns)]
        chats.append(_Chat(full[:border], full[border:], spans))
    return chats


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the length of two texts' common prefix."""
    if second[: len(first)] == first:
        return len(first)
    return next((at for at, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), len(first))


def _render(row: Conversation, tokenizer: PreTrainedTokenizerBase, *, by_marks: bool) -> _Rendered:
    """Render the prompt and the complete conversation, and what locates the learned tokens."""
    prompt = _apply(row, len(row.history), tokenizer)
    if not row.answers:
        return _Rendered(prompt, prompt)
    full = _apply(row, len(row.messages), tokenizer, complete=True)
    _require_beginning(prompt, full)
    if by_marks:
        return _Rendered(prompt, full, spans=_marked(row, tokenizer))
    turns: list[tuple[str, str]] = []
    for answer in row.answers[:-1]:
        turns.append((_apply(row, answer, tokenizer), _apply(row, answer + 1, tokenizer, complete=True)))
        _require_beginning(turns[-1][0], full)
        _require_beginning(turns[-1][1], full)
    return _Rendered(prompt, full, (*turns, (prompt, full)))


def _apply(row: Conversation, end: int, tokenizer: PreTrainedTokenizerBase, *, complete: bool = False) -> str:
    """Render the first ``end`` turns; unless they are complete, with the beginning of the assistant's turn."""
    return _call(row, end, tokenizer, tokenize=False, add_generation_prompt=not complete)


def _call(row: Conversation, end: int, tokenizer: PreTrainedTokenizerBase, **options: Any) -> Any:
    render: Any = tokenizer.apply_chat_template
    try:
        return render([dict(turn) for turn in row.messages[:end]], tools=list(row.tools) or None, **options)
    except Exception as error:  # a template is a program and may raise any exception
        roles = ", ".join(str(turn["role"]) for turn in row.messages[:end])
        raise DataError(
            f"The tokenizer's chat template failed: {error}. The turns were: {roles}. Correct such rows. If rows "
            "are not conversations, set data.chat_template: false."
        ) from error


def _require_beginning(part: str, full: str) -> None:
    if not full.startswith(part):
        raise DataError(
            "The tokenizer's chat template cannot be used for training: a conversation must begin with its "
            f"prompt. The prompt ends with {part[-40:]!r}, where the conversation has "
            f"{full[max(0, len(part) - 40) : len(part)]!r}. {_REMEDY}"
        )


def _marked(row: Conversation, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the spans that the template marks, of the answers that are learned.

    Raises:
        DataError: The marks are not one for each turn of the assistant.
    """
    options = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
    mask = _call(row, len(row.messages), tokenizer, **options)["assistant_masks"]
    borders = [place for place, (a, b) in enumerate(pairwise([0, *mask, 0])) if a != b]
    spans = list(zip(borders[::2], borders[1::2], strict=True))
    spoken = [place for place, turn in enumerate(row.messages) if turn["role"] == "assistant"]
    if len(spans) != len(spoken):
        raise DataError(
            f"The tokenizer's chat template marks {len(spans)} answers with {{% generation %}}, but a conversation "
            f"has {len(spoken)} turns of the assistant. Mark each of them, or none."
        )
    learned = (span for place, span in zip(spoken, spans, strict=True) if place in row.answers)
    return [border for span in learned for border in span]


def _shortened(row: Conversation, tokenizer: PreTrainedTokenizerBase, limits: tuple[int, int]) -> _Chat:
    """Encode one conversation with its oldest turns dropped and its texts truncated to both limits."""
    chat = _encode_rows([row], tokenizer)[0]
    while len(chat.prompt) > limits[0] and (shorter := row.without_oldest()) is not None:
        row, chat = shorter, _encode_rows([shorter], tokenizer)[0]
    encode: Any = tokenizer
    sizes = [(turn["role"] != "system", len(turn["content"])) for turn in row.history]
    question = sizes.index(max(sizes))
    places = {"source": question, "target": len(row.messages) - 1}
    ids = {
        name: encode(text=row.messages[place]["content"], add_special_tokens=False, verbose=False)["input_ids"]
        for name, place in places.items()
    }
    keep = {name: len(text) for name, text in ids.items()}
    while True:
        over = {"source": len(chat.prompt) - limits[0], "target": len(chat.completion) - limits[1]}
        if max(over.values()) <= 0:
            return chat
        for name, limit in zip(("source", "target"), limits, strict=True):
            if over[name] > 0:
                keep[name] -= over[name]
                if keep[name] < 1:
                    raise DataError(
                        f"A max_{name}_length of {limit} leaves no room for text: the chat template needs more. "
                        f"Use at least {limit + 1 - keep[name]}."
                    )
                text = str(tokenizer.decode(ids[name][: keep[name]], clean_up_tokenization_spaces=False))
                row = _with_text(row, places[name], text)
        chat = _encode_rows([row], tokenizer)[0]


def add_plain_template(tokenizer: PreTrainedTokenizerBase) -> str:
    """Give a tokenizer the plain chat template; return a note for the user; any process.

    Each turn is a line, ``role: content``, and the assistant's ends with the end-of-sequence token. The text begins
    with the special tokens that the tokenizer puts before a text. The template is saved with the model.
    """
    encode: Any = tokenizer
    bare = encode(text="a", add_special_tokens=False)["input_ids"]
    full = encode(text="a", add_special_tokens=True)["input_ids"]
    head = "".join(tokenizer.convert_ids_to_tokens(full[: full.index(bare[0])] if bare and bare[0] in full else []))
    start = f"{{{{ {head!r} }}}}" if head else ""
    tokenizer.chat_template = f"{start}{_PLAIN_TOOLS}{_PLAIN_TURNS}{_PLAIN_ANSWER}"
    turns = [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]
    shown = str(tokenizer.apply_chat_template(turns, tokenize=False))
    return (
        f"the tokenizer has no chat template: conversations are rendered as {shown!r}. This template is saved with "
        "the model (data.chat_template)"
    )
