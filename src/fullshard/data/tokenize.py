"""Examples to token ids, with what truncation cut off counted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fullshard.data.sources import Example
from fullshard.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class TokenizeSpec:
    """How text becomes ids.

    Attributes:
        max_source_length: Most tokens of a source, prefix and special tokens included; the rest is cut off.
        max_target_length: Most tokens of a target, special tokens included; the rest is cut off.
        source_prefix: Text put before every source.
        causal: Whether source and target are one sequence (decoder-only) rather than two (encoder-decoder).
    """

    max_source_length: int
    max_target_length: int
    source_prefix: str = ""
    causal: bool = False


@dataclass(frozen=True)
class LengthStats:
    """Lengths of one side of a tokenized set, in tokens.

    Attributes:
        mean: Mean length after truncation.
        longest: Longest length before truncation.
        truncated: Number of rows that were cut.
        limit: The length they were cut to.
    """

    mean: float
    longest: int
    truncated: int
    limit: int


@dataclass(frozen=True)
class TokenizedSet:
    """Token ids of every row, in the order of the examples.

    Attributes:
        source_ids: Ids of each source; for a causal model the prompt.
        target_ids: Ids of each target, end-of-sequence included.
        source_stats: Lengths of the sources.
        target_stats: Lengths of the targets.
    """

    source_ids: list[list[int]]
    target_ids: list[list[int]]
    source_stats: LengthStats
    target_stats: LengthStats

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.source_ids)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each row, source and target together."""
        return tuple(len(source) + len(target) for source, target in zip(self.source_ids, self.target_ids, strict=True))


def tokenize(examples: Sequence[Example], tokenizer: PreTrainedTokenizerBase, spec: TokenizeSpec) -> TokenizedSet:
    """Turn examples into ids. Deterministic, so every rank may call it and get the same.

    Encoder-decoder: sources and targets get the special tokens their tokenizer gives them (T5: an end-of-sequence token
    after each). Causal: the prompt gets the special tokens the tokenizer gives a text, the target none but a final
    end-of-sequence token; the two are joined when a batch is made.

    Args:
        examples: At least one row.
        tokenizer: Any Hugging Face tokenizer.
        spec: Prefix, limits and whether the model is causal.

    Returns:
        Ids and length statistics.

    Raises:
        DataError: There are no examples, or a limit leaves no room for a token of text.
    """
    if not examples:
        raise DataError("There are no rows to tokenize: at least one is needed.")
    sources, source_stats = _encode(
        [spec.source_prefix + example.source for example in examples], tokenizer, spec.max_source_length, "source"
    )
    targets = [example.target for example in examples]
    if spec.causal:
        target_ids, target_stats = _encode_completions(targets, tokenizer, spec.max_target_length)
    else:
        target_ids, target_stats = _encode(targets, tokenizer, spec.max_target_length, "target")
    return TokenizedSet(sources, target_ids, source_stats, target_stats)


def _encode(
    texts: list[str], tokenizer: PreTrainedTokenizerBase, limit: int, side: str
) -> tuple[list[list[int]], LengthStats]:
    """Ids with special tokens, cut to ``limit``; only texts that are too long are encoded twice."""
    _require_room(limit, tokenizer.num_special_tokens_to_add(), side)
    # verbose=False: the tokenizer would warn of the model's own limit, ours is counted and reported.
    keyword = "text_target" if side == "target" else "text"
    ids = _call(tokenizer, keyword, texts, verbose=False)
    lengths = [len(row) for row in ids]
    long_rows = [row for row, length in enumerate(lengths) if length > limit]
    if long_rows:
        cut = _call(tokenizer, keyword, [texts[row] for row in long_rows], truncation=True, max_length=limit)
        for row, row_ids in zip(long_rows, cut, strict=True):
            ids[row] = row_ids
    return ids, _stats(ids, lengths, limit)


def _encode_completions(
    texts: list[str], tokenizer: PreTrainedTokenizerBase, limit: int
) -> tuple[list[list[int]], LengthStats]:
    """Ids without special tokens but a final end-of-sequence token, cut to ``limit`` with that token kept."""
    _require_room(limit, 1, "target")
    bare = _call(tokenizer, "text", texts, add_special_tokens=False, verbose=False)
    ids = [[*row[: limit - 1], tokenizer.eos_token_id] for row in bare]
    return ids, _stats(ids, [len(row) + 1 for row in bare], limit)


def _call(tokenizer: PreTrainedTokenizerBase, keyword: str, texts: list[str], **options: Any) -> list[list[int]]:
    """Ids of texts given to the tokenizer under a keyword."""
    encode: Any = tokenizer
    return encode(**{keyword: texts}, **options)["input_ids"]


def _require_room(limit: int, num_special: int, side: str) -> None:
    """Raise when a limit would leave special tokens only."""
    if limit <= num_special:
        raise DataError(
            f"A max_{side}_length of {limit} leaves no room for text: the tokenizer adds {num_special} special tokens. "
            f"Use at least {num_special + 1}."
        )


def _stats(ids: list[list[int]], full_lengths: list[int], limit: int) -> LengthStats:
    """Statistics of rows whose lengths before truncation are given."""
    return LengthStats(
        mean=sum(len(row) for row in ids) / len(ids),
        longest=max(full_lengths),
        truncated=sum(length > limit for length in full_lengths),
        limit=limit,
    )
