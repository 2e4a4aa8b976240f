"""Prediction of texts for new rows by a trained model: how it reads them, and its texts in chunks of rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fullshard.core.comm import Comm, together
from fullshard.core.engine import unsharded
from fullshard.errors import ConfigError
from fullshard.program.config import RunConfig, recorded_turns
from fullshard.program.data import EpochPlan, Example, InputRow, Turn, asked_note, tokenize
from fullshard.program.models import is_causal
from fullshard.program.train.evaluation.evaluate import write_texts
from fullshard.program.train.evaluation.generation import GenerationSpec, fits_at_once, require_right_text
from fullshard.program.train.setup.prepare import collate_spec, tokenize_spec

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

CHUNK_BATCHES = 16
"""Batches of each rank in one chunk; within a chunk, rows of similar length are batched together."""


@dataclass(frozen=True)
class RowPrediction:
    """The prediction for one row."""

    source: str  # source text of the row, without the prefix
    text: str | None  # text that the model generated; None: the row cannot be used
    problem: str | None = None  # why it cannot be used
    cut: bool = False  # whether the source was truncated to the maximum number of tokens

    def as_dict(self) -> dict[str, Any]:
        """Return the line that ``fullshard predict`` writes."""
        values: dict[str, Any] = {"input": self.source, "prediction": self.text}
        if self.problem is not None:
            values["problem"] = self.problem
        return {**values, "truncated": True} if self.cut else values


def predict(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, rows: Sequence[InputRow], config: RunConfig, comm: Comm
) -> Iterator[list[RowPrediction]]:
    """Predict a text for each row; every rank iterates to the end, with the same rows.

    Where all units take at most half of the free memory, they are gathered once, else for every token.

    Args:
        model: The sharded model, in evaluation mode.
        tokenizer: The model's tokenizer.
        rows: The rows.
        config: Lengths, prefix, separator, batch size, beams.
        comm: The ranks the model is sharded over.

    Yields:
        One prediction for each row of the next chunk, in order, on every rank; also for rows that cannot be used.

    Raises:
        DataError: A limit leaves no room for a token of text; on every rank.
    """
    batch_size, generation = config.training.per_device_eval_batch_size, GenerationSpec.of(config)
    require_right_text(model, batch_size)
    tokens = tokenize_spec(config, tokenizer, causal=is_causal(model))
    collate = collate_spec(tokenizer, causal=tokens.causal)
    size = CHUNK_BATCHES * batch_size * comm.size

    def generated(examples: list[Example]) -> Iterator[tuple[str, bool]]:
        """Return the text for each example, and whether it was truncated."""
        tokenized = together(comm, lambda: tokenize(examples, tokenizer, tokens))
        plan = EpochPlan(len(examples), comm.size, batch_size, training=False, lengths=tokenized.lengths)
        texts = write_texts(model, tokenizer, tokenized, plan, collate, generation, comm)
        return zip(texts, tokenized.cut, strict=True)

    with unsharded(model, write_back=False) if fits_at_once(model, comm) else nullcontext():
        for start in range(0, len(rows), size):
            chunk = rows[start : start + size]
            usable = [row.example for row in chunk if row.problem is None]
            found = generated(usable) if usable else iter(())
            yield [_prediction(row, found) for row in chunk]


def _prediction(row: InputRow, found: Iterator[tuple[str, bool]]) -> RowPrediction:
    """Return the prediction of a row; for a usable row, the next generated one."""
    if row.problem is not None:
        return RowPrediction(row.source, None, problem=row.problem)
    text, cut = next(found)
    return RowPrediction(row.source, text, cut=cut)


@dataclass(frozen=True)
class PlainRows:
    """How rows of plain text are read."""

    # the system's turns before the user's; None: the text is a source, as in training rows that are no conversations
    system_turns: Sequence[Turn] | None = None
    notes: tuple[str, ...] = ()  # a line for the user, or none


def plain_rows(run: Path | None, name: str | None, system: str | None, *, chats: bool) -> PlainRows:
    """Return how a model reads plain text; any process.

    Args:
        run: Directory of the run that trained it; None: there is none.
        name: The set of a mixture that the text belongs to; None: there is one set.
        system: The system's turn given by the user, empty for none; None: the one recorded with the run.
        chats: True if a chat template is applied to its sources.

    Raises:
        ConfigError: A system turn is given, but the model does not read turns; or the run's record cannot be read.
    """
    recorded = None if run is None else recorded_turns(run, name)
    if system is not None:
        if recorded is None and not chats:
            raise ConfigError(
                "--system gives a turn of a conversation, but this model reads no turns: its training rows were no "
                "conversations, and no chat template is used. Leave --system out."
            )
        turns = [{"role": "system", "content": system}] if system.strip() else []
        return PlainRows(turns, (asked_note(turns, "given by --system" if turns else "--system is empty"),))
    if recorded is None:
        return PlainRows()
    if not recorded.known:
        source = "the run's version of fullshard did not record one; give the one of its training rows with --system"
    elif recorded.system is None:
        source = "those of the training rows differ; give one with --system"
    elif recorded.system:
        source = "that of the training rows; --system gives another"
    else:
        source = "the training rows have none; --system gives one"
    return PlainRows(recorded.system or (), (asked_note(recorded.system or (), source),))
