"""Packed rows of causal models by torch's attention for rows of any length: no mask is made."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.attention import varlen
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fullshard.program.models import base_of
from fullshard.program.models.packing import PackedRows, mask_packed_rows, sliding_window
from fullshard.program.speed.flex import attention_dropout

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from fullshard.program.speed.way import Facts, Part

_REGISTERED = "row_lengths"
_OPTIONS = inspect.signature(varlen.varlen_attn).parameters

_HALF = (torch.bfloat16, torch.float16)

WINDOWED = ("gemma3_text", "mistral", "mixtral", "olmo3", "phi3", "qwen2", "qwen3", "smollm3", "starcoder2")
"""Packable types whose layers tell attention their sliding window. Others only have it in their mask."""


class Varlen:
    """Compute packed rows by ``torch.nn.attention.varlen``."""

    name = "varlen"
    purpose = "packed rows of causal models by torch's varlen_attn, without masks"
    part: Part = "attention"
    exact = False

    def misfit(self, model: PreTrainedModel, facts: Facts) -> str | None:
        """See :meth:`Way.misfit`."""
        if facts.device.type != "cuda" or facts.dtype not in _HALF:
            computed = f"{str(facts.dtype).removeprefix('torch.')} on {facts.device.type}"
            return f"varlen_attn computes in bfloat16 and float16 on CUDA, and this run computes in {computed}"
        if "window_size" not in _OPTIONS:
            return f"it needs torch 2.11 or newer; this is {torch.__version__}"
        return _rows_misfit(model, facts)

    def apply(self, model: PreTrainedModel, facts: Facts) -> None:
        """See :meth:`Way.apply`."""
        AttentionInterface.register(_REGISTERED, _attend)
        AttentionMaskInterface.register(_REGISTERED, sdpa_mask)
        base_of(model).set_attn_implementation(_REGISTERED)
        mask_packed_rows(model, _lengths)


def _rows_misfit(model: PreTrainedModel, facts: Facts) -> str | None:
    """Return why a model's attention is not that of a kernel that is given packed rows by their lengths, or None."""
    base = base_of(model)
    config: Any = base.config
    if not facts.packing or config.is_encoder_decoder:
        kind = f"training.packing is {str(facts.packing).lower()}, and {config.model_type} "
        kind += "has an encoder" if config.is_encoder_decoder else "is causal"
        return f"it is for packed rows of causal models; {kind}"
    softcap, dropout = getattr(config, "attn_logit_softcapping", None), attention_dropout(base)
    if softcap:
        return f"its kernel cannot cap scores, and this model's config has attn_logit_softcapping: {softcap:g}"
    if any(hasattr(module, "sinks") for module in base.modules()):
        return "its kernel knows no attention sinks, which this model has"
    if dropout:
        return f"its kernel gets no dropout, and this model's config has {dropout:g} for attention weights; set it to 0"
    window = sliding_window(config)
    if window is not None and facts.longest > window and config.model_type not in WINDOWED:
        return (
            f"layers of {config.model_type} do not tell attention their sliding window of {window} tokens, and rows "
            f"may have {facts.longest}"
        )
    return None


def _lengths(*_: Any, rows: PackedRows, **__: Any) -> Tensor:
    """Return where rows start among all tokens, int32 (1, 1, most tokens of a row, rows + 1), in place of a mask.

    Models hand a mask of four axes on as it is. Its shape carries the longest row, which is needed without a wait.
    """
    return rows.starts[None, None, None].expand(1, 1, rows.longest, -1)


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Any]:
    """Attend as transformers' functions do; query (B, H, S, D), keys and values (B, fewer H, S, D)."""
    if attention_mask is None or attention_mask.dtype != torch.int32:
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, attention_mask, **kwargs)
    longest, starts, window = attention_mask.shape[2], attention_mask[0, 0, 0], kwargs.get("sliding_window")
    options: dict[str, Any] = {"scale": kwargs.get("scaling")}
    options["window_size"] = (-1 if window is None else window - 1, 0)  # a window counts the token itself
    if "enable_gqa" in _OPTIONS:  # without the option, the kernel shares keys and values all the same
        options["enable_gqa"] = query.shape[1] != key.shape[1]
    q, k, v = (one.transpose(1, 2).flatten(0, 1) for one in (query, key, value))
    output: Any = varlen.varlen_attn(q, k, v, starts, starts, longest, longest, **options)
    return output.view(query.shape[0], query.shape[2], *output.shape[1:]), None
