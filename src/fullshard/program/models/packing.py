"""Packing: several rows in one sequence, kept apart by masks and positions, so that results are exact."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

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
    segments_BS: Tensor  # int64, number of each token's row, from 1; 0 on padding
    target_segments_BT: Tensor  # the same for labels
    positions_BS: Tensor  # int64, from 0 in each row
    starts: Tensor  # int32, where each row of ``input_ids_BS`` starts among all B x S tokens, and their number
    longest: int  # most tokens of these rows


def enable_packing(model: PreTrainedModel, longest: int, *, windows: bool = False) -> None:
    """Make a model accept the result of :func:`packed_inputs`, in place; every rank calls it, before sharding.

    Batches without packing are unaffected. The model may be on any device.

    Args:
        model: Any model.
        longest: Most tokens of a row, source and target together. A sliding window at least as long hides nothing.
        windows: True if the attention that is used keeps sliding windows within packed rows.

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
    window = None if windows else sliding_window(config)
    if window is not None and longest > window:
        raise ModelError(
            "training.packing does not keep attention in a sliding window, and this model's config has one of "
            f"{window} tokens: rows may have {longest} (data.max_source_length and data.max_target_length). Lower "
            "these, use the way varlen (speed.ways), or set packing: false."
        )
    if config.is_encoder_decoder:
        for stack, name in ((model.get_encoder(), "attention_mask"), (model.get_decoder(), "encoder_attention_mask")):
            take = partial(_take_mask, name, int(name.startswith("encoder")))
            stack.register_forward_pre_hook(take, with_kwargs=True)


def sliding_window(config: PreTrainedConfig) -> int | None:
    """Return the length of the sliding window of the layers that have one; None if no layer has; any process."""
    window = getattr(config, "sliding_window", None)
    layers = getattr(config, "layer_types", None)
    sliding = getattr(config, "use_sliding_window", True) if layers is None else "sliding_attention" in layers
    return window if window and sliding else None


class MaskMaker(Protocol):
    """Makes the mask of packed rows that a model's attention takes."""

    def __call__(
        self, queries_BT: Tensor, keys_BS: Tensor, *, causal: bool, rows: PackedRows, dtype: torch.dtype
    ) -> Any:
        """Return which of the queries' tokens attend to which of the keys'; both are given as their rows' numbers."""
        ...


def mask_packed_rows(model: nn.Module, make: MaskMaker) -> None:
    """Let :func:`packed_inputs` make masks by ``make`` in place of :func:`additive_mask`; any rank, before training."""
    model.packed_mask = make  # type: ignore[assignment]


def packed_inputs(model: PreTrainedModel, rows: PackedRows) -> dict[str, Any]:
    """Return the keyword arguments of the model's forward for packed rows; any rank, on the rows' device.

    For an encoder-decoder, ``attention_mask`` is the pair of the encoder's mask and that of cross-attention; each stack
    takes its own.

    Args:
        model: Changed by :func:`enable_packing`.
        rows: The rows.
    """
    segments, targets = rows.segments_BS, rows.target_segments_BT
    make = partial(getattr(model, "packed_mask", additive_mask), rows=rows, dtype=model.dtype)
    inputs: dict[str, Any] = {"input_ids": rows.input_ids_BS, "use_cache": False}
    if not model.config.is_encoder_decoder:
        return {**inputs, "attention_mask": make(segments, segments, causal=True), "position_ids": rows.positions_BS}
    shifted = decoder_inputs(model, rows.labels_BT)
    begins = torch.ones_like(targets, dtype=torch.bool)
    begins[:, 1:] = targets[:, 1:] != targets[:, :-1]
    return {
        **inputs,
        "attention_mask": (make(segments, segments, causal=False), make(targets, segments, causal=False)),
        "decoder_input_ids": shifted.masked_fill(begins, model.config.decoder_start_token_id),
        "decoder_attention_mask": make(targets, targets, causal=True),
    }


def additive_mask(queries_BT: Tensor, keys_BS: Tensor, *, causal: bool, rows: PackedRows, dtype: torch.dtype) -> Tensor:
    """Return (B, 1, T, S), added to attention scores: 0 within one row, and infinity, in every dtype, elsewhere.

    Padding attends to everything, so that no softmax is empty.
    """
    same = queries_BT[:, :, None] == keys_BS[:, None, :]
    allowed = same | ~same.any(-1, keepdim=True)
    if causal:
        allowed &= torch.ones_like(allowed[0]).tril()
    mask = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
    return mask.masked_fill_(~allowed, float("-inf"))[:, None]


def _take_mask(
    name: str, index: int, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Take a stack's part of the pair of masks: the encoder its own, the decoder that of cross-attention."""
    mask = kwargs.get(name)
    return (args, {**kwargs, name: mask[index]}) if isinstance(mask, tuple) else None


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
