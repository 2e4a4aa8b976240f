"""Packing: several rows in one sequence, kept apart by masks and positions, so that results are exact."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fullshard.core.transformers_private import attention_of
from fullshard.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

PACKABLE_CAUSAL = (
    *("cohere", "gemma", "gemma2", "gemma3_text", "gpt2", "gpt_neox", "granite", "granitemoe", "llama", "mistral"),
    *("mixtral", "olmo", "olmo2", "olmo3", "olmoe", "opt", "phi", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"),
    *("smollm3", "stablelm", "starcoder2"),
)
"""Decoder-only types that accept positions and a mask for each pair of positions."""

PACKABLE_SEQ2SEQ = ("mt5", "t5")
"""Encoder-decoder types with relative positions only."""

_ATTENTION = ("eager", "sdpa")


@dataclass(frozen=True)
class PackedRows:
    """Packed rows. Sizes: B sequences, S source tokens (causal: source and target), T label tokens."""

    input_ids_BS: Tensor  # int64
    labels_BT: Tensor  # int64, -100 where there is no target; causal: T = S
    segments_BS: Tensor  # int64, number of each token's row within its sequence, from 1; 0 on padding
    target_segments_BT: Tensor  # the same for labels
    positions_BS: Tensor  # int64, from 0 in each row


def enable_packing(model: PreTrainedModel, longest: int) -> None:
    """Make a model accept the result of :func:`packed_inputs`, in place; every rank calls it, before sharding.

    Batches without packing are unaffected. The model may be on any device.

    Args:
        model: Any model.
        longest: Most tokens of a row, source and target together. A sliding window at least as long hides nothing.

    Raises:
        ModelError: The model's type, attention implementation or sliding window is incompatible with packing.
    """
    config = model.config
    known = (*PACKABLE_CAUSAL, *PACKABLE_SEQ2SEQ)
    if config.model_type not in known:
        raise ModelError(
            f"training.packing is for models of type {', '.join(sorted(known))}; this one is {config.model_type}. "
            "Set packing: false."
        )
    if attention_of(config) not in _ATTENTION:
        raise ModelError(
            f"training.packing needs attn_implementation {' or '.join(_ATTENTION)}; got {attention_of(config)}."
        )
    window = _sliding_window(config)
    if window is not None and longest > window:
        raise ModelError(
            "training.packing does not keep attention in a sliding window, and this model's config has one of "
            f"{window} tokens: rows may have {longest} (data.max_source_length and data.max_target_length). Lower "
            "these, or set packing: false."
        )
    if config.is_encoder_decoder:
        model.get_encoder().register_forward_pre_hook(partial(_take_mask, "attention_mask"), with_kwargs=True)
        model.get_decoder().register_forward_pre_hook(partial(_take_mask, "encoder_attention_mask"), with_kwargs=True)


def _sliding_window(config: PreTrainedConfig) -> int | None:
    """Return the length of the sliding window of the layers that have one; None if no layer has."""
    window = getattr(config, "sliding_window", None)
    layers = getattr(config, "layer_types", None)
    sliding = getattr(config, "use_sliding_window", True) if layers is None else "sliding_attention" in layers
    return window if window and sliding else None


def packed_inputs(model: PreTrainedModel, rows: PackedRows) -> dict[str, Any]:
    """Return the keyword arguments of the model's forward for packed rows; any rank, on the rows' device.

    For an encoder-decoder, ``attention_mask`` is the encoder's mask (S, S) with that of cross-attention (T, S) below
    it; each stack takes its own part.

    Args:
        model: Changed by :func:`enable_packing`.
        rows: The rows.
    """
    segments, targets, dtype = rows.segments_BS, rows.target_segments_BT, model.dtype
    inputs: dict[str, Any] = {"input_ids": rows.input_ids_BS, "use_cache": False}
    if not model.config.is_encoder_decoder:
        mask = _causal(_same(segments, segments))
        return {**inputs, "attention_mask": _additive(mask, dtype), "position_ids": rows.positions_BS}
    both = torch.cat([_same(segments, segments), _same(targets, segments)], dim=1)
    shifted = decoder_inputs(model, rows.labels_BT)
    begins = torch.ones_like(targets, dtype=torch.bool)
    begins[:, 1:] = targets[:, 1:] != targets[:, :-1]
    return {
        **inputs,
        "attention_mask": _additive(both, dtype),
        "decoder_input_ids": shifted.masked_fill(begins, model.config.decoder_start_token_id),
        "decoder_attention_mask": _additive(_causal(_same(targets, targets)), dtype),
    }


def _same(queries: Tensor, keys: Tensor) -> Tensor:
    """Return (B, queries, keys), True within one row. Padding attends to everything, so that no softmax is empty."""
    same = queries[:, :, None] == keys[:, None, :]
    return same | ~same.any(-1, keepdim=True)


def _causal(allowed: Tensor) -> Tensor:
    return allowed & torch.ones_like(allowed[0]).tril()


def _additive(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """Return (B, 1, queries, keys), added to attention scores. Infinity stays infinity in every dtype."""
    mask = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
    return mask.masked_fill_(~allowed, float("-inf"))[:, None]


def _take_mask(
    name: str, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Take a stack's part of the joint mask: the encoder its own, the square upper one, cross-attention the lower."""
    mask = kwargs.get(name)
    if mask is None or mask.dim() != 4:
        return None
    length = mask.shape[3]
    return args, {**kwargs, name: mask[:, :, length:] if name.startswith("encoder") else mask[:, :, :length]}


def decoder_inputs(model: PreTrainedModel, labels_BT: Tensor) -> Tensor:
    """Return the inputs that transformers makes of labels, int64 of their shape; any rank.

    Some models, such as M2M100 (NLLB) and Blenderbot, have no method for it and shift labels inside their forward,
    which would compute a loss of its own as well.

    Args:
        model: An encoder-decoder, sharded or not, with an adapter or without.
        labels_BT: int64, -100 where there is no target.

    Raises:
        ModelError: The model's configuration names no token that the decoder starts with, or no padding.
    """
    own: Any = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    if own is not None:
        return own(labels=labels_BT.clone())  # FSMT replaces -100 in the labels that it is given
    config: Any = model.config
    start, padding = config.decoder_start_token_id, config.pad_token_id
    if start is None or padding is None:
        raise ModelError(
            f"The decoder of a {config.model_type} model starts with decoder_start_token_id and is padded with "
            f"pad_token_id; its config has {start} and {padding}. Set both in config.json."
        )
    shifted = labels_BT.new_full(labels_BT.shape, start)
    shifted[:, 1:] = labels_BT[:, :-1]
    return shifted.masked_fill(shifted == -100, padding)
