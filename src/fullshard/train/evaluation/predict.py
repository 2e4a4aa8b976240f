"""Texts for new rows by a trained model, some rows at a time, so that neither memory nor patience has to hold all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fullshard.comm import Comm, together
from fullshard.config import RunConfig
from fullshard.data import CollateSpec, EpochPlan, Example, TokenizeSpec, batches, tokenize
from fullshard.models import is_causal
from fullshard.train.evaluation.evaluate import gather_texts
from fullshard.train.evaluation.generation import GenerationSpec, generate, require_right_text

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

CHUNK_BATCHES = 16
"""Batches of each rank between two times that texts are handed out; among these rows those of similar length meet."""


@dataclass(frozen=True)
class PredictSpec:
    """How texts are made; the same on every rank.

    Attributes:
        batch_size: Rows of one rank's batch.
        tokens: How sources become ids.
        generation: How text is written.
    """

    batch_size: int
    tokens: TokenizeSpec
    generation: GenerationSpec


@dataclass(frozen=True)
class Written:
    """Texts of some rows.

    Attributes:
        texts: One for each row, in order.
        cut: Number of sources that were cut to the most tokens of a source.
    """

    texts: list[str]
    cut: int


def predict_spec(config: RunConfig, *, causal: bool) -> PredictSpec:
    """What a run's settings say; any rank, alone.

    Args:
        config: The run's settings.
        causal: Whether the model reads source and target as one sequence.
    """
    data = config.data
    return PredictSpec(
        batch_size=config.training.per_device_eval_batch_size,
        tokens=TokenizeSpec(
            max_source_length=data.max_source_length,
            max_target_length=data.max_target_length,
            source_prefix=data.source_prefix,
            causal=causal,
            chat_template=data.chat_template,
        ),
        generation=GenerationSpec.of(config),
    )


def predict(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, rows: Sequence[Example], config: RunConfig, comm: Comm
) -> Iterator[Written]:
    """Write a text for each row; every rank iterates to the end, with the same rows.

    Args:
        model: The sharded model, in evaluation mode.
        tokenizer: The model's.
        rows: Their references are not looked at.
        config: Lengths, prefix, batch size, beams.
        comm: The ranks the model is sharded over.

    Yields:
        What was written for the next rows, on every rank.

    Raises:
        DataError: A limit leaves no room for a token of text; on every rank.
    """
    spec = predict_spec(config, causal=is_causal(model))
    require_right_text(model, spec.batch_size)
    collate = CollateSpec(_pad_id(tokenizer), causal=spec.tokens.causal)
    size = CHUNK_BATCHES * spec.batch_size * comm.size
    for start in range(0, len(rows), size):
        chunk = rows[start : start + size]
        tokenized = together(comm, lambda chunk=chunk: tokenize(chunk, tokenizer, spec.tokens))
        lengths = tokenized.lengths
        plan = EpochPlan(len(chunk), comm.size, spec.batch_size, training=False, lengths=lengths)
        mine: list[tuple[int, str]] = []
        for batch in batches(tokenized, plan, comm.rank, collate):
            texts = generate(model, tokenizer, batch.to(comm.device), comm, spec.generation)
            written = zip(batch.indices, batch.fillers, texts, strict=True)
            mine += [(index, text) for index, filler, text in written if not filler]
        yield Written(gather_texts(mine, len(chunk), comm), tokenized.source_stats.truncated)


def _pad_id(tokenizer: PreTrainedTokenizerBase) -> int:
    pad = tokenizer.pad_token_id
    assert isinstance(pad, int), "load_tokenizer gives every tokenizer a padding token"
    return pad
