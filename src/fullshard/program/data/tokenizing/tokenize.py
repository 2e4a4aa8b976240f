"""Tokenization of examples, with statistics of lengths and truncation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fullshard.errors import DataError
from fullshard.program.data.examples import Example
from fullshard.program.data.tokenizing.chat import UnrenderedRowError, as_conversation, encode_chats
from fullshard.program.data.tokenizing.history import fitting_history
from fullshard.program.data.tokenizing.on_demand import Picked, RowSource
from fullshard.program.data.tokenizing.ragged import Encoded, EncodedRows, Ragged
from fullshard.program.data.tokenizing.separator import separator_ids, special_tail

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CHUNK_ROWS = 8192
"""Rows per call of the tokenizer: enough for all its threads, few enough for a progress bar."""


@dataclass(frozen=True)
class TokenizeSpec:
    """How text becomes ids."""

    max_source_length: int  # maximum tokens of a source, including prefix and special tokens; longer ones are truncated
    max_target_length: int  # maximum tokens of a target, including special tokens; longer ones are truncated
    source_prefix: str = ""  # text put before every source
    causal: bool = False  # whether source and target are one sequence (decoder-only) rather than two (encoder-decoder)
    # whether to apply the tokenizer's chat template to a causal model's source; None: if it has one
    chat_template: bool | None = None
    separator: str = ""  # text between source and target of a causal model without a chat template


@dataclass(frozen=True)
class LengthStats:
    """Lengths of one side of a tokenized set, in tokens."""

    mean: float  # mean length after truncation
    longest: int  # longest length before truncation
    truncated: int  # number of truncated rows
    limit: int  # maximum length


@dataclass(frozen=True)
class TokenizedSet:
    """Token ids of every row, in the order of the examples; in memory, or mapped from the cache."""

    source_ids: Ragged  # ids of each source; for a causal model the prompt. Lists are copied into arrays
    target_ids: Ragged  # ids of each target, including end-of-sequence
    source_stats: LengthStats  # lengths of the sources
    target_stats: LengthStats  # lengths of the targets
    cut: tuple[bool, ...] = ()  # whether each source was truncated; empty where the ids are from the cache
    # start and end of each run of learned tokens, in source and target joined; None: each row's target is learned
    spans: Ragged | None = None
    weights: NDArray[np.float64] | None = None  # factor on the loss of each row's tokens; None: all are 1
    set_rows: tuple[int, ...] = ()  # rows of each set of a mixture, which follow one another; empty: one set
    # makes the ids on demand; None: the set holds them
    source: RowSource | None = None
    estimated: bool = False  # whether the lengths of rows are estimates, and their statistics those of a sample

    def __post_init__(self) -> None:
        """Copy lists of rows into arrays."""
        for name in ("source_ids", "target_ids"):
            rows = getattr(self, name)
            if not isinstance(rows, Ragged):
                object.__setattr__(self, name, Ragged.from_rows(rows))

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.source_ids)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each row, source and target together."""
        return self.source_ids.lengths + self.target_ids.lengths

    def taken(self, rows: Sequence[int]) -> TokenizedSet:
        """Return a set that holds the ids of these rows, in ascending order; the set itself if it holds its ids.

        Raises:
            DataError: A row cannot be read or tokenized.
        """
        if self.source is None:
            return self
        found = self.source.encode(rows)
        return replace(
            self,
            source_ids=Picked(found.source.ids, rows),
            target_ids=Picked(found.target.ids, rows),
            spans=None if found.spans is None else Picked(found.spans, rows),
            source=None,
            estimated=False,
        )


@dataclass
class LengthCounter:
    """Accumulates the statistics of one side over chunks."""

    limit: int
    rows: int = 0
    tokens: int = 0
    longest: int = 0
    truncated: int = 0

    def add(self, part: Encoded) -> None:
        """Count some rows."""
        self.rows += len(part.ids)
        self.tokens += len(part.ids.ids)
        self.longest = max(self.longest, int(part.full_lengths.max()))
        self.truncated += int((part.full_lengths > self.limit).sum())

    def stats(self) -> LengthStats:
        """Return the statistics."""
        return LengthStats(self.tokens / self.rows, self.longest, self.truncated, self.limit)


@dataclass
class Counters:
    """Accumulates the statistics of both sides of a set."""

    spec: TokenizeSpec
    source: LengthCounter = field(init=False)
    target: LengthCounter = field(init=False)

    def __post_init__(self) -> None:
        """Create empty counters."""
        self.source = LengthCounter(self.spec.max_source_length)
        self.target = LengthCounter(self.spec.max_target_length)

    def add(self, rows: EncodedRows) -> None:
        """Count some rows."""
        self.source.add(rows.source)
        self.target.add(rows.target)


