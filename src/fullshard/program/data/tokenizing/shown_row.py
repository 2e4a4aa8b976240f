"""Display of one row as the model sees it: which text is read and which is learned."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from fullshard.program.data.tokenizing.tokenize import TokenizedSet

ONE_ROW = "one training row as the model sees it"
"""Beginning of the note that shows one row."""

MOST_CHARACTERS = 400
"""Maximum characters of a row to show; longer rows are cut in the middle of their longest parts."""


def show_row(tokenized: TokenizedSet, row: int, tokenizer: PreTrainedTokenizerBase, *, causal: bool) -> str:
    """Format one row of a set as lines, by :func:`row_parts`; any process."""
    parts = row_parts(tokenized, row, tokenizer, causal=causal, most=MOST_CHARACTERS)
    lines = [f"  {name:6} | {text!r}" for name, text in parts]
    heading = f"{ONE_ROW} (masked: read, not learned; target: learned):"
    if not causal:
        heading = f"{ONE_ROW} (source: read by the encoder; target: learned):"
    return "\n".join([heading, *lines])


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
    """Return a text of at most ``room`` characters, with its middle left out if it is longer."""
    if len(text) <= room:
        return text
    kept = max(8, room // 2)
    return f"{text[:kept]} ... {len(text) - 2 * kept:,} characters ... {text[-kept:]}"
