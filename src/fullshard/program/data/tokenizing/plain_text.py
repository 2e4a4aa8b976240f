"""Plain text as rows of token ids: documents joined with the end token, and cut at the maximum length."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fullshard.errors import DataError
from fullshard.program.data.tokenizing.ragged import ID_DTYPE, OFFSET_DTYPE, Encoded, EncodedRows, Ragged, offsets_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CHUNK_DOCUMENTS = 8192
"""Documents per call of the tokenizer."""

FEWEST = 2
"""Tokens of the shortest row: of a single one nothing can be learned."""


def encode_text(
    documents: Sequence[str], tokenizer: PreTrainedTokenizerBase, length: int, progress: Callable[[int, int], None]
) -> Iterator[EncodedRows]:
    """Yield the rows of all documents, some thousand documents at a time; any process, alone.

    As by transformers' ``run_clm``, documents follow one another and rows are cut through them. Each has the
    tokenizer's own special tokens and ends with the end token. The last row is shorter; of a single token, it is left
    out. The rows are targets: their sources are empty.

    Args:
        documents: The texts, in order; blank ones are left out.
        tokenizer: The model's tokenizer.
        length: Tokens of a row, at least 2.
        progress: Called with documents done and in total.

    Raises:
        DataError: The documents have fewer than two tokens, or the rows are too short.
    """
    if length < FEWEST:
        raise DataError(f"Plain text needs rows of at least {FEWEST} tokens; got data.max_source_length {length}.")
    encode: Any = tokenizer
    end, rest, found = tokenizer.eos_token_id, np.zeros(0, ID_DTYPE), 0
    progress(0, len(documents))
    for start in range(0, len(documents), CHUNK_DOCUMENTS):
        texts = [text for text in documents[start : start + CHUNK_DOCUMENTS] if text.strip()]
        parts = [rest]
        for ids in encode(text=texts, verbose=False)["input_ids"] if texts else ():
            parts.append(np.asarray(ids if ids[-1:] == [end] else [*ids, end], ID_DTYPE))
        joined = np.concatenate(parts)
        whole = len(joined) // length * length
        rest = joined[whole:]
        if whole:
            found += whole
            yield _rows(joined[:whole], np.full(whole // length, length))
        progress(min(start + CHUNK_DOCUMENTS, len(documents)), len(documents))
    if len(rest) >= FEWEST:
        yield _rows(rest, np.asarray([len(rest)]))
    elif not found:
        raise DataError("The texts are empty: at least one must have a token.")


def _rows(ids: NDArray[np.int32], lengths: NDArray[np.int64]) -> EncodedRows:
    """Return rows that lie one after another in ``ids``, with empty sources."""
    none = np.zeros(len(lengths), OFFSET_DTYPE)
    empty = Ragged(np.zeros(0, ID_DTYPE), offsets_of(none))
    return EncodedRows(Encoded(empty, none), Encoded(Ragged(ids, offsets_of(lengths)), lengths))
