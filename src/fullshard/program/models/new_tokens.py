"""Tokens that a run adds to a vocabulary: in the tokenizer, and their rows in the tables of embeddings and logits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tokenizers import AddedToken
from torch import Tensor, nn

from fullshard.core.engine import WantedTensor, WeightReader, wanted_tensors
from fullshard.core.policy import Quantize
from fullshard.errors import ModelError
from fullshard.program.models.adapters import trains_rows
from fullshard.program.models.build import add_rows, load_tokenizer
from fullshard.state.saving.weights import Pretrained

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def add_tokens(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[str]) -> PreTrainedTokenizerBase:
    """Add tokens to a tokenizer, in place, and return it; any rank, alone.

    Raises:
        ModelError: It has one of them already.
    """
    vocabulary = tokenizer.get_vocab()
    known = [one for one in tokens if one in vocabulary]
    if known:
        raise ModelError(
            f"model.new_tokens: the tokenizer has {', '.join(map(repr, known))} already. Remove what is no new token."
        )
    found: list[Any] = [_as_written(tokenizer, one) for one in tokens]
    tokenizer.add_tokens(found)
    return tokenizer


def _as_written(tokenizer: PreTrainedTokenizerBase, token: str) -> str | AddedToken:
    """Return a token that is found before the tokenizer replaces its characters, as NFKC makes a 2 of a ² and of it."""
    normalizer = getattr(getattr(tokenizer, "backend_tokenizer", None), "normalizer", None)
    if normalizer is None or normalizer.normalize_str(token) == token:
        return token
    return AddedToken(token, normalized=False)


def tokenizer_of(base: Path, adapter: Path | None) -> PreTrainedTokenizerBase:
    """Load the tokenizer that a model was trained with: the adapter's own if that has rows of tokens, else the base's.

    Raises:
        ModelError: It cannot be loaded.
    """
    own = adapter is not None and trains_rows(adapter) and (adapter / "tokenizer_config.json").is_file()
    return load_tokenizer(adapter if own and adapter is not None else base)


class GrownWeights:
    """Weight source of a model whose tables were read and grown in memory; every rank makes its own.

    All other tensors are read from the files, by shards.
    """

    def __init__(
        self, skeleton: PreTrainedModel, base: Pretrained, tokenizer: PreTrainedTokenizerBase, seed: int
    ) -> None:
        """Read the tensors with a place for each token into a skeleton, in place, and add rows for new tokens.

        Args:
            skeleton: Without an adapter, on the meta device.
            base: The files' weights.
            tokenizer: Its ids have rows afterwards.
            seed: Seed of the values of new rows.

        Raises:
            CheckpointError: The files do not fit the skeleton, or cannot be read.
        """
        words, wanted = skeleton.config.get_text_config().vocab_size, wanted_tensors(skeleton)
        self._base, self._reader = base, base.open(skeleton, wanted)
        held = [one for one in wanted if words in one.shape and self._reader.has(one.names[0])]
        for one in held:
            values = torch.empty(one.shape, dtype=one.dtype)
            self._reader.read(one.names[0], 0, values.view(-1))
            tensor = values if one.buffer else nn.Parameter(values)
            for path, _, key in (name.rpartition(".") for name in one.names):
                setattr(skeleton.get_submodule(path), key, tensor)
        add_rows(skeleton, tokenizer, seed)
        names = {name for one in held for name in one.names}
        state = skeleton.state_dict(keep_vars=True)
        self._values: Mapping[str, Tensor] = {name: state[name].detach() for name in names}

    @property
    def quantize(self) -> Quantize | None:
        """Quantisation of the model's linear layers."""
        return self._base.quantize

    def open(self, model: nn.Module, wanted: list[WantedTensor]) -> WeightReader:
        """See :meth:`fullshard.core.engine.WeightSource.open`; names and shapes were compared when this was made."""
        return self

    def has(self, name: str) -> bool:
        """See :meth:`fullshard.core.engine.WeightReader.has`."""
        return name in self._values or self._reader.has(name)

    def read(self, name: str, start: int, out: Tensor) -> None:
        """See :meth:`fullshard.core.engine.WeightReader.read`."""
        if name in self._values:
            out.copy_(self._values[name].reshape(-1)[start : start + out.numel()])
        else:
            self._reader.read(name, start, out)
