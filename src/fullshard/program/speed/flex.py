"""FlexAttention: masks as blocks, so that nothing of the size Q x K is in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import flex_attention_mask, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fullshard.core.transformers_private import attentions, set_attention
from fullshard.program.models import base_of
from fullshard.program.models.packing import additive_mask, mask_packed_rows
from fullshard.program.speed.bias import biased_layers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from fullshard.program.speed.way import Facts, Part

_REGISTERED = "flex_blocks"


class Flex:
    """Compute attention by FlexAttention while training; evaluation is by scaled_dot_product_attention."""

    name = "flex"
    purpose = "FlexAttention with block masks in training, for models without a trained bias"
    part: Part = "attention"
    exact = False

    def misfit(self, model: PreTrainedModel, facts: Facts) -> str | None:
        """See :meth:`Way.misfit`."""
        base = base_of(model)
        if facts.device.type == "cpu":
            return "FlexAttention has no backward on a CPU"
        if biased_layers(base):
            return f"it reads no trained bias, which {base.config.model_type} has: use t5_attention"
        if "flex_attention" not in attentions(type(base)):
            return f"transformers' {type(base).__name__} has no FlexAttention"
        softcap = getattr(base.config, "attn_logit_softcapping", None)
        if softcap or "sdpa" not in attentions(type(base)):
            # scaled_dot_product_attention would silently leave out caps of scores, attention sinks and the like
            why = f"has attn_logit_softcapping: {softcap:g}" if softcap else "has none"
            return f"evaluation is by scaled_dot_product_attention, for which transformers' {type(base).__name__} {why}"
        dropout = attention_dropout(base)
        if dropout:
            return (
                f"FlexAttention has no dropout of attention weights, and this model's is {dropout:g} (set it to 0 in "
                "the model's config)"
            )
        return None

    def apply(self, model: PreTrainedModel, facts: Facts) -> None:
        """See :meth:`Way.apply`."""
        AttentionInterface.register(_REGISTERED, _attend)
        AttentionMaskInterface.register(_REGISTERED, _mask)
        set_attention(base_of(model), _REGISTERED)
        if facts.packing:
            mask_packed_rows(model, _packed_blocks)


def attention_dropout(base: PreTrainedModel) -> float:
    """Return the largest dropout of a model's attention weights; any process."""
    config: Any = base.config
    names = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")
    return max(float(getattr(config, name, None) or 0.0) for name in names)


def _mask(batch_size: int, **kwargs: Any) -> BlockMask | Tensor | None:
    make = flex_attention_mask if torch.is_grad_enabled() else sdpa_mask
    return make(batch_size, **kwargs)


def _packed_blocks(queries_BT: Tensor, keys_BS: Tensor, *, causal: bool, **more: Any) -> BlockMask | Tensor:
    """Return which tokens attend to which: see :func:`additive_mask`, from segments of rows."""
    if not torch.is_grad_enabled():
        return additive_mask(queries_BT, keys_BS, causal=causal, **more)

    def attends(row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        own = queries_BT[row, query]
        same = (own == keys_BS[row, key]) | (own == 0)  # padding attends to everything: no softmax is empty
        return same & (query >= key) if causal else same

    (rows, queries), keys, device = queries_BT.shape, keys_BS.shape[1], queries_BT.device
    return create_block_mask(attends, rows, None, queries, keys, device=device, _compile=device.type == "cuda")


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: BlockMask | Tensor | None, **kwargs: Any
) -> tuple[Tensor, Any]:
    """Attend as transformers' functions do."""
    plain = ALL_ATTENTION_FUNCTIONS["flex_attention" if isinstance(attention_mask, BlockMask) else "sdpa"]
    return plain(module, query, key, value, attention_mask, **kwargs)
