"""Several rows in one sequence: masks and positions that keep each row to itself, so that results stay exact."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fullshard.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PACKABLE_CAUSAL = ("gpt2", "gpt_neox", "llama", "mistral", "qwen2", "qwen3")
"""Decoder-only types that take positions and a mask for each pair of positions."""

PACKABLE_SEQ2SEQ = ("mt5", "t5")
"""Encoder-decoder types that know positions by their distance only."""

_ATTENTION = ("eager", "sdpa")


@dataclass(frozen=True)
class PackedRows:
    """Rows laid end to end. Sizes: B sequences, S source (causal: joined) tokens, T label tokens.

    Attributes:
        input_ids_BS: int64.
        labels_BT: int64, -100 where there is no target; causal: T = S.
        segments_BS: int64, the number of the row, from 1, that a token is of; 0 on padding.
        target_segments_BT: The same for labels.
        positions_BS: int64, from 0 in each row.
    """

    input_ids_BS: Tensor
    labels_BT: Tensor
    segments_BS: Tensor
    target_segments_BT: Tensor
    positions_BS: Tensor


def enable_packing(model: PreTrainedModel) -> None:
    """Let a model take what :func:`packed_inputs` makes, in place; every rank calls it, before sharding.

    Nothing changes for batches of other kinds.

    Args:
        model: On any device.

    Raises:
        ModelError: Its type, its attention or a sliding window does not go with packing.
    """
    config = model.config
    known = (*PACKABLE_CAUSAL, *PACKABLE_SEQ2SEQ)
    if config.model_type not in known:
        raise ModelError(
            f"training.packing is for models of type {', '.join(sorted(known))}; this one is {config.model_type}. "
            "Set packing: false."
        )
    if config._attn_implementation not in _ATTENTION:
        raise ModelError(
            f"training.packing needs attn_implementation {' or '.join(_ATTENTION)}; got {config._attn_implementation}."
        )
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        raise ModelError(
            f"training.packing does not go with attention in a sliding window of {config.sliding_window} tokens, as "
            "this model's config has it. Set packing: false."
        )
    if config.is_encoder_decoder:
        model.get_encoder().register_forward_pre_hook(_take_encoder_mask, with_kwargs=True)
        model.get_decoder().register_forward_pre_hook(_take_cross_mask, with_kwargs=True)


def packed_inputs(model: PreTrainedModel, rows: PackedRows) -> dict[str, Any]:
    """What the model is called with for rows laid end to end; any rank, on the rows' device.

    Encoder-decoder: ``attention_mask`` holds the encoder's mask (S, S) and below it that of cross-attention (T, S), of
    which each stack takes its own.

    Args:
        model: Told by :func:`enable_packing`.
        rows: The rows.

    Returns:
        Keywords of the model's forward.
    """
    segments, targets, dtype = rows.segments_BS, rows.target_segments_BT, model.dtype
    inputs: dict[str, Any] = {"input_ids": rows.input_ids_BS, "use_cache": False}
    if not model.config.is_encoder_decoder:
        mask = _causal(_same(segments, segments))
        return {**inputs, "attention_mask": _additive(mask, dtype), "position_ids": rows.positions_BS}
    both = torch.cat([_same(segments, segments), _same(targets, segments)], dim=1)
    shifted = model.prepare_decoder_input_ids_from_labels(labels=rows.labels_BT)  # type: ignore[operator]
    begins = torch.ones_like(targets, dtype=torch.bool)
    begins[:, 1:] = targets[:, 1:] != targets[:, :-1]
    return {
        **inputs,
        "attention_mask": _additive(both, dtype),
        "decoder_input_ids": shifted.masked_fill(begins, model.config.decoder_start_token_id),
        "decoder_attention_mask": _additive(_causal(_same(targets, targets)), dtype),
    }


def _same(queries: Tensor, keys: Tensor) -> Tensor:
    """(B, queries, keys): whether both are of one row. Padding without a partner sees all: no empty softmax."""
    same = queries[:, :, None] == keys[:, None, :]
    return same | ~same.any(-1, keepdim=True)


def _causal(allowed: Tensor) -> Tensor:
    return allowed & torch.ones_like(allowed[0]).tril()


def _additive(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """(B, 1, queries, keys): what is added to attention scores. Infinity is infinity in whatever it is cast to."""
    mask = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
    return mask.masked_fill_(~allowed, float("-inf"))[:, None]


def _take_encoder_mask(
    _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Of the encoder's and the cross-attention's masks in one, the upper one; each has as many columns as it rows."""
    mask = kwargs.get("attention_mask")
    if mask is None or mask.dim() != 4:
        return None
    return args, {**kwargs, "attention_mask": mask[:, :, : mask.shape[3]]}


def _take_cross_mask(
    _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The lower one."""
    mask = kwargs.get("encoder_attention_mask")
    if mask is None or mask.dim() != 4:
        return None
    return args, {**kwargs, "encoder_attention_mask": mask[:, :, mask.shape[3] :]}
