"""Rows of a given length in place of a run's data, for plans that read no data."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from fullshard.errors import ConfigError
from fullshard.program.config import RunConfig
from fullshard.program.data import LengthStats, Ragged, TokenizedSet
from fullshard.program.models import load_tokenizer, resolve_model
from fullshard.program.models.hub import reads_one_sequence
from fullshard.program.train.setup.prepare import Prepared

_STEPS = 4
"""Steps of rows on all ranks: a budget of tokens rounds lengths, so that the last step may be short."""


@dataclass(frozen=True)
class RowsOfLength(Prepared):
    """A run's data as if every row had one length; the number of rows is unknown."""


def prepare_length(config: RunConfig, source: int | None, target: int, world_size: int) -> RowsOfLength:
    """Return rows of one length, enough for some steps. Reads the model's config and tokenizer, no data; one process.

    Args:
        config: The run's settings; its data may be missing.
        source: Tokens of each source. None for causal models only: then each row is a text of ``target`` tokens.
        target: Tokens of each target.
        world_size: Largest number of ranks that will be planned with it.

    Raises:
        ConfigError: The model is an encoder-decoder and only one length is given.
        ModelError: The tokenizer or the model's configuration cannot be read.
    """
    directory = None if config.model.path is None else resolve_model(config.model.path)
    tokenizer = _blank_tokenizer(config) if directory is None else load_tokenizer(directory)
    described = directory if config.model.config is None else config.model.config
    causal = reads_one_sequence(described, config.model.model_class)  # type: ignore[arg-type]
    if source is None:
        if not causal or target < 2:
            kind = "a text of one token has no target" if causal else "this model is an encoder-decoder"
            raise ConfigError(f"A length is SOURCE/TARGET, such as 512/128, in tokens: {kind}. Give both.")
        source, target = 1, target - 1
    token = 0 if tokenizer.pad_token_id else 1
    rows = _set_of(config, (source, target), token, world_size)
    evaluates = config.training.eval_strategy != "no" and config.data.holds_out
    return RowsOfLength(
        tokenizer=tokenizer,
        model_directory=directory,
        causal=causal,
        separator=None,
        train_set=rows,
        held_out=[],
        held_out_set=rows if evaluates else None,
        labels=None,
        sets=(),
        notes=(),
    )


def _set_of(config: RunConfig, lengths: tuple[int, int], token: int, world_size: int) -> TokenizedSet:
    """Return rows of these lengths for some steps; each side is a single id in memory."""
    training = config.training
    each = training.per_device_train_batch_size
    if training.per_device_train_batch_tokens is not None:
        each = max(training.per_device_train_batch_tokens // sum(lengths), 1)
    count = max(_STEPS * world_size * training.gradient_accumulation_steps * each, training.per_device_eval_batch_size)
    sources, targets = (
        Ragged(np.broadcast_to(np.int32(token), count * length), np.arange(count + 1) * length) for length in lengths
    )
    source, target = (LengthStats(length, length, 0, length) for length in lengths)
    return TokenizedSet(sources, targets, source, target)


def _blank_tokenizer(config: RunConfig) -> PreTrainedTokenizerBase:
    """Return a tokenizer with the maximum number of pieces of the one that the run trains on its data."""
    settings = config.model.tokenizer
    assert settings is not None, "the schema requires model.tokenizer with model.config"
    special = {"<pad>": 0, "</s>": 1, "<unk>": 2}
    pieces = special | {f"piece{number}": number for number in range(len(special), settings.vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(pieces, unk_token="<unk>"))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")
