"""Attention with a trained relative bias: T5 and its family."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fullshard.core.transformers_private import set_attention
from fullshard.program.models import T5_FAMILY, base_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from fullshard.program.speed.way import Facts, Part

_ALIGNED = 8
"""Elements of which a mask's strides must be multiples, but the last: else torch copies the mask in each layer."""

_KERNEL_BYTES = 16
"""Bytes of which a head must be a multiple for CUDA's memory-efficient kernel."""


_REGISTERED = "trained_bias"  # transformers asks LongT5 and Switch whether they support a name with sdpa in it


class BiasSdpa:
    """Compute T5's attention by a fused kernel that takes the bias and returns its gradient."""

    name = "bias_sdpa"
    purpose = "T5's attention by torch's fused kernel; bias and mask are added up once a stack"
    part: Part = "attention"
    exact = False

    def misfit(self, model: PreTrainedModel, facts: Facts) -> str | None:
        """See :meth:`Way.misfit`."""
        base = base_of(model)
        if not biased_layers(base):
            return no_bias(base)
        width = base.config.d_kv * facts.dtype.itemsize
        if facts.device.type == "cuda" and width % _KERNEL_BYTES:
            return (
                f"CUDA's memory-efficient kernel takes heads of a multiple of {_KERNEL_BYTES} bytes, and d_kv "
                f"{base.config.d_kv} in {str(facts.dtype).removeprefix('torch.')} is {width}"
            )
        return None

    def apply(self, model: PreTrainedModel, facts: Facts) -> None:
        """See :meth:`Way.apply`."""
        AttentionInterface.register(_REGISTERED, _attend)
        AttentionMaskInterface.register(_REGISTERED, _mask)
        share_bias(base_of(model), _REGISTERED, _prepared)


def no_bias(base: PreTrainedModel) -> str:
    """Return why a way for trained relative biases does not apply to a model without."""
    kinds = ", ".join(sorted(T5_FAMILY))
    return f"it is for models with a trained relative bias ({kinds}), and this one is {base.config.model_type}"


def biased_layers(base: PreTrainedModel) -> list[nn.Module]:
    """Return the attention layers, of T5's family, that call transformers' attention with a trained bias; any process.

    Of LongT5 these are the decoder's: its encoder's local attention is a code of its own.
    """
    if base.config.model_type not in T5_FAMILY:
        return []
    return [module for module in base.modules() if hasattr(module, "compute_bias") and hasattr(module, "scaling")]


Prepare = Callable[[Any, Tensor | None, Tensor], Tensor]
"""Takes a stack's first layer, its mask and its hidden states; returns what the stack's layers get for a bias."""


def share_bias(base: PreTrainedModel, attention: str, prepare: Prepare) -> None:
    """Set a registered attention, and prepare its bias once for all layers of a stack, in place.

    T5's blocks hand their bias on from one to the next, so what the first one is given reaches all. Where layers have a
    bias each (UMT5), it is prepared for each. The attention is called with ``prepared=True``; without gradients, and
    with a key-value cache, as by transformers, without it.
    """
    set_attention(base, attention)
    for layer in biased_layers(base):
        handed_on = "position_bias" in inspect.signature(type(layer).forward).parameters
        if handed_on:
            cast("Any", layer).prepare_bias = prepare  # for compiled blocks, which are given it from outside
            layer.register_forward_pre_hook(partial(_hand_on, prepare), with_kwargs=True)
        else:
            cast("Any", layer).compute_bias = partial(_computed_bias, layer)
            cast("Any", layer).prepared_bias = None
            layer.register_forward_pre_hook(partial(_replace_bias, prepare), with_kwargs=True)
            layer.register_forward_hook(_restore_bias, always_call=True)


def _is_plain(kwargs: dict[str, Any]) -> bool:
    """Return whether a layer is to be called as by transformers."""
    return not torch.is_grad_enabled() or kwargs.get("past_key_values") is not None


def _replace_bias(
    prepare: Prepare, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Let a layer that computes its own bias, or zeros of the size of its scores, have the prepared one instead."""
    if _is_plain(kwargs):
        return None
    (hidden,) = args
    layer.prepared_bias = prepare(layer, kwargs.get("attention_mask"), hidden)
    layer.has_relative_attention_bias = True
    return args, {**kwargs, "prepared": True}


def _restore_bias(layer: Any, _args: Any, _output: Any) -> None:
    layer.prepared_bias = None
    layer.has_relative_attention_bias = hasattr(layer, "relative_attention_bias")


def _computed_bias(layer: Any, *lengths: Any, **more: Any) -> Tensor:
    """Return the prepared bias while there is one, else what the layer computes."""
    if layer.prepared_bias is not None:
        return layer.prepared_bias
    return type(layer).compute_bias(layer, *lengths, **more)


def _hand_on(
    prepare: Prepare, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    if _is_plain(kwargs):
        return None
    (hidden,), shared = args, kwargs.get("position_bias")
    if shared is None:
        shared = prepare(layer, kwargs.get("mask"), hidden)
    return args, {**kwargs, "position_bias": shared, "prepared": True}


def _mask(batch_size: int, *, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor | None:
    """Return transformers' boolean mask, (1, 1, Q, K) if rows have no masks of their own."""
    batch_size = 1 if attention_mask is None else batch_size
    kwargs["allow_is_causal_skip"] = False
    return sdpa_mask(batch_size, attention_mask=attention_mask, **kwargs)


def _prepared(layer: Any, mask: Tensor | None, hidden: Tensor) -> Tensor:
    length, bias = hidden.shape[1], None
    if layer.has_relative_attention_bias:
        bias = layer.compute_bias(length, length, device=hidden.device)
    return _merged(bias, mask, hidden)


def _merged(bias: Tensor | None, mask: Tensor | None, like: Tensor) -> Tensor:
    """Return bias plus mask, (1 or B, 1 or H, Q, K) in the dtype of ``like`` and aligned; 0-d if there is neither."""
    if mask is not None and mask.dtype == torch.bool:
        least = torch.finfo(like.dtype).min
        mask = torch.zeros_like(mask, dtype=like.dtype).masked_fill_(~mask, least)
    parts = [one for one in (bias, mask) if one is not None]
    if not parts:
        return like.new_zeros(())
    first, *more = (_padded(one.to(like.dtype)) for one in parts)
    return sum(more, start=first)[..., : parts[0].shape[-1]]


def _padded(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor whose last axis is padded, so that the other strides are aligned."""
    tensor, missing = tensor.contiguous(), -tensor.shape[-1] % _ALIGNED
    return functional.pad(tensor, (0, missing)) if missing else tensor


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    prepared: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Any]:
    """Attend as transformers' functions do; a prepared bias has the mask in it."""
    if prepared is None:
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, attention_mask, **kwargs)
    bias = kwargs["position_bias"]
    mask, dropout = bias.to(query.dtype) if bias.dim() else None, kwargs.get("dropout", 0.0)
    output = functional.scaled_dot_product_attention(
        query, key, value, mask, dropout_p=dropout, scale=kwargs.get("scaling")
    )
    return output.transpose(1, 2).contiguous(), None