def tokenize(
    examples: Sequence[Example],
    tokenizer: PreTrainedTokenizerBase,
    spec: TokenizeSpec,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> TokenizedSet:
    """Tokenize examples in memory. It is deterministic: every rank may call it and gets the same result.

    Encoder-decoder: sources and targets get the tokenizer's special tokens (T5: an end-of-sequence token after each).
    Causal without a chat template: the prompt ends with the separator and gets the tokenizer's special tokens, the
    target gets only a final end-of-sequence token. With one, or for a conversation: the prompt is the template up to
    the start of the last answer, the target is the rest of the template, and the spans say which tokens are learned.
    The two are joined when a batch is made. An encoder-decoder reads a conversation's history as text; one that is too
    long loses its oldest turns.

    Args:
        examples: At least one row.
        tokenizer: Any Hugging Face tokenizer.
        spec: Prefix, limits, kind of model, chat template and separator.
        progress: Called with rows done and in total.

    Returns:
        Ids and length statistics.

    Raises:
        DataError: There are no examples, a limit leaves no room for a token of text, the tokenizer drops the
            separator, or the chat template is missing or cannot be used.
    """
    counters, parts, cut = Counters(spec), [], []
    for rows in encode_chunks(examples, tokenizer, spec, progress):
        counters.add(rows)
        parts.append(rows)
        cut += (rows.source.full_lengths > spec.max_source_length).tolist()
    spans = [rows.spans for rows in parts if rows.spans is not None]
    return TokenizedSet(
        source_ids=Ragged.joined([rows.source.ids for rows in parts]),
        target_ids=Ragged.joined([rows.target.ids for rows in parts]),
        source_stats=counters.source.stats(),
        target_stats=counters.target.stats(),
        cut=tuple(cut),
        spans=Ragged.joined(spans) if spans else None,
        weights=weights_of(examples),
    )


def weights_of(examples: Sequence[Example]) -> NDArray[np.float64] | None:
    """Return the weight of each row; None if all are 1."""
    weights = np.asarray([row.weight for row in examples])
    return None if (weights == 1.0).all() else weights


def encode_chunks(
    examples: Sequence[Example],
    tokenizer: PreTrainedTokenizerBase,
    spec: TokenizeSpec,
    progress: Callable[[int, int], None],
) -> Iterator[EncodedRows]:
    """Yield the ids of a few thousand rows at a time; see :func:`tokenize`.

    Raises:
        DataError: See :func:`tokenize`.
    """
    if not examples:
        raise DataError("There are no rows to tokenize: at least one is needed.")
    chats = uses_chat_template(tokenizer, spec)
    progress(0, len(examples))
    for start in range(0, len(examples), CHUNK_ROWS):
        rows = examples[start : start + CHUNK_ROWS]
        if chats:
            limits = (spec.max_source_length, spec.max_target_length)
            try:
                found = encode_chats([as_conversation(row) for row in rows], tokenizer, spec.source_prefix, limits)
            except UnrenderedRowError as error:
                raise DataError(f"Line {rows[error.place].line} of the data: {error}") from error
            yield EncodedRows(_encoded(*found.prompts), _encoded(*found.completions), Ragged.from_rows(found.spans))
        elif spec.causal:
            sources = _encode_prompts([spec.source_prefix + row.source for row in rows], tokenizer, spec)
            yield EncodedRows(sources, _encode_completions([row.target for row in rows], tokenizer, spec))
        else:
            sources = _encode_sources(rows, tokenizer, spec)
            targets = _encode([row.target for row in rows], tokenizer, spec.max_target_length, "target")
            yield EncodedRows(sources, _encoded(*targets))
        progress(min(start + CHUNK_ROWS, len(examples)), len(examples))


def uses_chat_template(tokenizer: PreTrainedTokenizerBase, spec: TokenizeSpec) -> bool:
    """Return whether the tokenizer's chat template is applied to sources.

    Raises:
        DataError: It is requested, and there is none, or the model is an encoder-decoder.
    """
    if spec.chat_template is None:
        return spec.causal and tokenizer.chat_template is not None
    if spec.chat_template and not spec.causal:
        raise DataError("data.chat_template: true needs a causal model; this one is an encoder-decoder.")
    if spec.chat_template and tokenizer.chat_template is None:
        raise DataError(
            "data.chat_template: true needs a tokenizer with a chat template; this one has none. Set it to null, or "
            "save a template with the tokenizer."
        )
    return spec.chat_template


def writes_date(tokenizer: PreTrainedTokenizerBase, spec: TokenizeSpec) -> bool:
    """Return True if ids depend on the current date, because the chat template contains it.

    Raises:
        DataError: As for :func:`uses_chat_template`.
    """
    return uses_chat_template(tokenizer, spec) and "strftime_now" in str(tokenizer.chat_template)


def _encoded(rows: Sequence[Sequence[int]], full_lengths: Sequence[int]) -> Encoded:
    return Encoded(Ragged.from_rows(rows), np.asarray(full_lengths, np.int64))


def _encode_sources(rows: Sequence[Example], tokenizer: PreTrainedTokenizerBase, spec: TokenizeSpec) -> Encoded:
    """Encode an encoder's sources; the lengths before truncation are those of complete histories."""
    texts, limit = [spec.source_prefix + row.source for row in rows], spec.max_source_length
    full = {}
    talks = [place for place, row in enumerate(rows) if row.conversation is not None]
    lengths = map(len, _call(tokenizer, "text", [texts[place] for place in talks], verbose=False) if talks else ())
    for place, length in zip(talks, lengths, strict=True):
        if length > limit and (conversation := rows[place].conversation) is not None:
            full[place] = length
            texts[place] = fitting_history(conversation, tokenizer, spec.source_prefix, limit)
    ids, found = _encode(texts, tokenizer, limit, "source")
    return _encoded(ids, [full.get(place, length) for place, length in enumerate(found)])


def _encode_prompts(sources: list[str], tokenizer: PreTrainedTokenizerBase, spec: TokenizeSpec) -> Encoded:
    """Encode with special tokens, with the separator after the text, which is truncated to leave room for it."""
    between = separator_ids(tokenizer, spec.separator)
    rows, lengths = _encode(sources, tokenizer, spec.max_source_length, "source", reserved=len(between))
    if between:
        tail = special_tail(tokenizer)
        rows = [[*row[: len(row) - tail], *between, *row[len(row) - tail :]] for row in rows]
    return _encoded(rows, [length + len(between) for length in lengths])


def _encode(
    texts: list[str], tokenizer: PreTrainedTokenizerBase, limit: int, side: str, *, reserved: int = 0
) -> tuple[list[list[int]], list[int]]:
    """Encode with special tokens, truncated to ``limit - reserved``; return ids and lengths before truncation."""
    _require_room(limit, tokenizer.num_special_tokens_to_add(), side, reserved)
    limit -= reserved
    # verbose=False: no warning about the model's own limit; ours is counted and reported.
    keyword = "text_target" if side == "target" else "text"
    ids = _call(tokenizer, keyword, texts, verbose=False)
    lengths = [len(row) for row in ids]
    # Only texts that are too long are encoded twice.
    long_rows = [row for row, length in enumerate(lengths) if length > limit]
    if long_rows:
        cut = _call(tokenizer, keyword, [texts[row] for row in long_rows], truncation=True, max_length=limit)
        for row, row_ids in zip(long_rows, cut, strict=True):
            ids[row] = row_ids
    return ids, lengths


def _encode_completions(texts: list[str], tokenizer: PreTrainedTokenizerBase, spec: TokenizeSpec) -> Encoded:
    """Encode with only a final end-of-sequence token, truncated with that token kept."""
    limit = spec.max_target_length
    _require_room(limit, 1, "target")
    bare = _call(tokenizer, "text", texts, add_special_tokens=False, verbose=False)
    ids = [[*row[: limit - 1], tokenizer.eos_token_id] for row in bare]
    return _encoded(ids, [len(row) + 1 for row in bare])


def _call(tokenizer: PreTrainedTokenizerBase, keyword: str, texts: list[str], **options: Any) -> list[list[int]]:
    """Encode texts that are passed to the tokenizer under a keyword."""
    encode: Any = tokenizer
    return encode(**{keyword: texts}, **options)["input_ids"]


def _require_room(limit: int, num_special: int, side: str, separator: int = 0) -> None:
    """Raise DataError if a limit leaves no room besides special tokens and separator."""
    taken = num_special + separator
    if limit <= taken:
        also = f" and the separator has {separator}" if separator else ""
        raise DataError(
            f"A max_{side}_length of {limit} leaves no room for text: the tokenizer adds {num_special} special tokens"
            f"{also}. Use at least {taken + 1}."
        )
