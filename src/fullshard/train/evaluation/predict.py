"""Prediction: texts for new rows by a trained model, yielded in chunks of rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fullshard.comm import Comm, together
from fullshard.config import RunConfig
from fullshard.data import EpochPlan, Example, batches, tokenize
from fullshard.models import is_causal
from fullshard.train.evaluation.evaluate import gather_texts
from fullshard.train.evaluation.generation import GenerationSpec, generate, require_right_text
from fullshard.train.setup.prepare import collate_spec, tokenize_spec

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

CHUNK_BATCHES = 16
"""Batches of each rank in one chunk; within a chunk, rows of similar length are batched together."""


@dataclass(frozen=True)
class PredictedRows:
    """The texts of one chunk of rows.

    Attributes:
        texts: One for each row, in order.
        cut: Number of sources that were truncated to the maximum number of tokens.
    """

    texts: list[str]
    cut: int


def predict(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, rows: Sequence[Example], config: RunConfig, comm: Comm
) -> Iterator[PredictedRows]:
    """Predict a text for each row; every rank iterates to the end, with the same rows.

    Args:
        model: The sharded model, in evaluation mode.
        tokenizer: The model's tokenizer.
        rows: The rows; their references are not used.
        config: Lengths, prefix, batch size, beams.
        comm: The ranks the model is sharded over.

    Yields:
        The texts of the next chunk, on every rank.

    Raises:
        DataError: A limit leaves no room for a token of text; on every rank.
    """
    batch_size, generation = config.training.per_device_eval_batch_size, GenerationSpec.of(config)
    require_right_text(model, batch_size)
    tokens = tokenize_spec(config, causal=is_causal(model))
    collate = collate_spec(tokenizer, causal=tokens.causal)
    size = CHUNK_BATCHES * batch_size * comm.size
    for start in range(0, len(rows), size):
        chunk = rows[start : start + size]
        tokenized = together(comm, lambda chunk=chunk: tokenize(chunk, tokenizer, tokens))
        lengths = tokenized.lengths
        plan = EpochPlan(len(chunk), comm.size, batch_size, training=False, lengths=lengths)
        mine: list[tuple[int, str]] = []
        for batch in batches(tokenized, plan, comm.rank, collate):
            texts = generate(model, tokenizer, batch.to(comm.device), comm, generation)
            written = zip(batch.indices, batch.fillers, texts, strict=True)
            mine += [(index, text) for index, filler, text in written if not filler]
        yield PredictedRows(gather_texts(mine, len(chunk), comm), tokenized.source_stats.truncated)
