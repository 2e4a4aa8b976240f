"""The way ``t5_attention``: a T5's layers are given the table of their bias, and rows as numbers in place of masks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fullshard.core.sequence import attention_for, sharers_of
from fullshard.core.transformers_private import t5_bucket
from fullshard.errors import ModelError
from fullshard.planner import planning, real_tensors
from fullshard.program.models import base_of
from fullshard.program.models.packing import additive_mask, mask_packed_rows
from fullshard.program.speed.bias import biased_layers, no_bias, share_bias
from fullshard.program.speed.t5_attention.launch import Attention, unavailable
from fullshard.program.speed.t5_attention.operator import t5_attention

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from fullshard.program.speed.way import Facts, Part

_REGISTERED = "t5_kernel"

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_WIDEST = 256
"""Elements of a head at most: a program has those of a block of queries at once."""

_PADDING = 1 << 30
"""The number of queries that are padding of packed rows; that of keys is one more, so that nothing sees padding."""


class T5Attention:
    """Compute T5's attention in training by one kernel, without a tensor of all pairs of a query and a key."""

    name = "t5_attention"
    purpose = "T5's attention by fullshard's kernel, with bias, masks and dropout in it, on GPUs"
    part: Part = "attention"
    exact = False

    def misfit(self, model: PreTrainedModel, facts: Facts) -> str | None:
        """See :meth:`Way.misfit`."""
        base = base_of(model)
        layers: list[Any] = biased_layers(base)
        if not layers:
            return no_bias(base)
        width = max(layer.key_value_proj_dim for layer in layers)
        if width > _WIDEST:
            return f"its kernel takes heads of at most {_WIDEST} elements, and this model's d_kv is {width}"
        if facts.dtype not in _DTYPES:
            dtypes = ", ".join(str(one).removeprefix("torch.") for one in _DTYPES)
            return f"its kernel computes in {dtypes}, and this run in {str(facts.dtype).removeprefix('torch.')}"
        if not all(_has_t5_buckets(layer) for layer in layers if layer.has_relative_attention_bias):
            return f"layers of {base.config.model_type} do not divide distances into buckets as T5's do"
        return None if facts.assumed or planning() else unavailable(facts.device)

    def apply(self, model: PreTrainedModel, facts: Facts) -> None:
        """See :meth:`Way.apply`."""
        base = base_of(model)
        AttentionInterface.register(_REGISTERED, _attend)
        AttentionMaskInterface.register(_REGISTERED, _numbers)
        shares = sharers_of(model) is not None
        share_bias(base, attention_for(_REGISTERED) if shares else _REGISTERED, _table)
        for layer in biased_layers(base):
            layer.bias_of_heads = _table_of  # type: ignore[assignment]  # for ranks that share rows
        if facts.packing:
            mask_packed_rows(model, _packed_numbers)


class _Probe:
    """A layer whose bias is the number of the bucket."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)

    def relative_attention_bias(self, buckets: Tensor) -> Tensor:
        return buckets[..., None]


def _has_t5_buckets(layer: Any) -> bool:
    """Return whether a layer's buckets are T5's, up to twice the distance from which on all are in one."""
    count, most = layer.relative_attention_num_buckets, layer.relative_attention_max_distance
    length, device = 2 * most + 1, torch.device("cpu")
    with real_tensors():
        compute = type(layer).compute_bias
        own = compute(_Probe(layer), 1, 2 * length - 1, device=device, past_seen_tokens=length - 1)[0, 0, 0]
        distances = torch.arange(1 - length, length, device=device).clamp(-most, most)
        both = not layer.is_decoder
        return torch.equal(own, t5_bucket()(distances, bidirectional=both, num_buckets=count, max_distance=most))


def _table_of(layer: Any) -> Tensor:
    """Return a layer's biases, float32, (H, buckets), in memory of their own: other units' blocks read them too."""
    biases = layer.relative_attention_bias
    return biases(torch.arange(layer.relative_attention_num_buckets, device=biases.weight.device)).float().t()


def _table(layer: Any, _mask: Tensor | None, hidden: Tensor) -> Tensor:
    """Return what a stack's layers get for a bias: its table, or 0-d for none."""
    return _table_of(layer) if layer.has_relative_attention_bias else hidden.new_zeros(())


def _numbers(batch_size: int, *, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor | None:
    """Return segment numbers of keys, int32, (B, 1, 1, K): 1, and 0 on padding. Every query sees those of 1."""
    if not torch.is_grad_enabled():
        return sdpa_mask(batch_size, attention_mask=attention_mask, **kwargs)
    return None if attention_mask is None else attention_mask[:, None, None].int()


def _packed_numbers(queries_BT: Tensor, keys_BS: Tensor, *, causal: bool, **more: Any) -> Tensor:
    """Return segment numbers of queries and then of keys, int32, (B, 1, 1, T + S); see :func:`additive_mask`."""
    if not torch.is_grad_enabled():
        return additive_mask(queries_BT, keys_BS, causal=causal, **more)
    queries = queries_BT.masked_fill(queries_BT == 0, _PADDING)
    keys = keys_BS.masked_fill(keys_BS == 0, _PADDING + 1)
    return torch.cat([queries, keys], dim=1)[:, None, None].int()


def _seen(mask: Tensor | None) -> Tensor | None:
    """Return segment numbers, also of a mask of padding that a model makes itself, as Switch's encoder does.

    Raises:
        ModelError: The mask is of each pair of a query and a key.
    """
    if mask is None or mask.dtype == torch.int32:
        return mask
    if mask.dim() != 4 or mask.shape[1:3] != (1, 1):
        raise ModelError(
            f"t5_attention takes masks of padding, (B, 1, 1, K); this model makes one of {tuple(mask.shape)}. Remove "
            "it from speed.ways."
        )
    return (mask if mask.dtype == torch.bool else mask >= 0).int()


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
    """Attend as transformers' functions do; a prepared bias is that of :func:`_table`."""
    if prepared is None:
        if torch.is_grad_enabled():
            raise ModelError(
                "t5_attention does not take a key-value cache in training, which a prefix adapter is. Remove it from "
                "speed.ways."
            )
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, attention_mask, **kwargs)
    bias, dropout = kwargs.get("position_bias"), kwargs.get("dropout", 0.0)
    given = Attention(
        query,
        key,
        value,
        table=bias if bias is not None and bias.dim() else None,
        segments=_seen(attention_mask),
        # Drawn where torch's dropout draws, so that recomputed blocks and resumed runs have it again; never read here.
        seed=torch.randint(2**63 - 1, (1,), device=query.device) if dropout else None,
        causal=module.is_causal,
        bidirectional=not module.is_decoder,
        most=module.relative_attention_max_distance,
        scale=kwargs["scaling"],
        dropout=dropout,
    )
    return t5_attention(given).transpose(1, 2), None
