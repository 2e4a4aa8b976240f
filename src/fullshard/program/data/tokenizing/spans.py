"""Span corruption (T5, arXiv:1910.10683, 3.1.4): spans of a text are left out of the source and are the target.

15 % of a row's tokens are left out, in spans of 3 tokens on average, whose number follows from the row's length. Each
is replaced by a sentinel, and the target is each sentinel with its span, a last sentinel, and the end token.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count, takewhile
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fullshard.errors import DataError
from fullshard.program.data.tokenizing.plain_text import FEWEST
from fullshard.program.data.tokenizing.ragged import ID_DTYPE, Ragged, offsets_of
from fullshard.program.data.tokenizing.tokenize import LengthStats, TokenizedSet

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NOISE, MEAN_SPAN = 0.15, 3.0
"""Share of tokens left out, and mean tokens of a span."""

SENTINEL = "<extra_id_{}>"
"""Name of the n-th sentinel token, from 0."""

Spans = Sequence[tuple[int, int]]
"""Start and end of each span that is left out, in order; between two is at least one token."""


def num_noise(tokens: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the tokens that are left out of rows with so many tokens, and their spans."""
    # In float32, as in T5's random_spans_noise_mask: of 190 tokens 29 are left out there, 28 in float64.
    noise = np.clip(np.round(tokens.astype(np.float32) * np.float32(NOISE)), 1, tokens - 1).astype(np.int64)
    spans = np.round(noise.astype(np.float32) / np.float32(MEAN_SPAN))
    return noise, np.clip(spans, 1, np.minimum(noise, tokens - noise)).astype(np.int64)


def side_lengths(tokens: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the tokens of source and target of rows with so many tokens, at least 2."""
    noise, spans = num_noise(tokens)
    return tokens - noise + spans + 1, noise + spans + 2


def row_tokens(limit: int) -> int:
    """Return the most tokens that a row may have, so that its source has at most ``limit``.

    Raises:
        DataError: Not even the shortest row fits.
    """
    rows = np.arange(FEWEST, 2 * limit + FEWEST)
    found = int((side_lengths(rows)[0] <= limit).sum())
    if not found:
        raise DataError(f"data.max_source_length {limit} leaves no room for a row of text: use at least 3.")
    return int(rows[found - 1])


def num_sentinels(tokens: int) -> int:
    """Return how many sentinels a row of so many tokens needs: one for each span, and one for the end."""
    return int(num_noise(np.asarray([tokens]))[1][0]) + 1


def sentinel_ids(tokenizer: PreTrainedTokenizerBase, limit: int) -> tuple[int, ...]:
    """Return the ids of the sentinels that rows need whose sources have ``limit`` tokens; any process.

    Raises:
        DataError: The tokenizer has too few.
    """
    vocabulary = tokenizer.get_vocab()
    # mT5's are pieces of its SentencePiece model, with the mark of a word's beginning.
    names = ((SENTINEL.format(number), f"▁{SENTINEL.format(number)}") for number in count())
    each = (next((vocabulary[name] for name in pair if name in vocabulary), None) for pair in names)
    found = [one for one in takewhile(lambda one: one is not None, each) if one is not None]
    needed = num_sentinels(row_tokens(limit))
    if len(found) < needed:
        remedy = "Train a model of T5's family, or a causal model."
        if len(found) > 1:
            fits = next(one for one in range(limit, 2, -1) if num_sentinels(row_tokens(one)) <= len(found))
            remedy = f"Set data.max_source_length to at most {fits}."
        raise DataError(
            f"data.text_column: rows with sources of {limit} tokens (data.max_source_length) need {needed} sentinel "
            f"tokens, {SENTINEL.format(0)} and so on, and the tokenizer has {len(found)}. {remedy}"
        )
    return tuple(found[:needed])


def draw_spans(tokens: int, seeds: Sequence[int]) -> Spans:
    """Draw the spans of a row with so many tokens, all places equally likely; the same seeds give the same spans.

    (T5's own code ends each row with a span, so that of a row with one span it would always be the last tokens.)
    """
    # RandomState's stream is the same in every version of numpy.
    random = np.random.RandomState(np.random.MT19937(np.random.SeedSequence(seeds)))
    noise, spans = (int(one[0]) for one in num_noise(np.asarray([tokens])))
    left_out, kept = _parts(noise, spans, random), _parts(tokens - noise + 2, spans + 1, random)
    kept[[0, -1]] -= 1  # at the ends of a row nothing need stay
    starts = np.cumsum(kept[:-1]) + np.cumsum(left_out) - left_out
    return list(zip(starts.tolist(), (starts + left_out).tolist(), strict=True))


def _parts(total: int, parts: int, random: np.random.RandomState) -> NDArray[np.int64]:
    """Divide ``total`` into so many positive numbers; each division is equally likely."""
    cuts = np.sort(random.permutation(total - 1)[: parts - 1]) + 1
    return np.diff(cuts, prepend=0, append=total)


def corrupt(
    ids: NDArray[np.integer], spans: Spans, sentinels: Sequence[int], end: int
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return source and target of a row: its ids with each span replaced by a sentinel, and the spans after theirs."""
    source: list[int] = []
    target: list[int] = []
    place = 0
    for sentinel, (start, stop) in zip(sentinels, spans, strict=False):
        source += [*ids[place:start].tolist(), sentinel]
        target += [sentinel, *ids[start:stop].tolist()]
        place = stop
    source += [*ids[place:].tolist(), end]
    target += [sentinels[len(spans)], end]
    return np.asarray(source, ID_DTYPE), np.asarray(target, ID_DTYPE)


@dataclass(frozen=True)
class Corruption:
    """How the rows of a set are corrupted: by seed, epoch and row, whatever the ranks and batches."""

    sentinels: tuple[int, ...]  # ids of the sentinel tokens, in order
    end: int  # id of the end token
    seed: int  # seed of the run
    epoch: int = 0


class CorruptedSide(Ragged):
    """The sources or the targets of rows of text, made from the rows when they are asked for."""

    def __init__(self, rows: Ragged, how: Corruption, *, is_target: bool) -> None:
        """Keep the rows; their lengths are known without corrupting them."""
        self._rows, self._how, self._is_target = rows, how, is_target
        self.offsets = offsets_of(side_lengths(rows.lengths)[is_target])

    def _row(self, row: int) -> NDArray[np.int32]:
        how, ids = self._how, self._rows[row]
        spans = draw_spans(len(ids), (how.seed, how.epoch, row))
        return corrupt(ids, spans, how.sentinels, how.end)[self._is_target]

    def for_epoch(self, epoch: int) -> Ragged:
        """See :meth:`Ragged.for_epoch`."""
        return CorruptedSide(self._rows, replace(self._how, epoch=epoch), is_target=self._is_target)

    def checksum(self) -> int:
        """Return a CRC-32 of the rows and of how they are corrupted."""
        return zlib.crc32(repr(self._how).encode(), self._rows.checksum())


def corrupted(rows: TokenizedSet, how: Corruption) -> TokenizedSet:
    """Return a set of rows of text, which are its targets, with sources and targets of each epoch's corruption."""
    source, target = (CorruptedSide(rows.target_ids, how, is_target=is_target) for is_target in (False, True))
    stats = [_stats(one.lengths) for one in (source, target)]
    return replace(rows, source_ids=source, target_ids=target, source_stats=stats[0], target_stats=stats[1])


def _stats(lengths: NDArray[np.int64]) -> LengthStats:
    longest = int(lengths.max())
    return LengthStats(float(lengths.mean()), longest, 0, longest)
