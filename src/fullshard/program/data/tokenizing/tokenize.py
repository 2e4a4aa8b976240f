"""Tokenization of examples, with statistics of lengths, what separates source and target, and one row as it is read."""

from __future__ import annotations

import string
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fullshard.errors import DataError
from fullshard.program.data.examples import Conversation, Example
from fullshard.program.data.tokenizing.chat import UnrenderedRowError, encode_chats
from fullshard.program.data.tokenizing.plain_text import encode_text
from fullshard.program.data.tokenizing.ragged import (
    Chained,
    ChainedSource,
    Encoded,
    EncodedRows,
    Picked,
    Ragged,
    RowSource,
    joined_rows,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CHUNK_ROWS = 8192
"""Rows per call of the tokenizer: enough for all its threads, few enough for a progress bar."""

ONE_ROW = "one training row as the model sees it"
"""Beginning of the note that shows one row."""

MOST_CHARACTERS = 400
"""Maximum characters of a row to show; longer rows are cut in the middle of their longest parts."""


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
    text_tokens: int = 0  # tokens of the rows that joined plain text is cut into; 0: rows are sources and targets


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
    # rows next to each other that share every micro-batch: 2 of a preference, a prompt with its chosen and its rejected
    # completion, or with its own and an unrelated one
    together: int = 1
    desirable: NDArray[np.bool_] | None = (
        None  # for each run of such rows whether the first is; None: there are no labels
    )
    # log-probability of each row's target under the reference of preferences; None: there is none
    reference: NDArray[np.float64] | None = None

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
    def examples(self) -> int:
        """Number of rows of the data: preferences are one each."""
        return len(self) // self.together

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each row, source and target together."""
        return self.source_ids.lengths + self.target_ids.lengths

    def forwards(self, rows: Any) -> tuple[Any, ...]:
        """Return the rows of a micro-batch by forwards: with labels the prompts' own completions, then the others."""
        return (rows,) if self.desirable is None else (rows[::2], rows[1::2])

    def for_epoch(self, epoch: int) -> TokenizedSet:
        """Return the set with the ids of an epoch, counted from 0; its lengths are the same in each."""
        sides = {name: getattr(self, name).for_epoch(epoch) for name in ("source_ids", "target_ids")}
        return replace(self, **sides)

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


class Counters:
    """Accumulates the statistics of both sides of a set over chunks of its rows."""

    def __init__(self, spec: TokenizeSpec) -> None:
        self._limits = {"source": spec.max_source_length, "target": spec.max_target_length}
        self._rows = 0
        self._found = {name: np.zeros(3, np.int64) for name in self._limits}  # tokens, longest, truncated

    def add(self, rows: EncodedRows) -> None:
        """Count some rows."""
        self._rows += len(rows.source.ids)
        for name, side in (("source", rows.source), ("target", rows.target)):
            tokens, longest, truncated = self._found[name]
            over = (side.full_lengths > self._limits[name]).sum()
            self._found[name][:] = tokens + side.ids.num_ids, max(longest, side.full_lengths.max()), truncated + over

    def stats(self) -> dict[str, LengthStats]:
        """Return the statistics of source and target."""
        return {
            name: LengthStats(int(tokens) / self._rows, int(longest), int(truncated), self._limits[name])
            for name, (tokens, longest, truncated) in self._found.items()
        }

    def kept(self) -> dict[str, dict[str, Any]]:
        """Return the statistics as JSON values."""
        return {name: asdict(stats) for name, stats in self.stats().items()}


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
    counters, parts = Counters(spec), list(encode_chunks(examples, tokenizer, spec, progress))
    for rows in parts:
        counters.add(rows)
    found, stats = joined_rows(parts), counters.stats()
    return TokenizedSet(
        source_ids=found.source.ids,
        target_ids=found.target.ids,
        source_stats=stats["source"],
        target_stats=stats["target"],
        cut=tuple((found.source.full_lengths > spec.max_source_length).tolist()),
        spans=found.spans,
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
    """Yield the ids of a few thousand rows at a time; arguments and errors as for :func:`tokenize`."""
    if not examples:
        raise DataError("There are no rows to tokenize: at least one is needed.")
    if spec.text_tokens:
        yield from encode_text([row.source for row in examples], tokenizer, spec.text_tokens, progress)
        return
    chats = uses_chat_template(tokenizer, spec)
    progress(0, len(examples))
    for start in range(0, len(examples), CHUNK_ROWS):
        rows = examples[start : start + CHUNK_ROWS]
        if chats:
            limits = (spec.max_source_length, spec.max_target_length)
            try:
                yield encode_chats([row.as_conversation for row in rows], tokenizer, spec.source_prefix, limits)
            except UnrenderedRowError as error:
                raise DataError(f"Line {rows[error.place].line} of the data: {error}") from error
        elif spec.causal:
            sources = _encode_prompts([spec.source_prefix + row.source for row in rows], tokenizer, spec)
            yield EncodedRows(sources, _encode_completions([row.target for row in rows], tokenizer, spec))
        else:
            sources = _encode_sources(rows, tokenizer, spec)
            targets = _encode([row.target for row in rows], tokenizer, spec.max_target_length, "target")
            yield EncodedRows(sources, Encoded.of(*targets))
        progress(min(start + CHUNK_ROWS, len(examples)), len(examples))


def chained(sets: Sequence[TokenizedSet]) -> TokenizedSet:
    """Return the concatenated rows of all sets; a single set is returned unchanged.

    The sets share one tokenizer and kind of model, so either all or none have spans. They belong to one run, so either
    all or none are tokenized on demand or pairs. Rows with labels are of one set.
    """
    if len(sets) == 1:
        return sets[0]
    spans = [one.spans for one in sets if one.spans is not None]
    sources = [one.source for one in sets if one.source is not None] or None
    weights = [np.ones(len(one)) if one.weights is None else one.weights for one in sets]
    rows = list(map(len, sets))
    return TokenizedSet(
        source_ids=Chained([one.source_ids for one in sets]),
        target_ids=Chained([one.target_ids for one in sets]),
        source_stats=_joined([one.source_stats for one in sets], rows),
        target_stats=_joined([one.target_stats for one in sets], rows),
        spans=Chained(spans) if spans else None,
        weights=np.concatenate(weights) if any(one.weights is not None for one in sets) else None,
        set_rows=tuple(rows),
        source=None if sources is None else ChainedSource(sources, rows),
        estimated=any(one.estimated for one in sets),
        together=sets[0].together,
    )


def _joined(stats: Sequence[LengthStats], rows: Sequence[int]) -> LengthStats:
    tokens = sum(one.mean * count for one, count in zip(stats, rows, strict=True))
    return LengthStats(
        mean=tokens / sum(rows),
        longest=max(one.longest for one in stats),
        truncated=sum(one.truncated for one in stats),
        limit=stats[0].limit,
    )


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

    Raises DataError as :func:`uses_chat_template`.
    """
    return uses_chat_template(tokenizer, spec) and "strftime_now" in str(tokenizer.chat_template)


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
    return Encoded.of(ids, [full.get(place, length) for place, length in enumerate(found)])


def _encode_prompts(sources: list[str], tokenizer: PreTrainedTokenizerBase, spec: TokenizeSpec) -> Encoded:
    """Encode with special tokens, with the separator after the text, which is truncated to leave room for it."""
    between = separator_ids(tokenizer, spec.separator)
    rows, lengths = _encode(sources, tokenizer, spec.max_source_length, "source", reserved=len(between))
    if between:
        tail = special_tail(tokenizer)
        rows = [[*row[: len(row) - tail], *between, *row[len(row) - tail :]] for row in rows]
    return Encoded.of(rows, [length + len(between) for length in lengths])


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
    return Encoded.of(ids, [len(row) + 1 for row in bare])


def _call(tokenizer: PreTrainedTokenizerBase, keyword: str, texts: list[str], **options: Any) -> list[list[int]]:
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


def fitting_history(conversation: Conversation, tokenizer: PreTrainedTokenizerBase, prefix: str, limit: int) -> str:
    """Return prefix and history within ``limit`` tokens including special ones, if dropping turns suffices."""
    while True:
        text = prefix + conversation.history_text
        shorter = conversation.without_oldest()
        if shorter is None or len(_ids(tokenizer, text, special=True)) <= limit:
            return text
        conversation = shorter


def _ids(tokenizer: PreTrainedTokenizerBase, text: str, *, special: bool = False) -> list[int]:
    encode: Any = tokenizer
    return encode(text=text, add_special_tokens=special, verbose=False)["input_ids"]


def choose_separator(given: str | None, template: str | None, tokenizer: PreTrainedTokenizerBase) -> str:
    """Choose the separator for a causal model without a chat template; any process.

    Args:
        given: ``data.separator``; None chooses a line break, unless the source already ends with a separator: a
            special token, or text of the template after its last column.
        template: ``data.template``.
        tokenizer: The model's tokenizer.
    """
    if given is not None:
        return given
    if special_tail(tokenizer):
        return ""
    last = [name for _, name, _, _ in string.Formatter().parse(template or "{}")][-1]
    return "\n" if last is not None else ""  # None: the template has text after its last column


def describe_separator(separator: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a note for the user."""
    full = _ids(tokenizer, "a", special=True)
    tail = tokenizer.convert_ids_to_tokens(full[len(full) - special_tail(tokenizer) :])
    shown = separator + "".join(tail)
    if shown:
        return f"source and target are separated by {shown!r} (data.separator)"
    return "nothing is put between source and target (data.separator)"


def special_tail(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the number of special tokens that the tokenizer puts after a text."""
    bare, full = _ids(tokenizer, "a"), _ids(tokenizer, "a", special=True)
    starts = range(len(full) - len(bare) + 1)
    start = next((start for start in starts if full[start : start + len(bare)] == bare), 0)
    return len(full) - start - len(bare)


def separator_ids(tokenizer: PreTrainedTokenizerBase, separator: str) -> list[int]:
    """Return the ids of the separator after a text.

    Raises:
        DataError: The tokenizer drops it.
    """
    if not separator:
        return []
    before, both = _ids(tokenizer, "a"), _ids(tokenizer, f"a{separator}")
    ids = both[len(before) :] if both[: len(before)] == before else _ids(tokenizer, separator)
    if not ids:
        raise DataError(
            f"The tokenizer drops the separator {separator!r} between source and target. Set data.separator to a text "
            "that it keeps, such as ' ->', or to '' for none."
        )
    return ids


def show_row(tokenized: TokenizedSet, row: int, tokenizer: PreTrainedTokenizerBase, *, causal: bool) -> str:
    """Format one row of a set as lines, by :func:`row_parts`; any process."""
    parts = row_parts(tokenized, row, tokenizer, causal=causal, most=MOST_CHARACTERS)
    lines = [f"  {name:6} | {text!r}" for name, text in parts]
    read = "masked: read, not learned" if causal else "source: read by the encoder"
    return "\n".join([f"{ONE_ROW} ({read}; target: learned):", *lines])


def row_parts(
    tokenized: TokenizedSet, row: int, tokenizer: PreTrainedTokenizerBase, *, causal: bool, most: int
) -> list[tuple[str, str]]:
    """Return the parts of one row of a set, decoded from its ids with special tokens; any process.

    Args:
        tokenized: The set.
        row: The row's index in it.
        tokenizer: The tokenizer that made the ids.
        causal: Whether source and target are one sequence.
        most: Maximum characters; longer rows are cut in the middle of their longest parts.

    Returns:
        The kind of each part (``source``, ``masked``, ``prompt`` or ``target``) and its text, in order.
    """
    decode: Any = tokenizer.decode
    parts = [
        (name, decode(ids, clean_up_tokenization_spaces=False)) for name, ids in _parts(tokenized, row, causal=causal)
    ]
    room = most // max(1, len(parts))
    spare = sum(max(0, room - len(text)) for _, text in parts)
    room += spare // max(1, sum(len(text) > room for _, text in parts))
    return [(name, _cut(text, room)) for name, text in parts]


def _parts(tokenized: TokenizedSet, row: int, *, causal: bool) -> Iterator[tuple[str, list[int]]]:
    """Yield the parts of a row in order, each with its kind."""
    source, target = tokenized.source_ids[row].tolist(), tokenized.target_ids[row].tolist()
    if not causal:
        yield from (("source", source), ("target", target))
        return
    ids = source + target
    spans = [len(source), len(ids)] if tokenized.spans is None else tokenized.spans[row].tolist()
    borders = [0, *spans, len(ids)]
    for place, (start, end) in enumerate(pairwise(borders)):
        if start < end:
            # The last masked part before the last target ends the prompt of generation.
            yield ("target" if place % 2 else "prompt" if end == len(source) else "masked"), ids[start:end]


def _cut(text: str, room: int) -> str:
    if len(text) <= room:
        return text
    kept = max(8, room // 2)
    return f"{text[:kept]} ... {len(text) - 2 * kept:,} characters ... {text[-kept:]}"
