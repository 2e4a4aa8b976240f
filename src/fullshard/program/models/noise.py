"""NEFTune (arXiv:2310.05914): uniform noise on embeddings while a model trains."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fullshard.program.models.adapters import base_of


def add_embedding_noise(model: Any, alpha: float) -> None:
    """Make a model in training mode add noise of up to alpha / sqrt(length x width) to its embeddings; any rank.

    Called before sharding, after an adapter was added. As in Hugging Face's Trainer, padding counts in the length and
    gets noise too. Encoder-decoders get it on both sides. There the Trainer's is on the table that both share, which
    is no longer called itself since transformers 5, so that it does nothing for T5 and BART.
    """
    base = base_of(model)
    stacks = [base, base.get_encoder(), base.get_decoder()] if base.config.is_encoder_decoder else [base]
    for module in {id(found): found for found in (stack.get_input_embeddings() for stack in stacks)}.values():
        module.register_forward_hook(partial(_noised, alpha))


def _noised(alpha: float, module: nn.Module, _: object, embeddings_BSD: Tensor) -> Tensor:
    if not module.training:
        return embeddings_BSD
    most = alpha / math.sqrt(embeddings_BSD.shape[1] * embeddings_BSD.shape[2])
    return embeddings_BSD + torch.zeros_like(embeddings_BSD).uniform_(-most, most)
