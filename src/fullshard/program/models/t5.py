"""T5's family of models: attention dropout, and the refusal of float16."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import nn

from fullshard.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

T5_FAMILY = frozenset({"t5", "mt5", "umt5", "longt5", "switch_transformers"})
"""Model types with T5's layers."""


def set_attention_dropout(model: PreTrainedModel, probability: float) -> None:
    """Set the dropout of T5's attention weights, in place, without changing its other dropout; any rank.

    T5's configuration has one rate for all dropout. The dropout masks of attention weights grow with the square of the
    length and are a large part of the activations in training.

    Args:
        model: On any device; not sharded.
        probability: At least 0, less than 1.

    Raises:
        ModelError: The model is not of T5's family.
    """
    kind = model.config.model_type
    if kind not in T5_FAMILY:
        own = [name for name in ("attention_dropout", "attn_pdrop") if hasattr(model.config, name)]
        raise ModelError(
            f"model.attention_dropout is for models of T5's family ({', '.join(sorted(T5_FAMILY))}); this is {kind}. "
            + (f"Its own option is {own[0]}, in model.config or the model's config.json." if own else "Remove it.")
        )
    for module in _attention_modules(model):
        module.dropout = probability  # type: ignore[assignment]


def _attention_modules(model: nn.Module) -> Iterator[nn.Module]:
    """Return the modules that drop attention weights; other layers have an ``nn.Dropout`` under the same name."""
    return (
        m for m in model.modules() if "Attention" in type(m).__name__ and isinstance(getattr(m, "dropout", None), float)
    )


def require_fp16_fit(kind: str) -> None:
    """Refuse a type of model that is known to overflow in float16; any process.

    Raises:
        ModelError: The model is of T5's family.
    """
    if kind in T5_FAMILY:
        raise ModelError(
            f"precision: fp16 is not supported for {kind}: T5 was trained in bfloat16, and its activations exceed "
            "float16's maximum of 65,504, mostly in the feed-forward layers. Keeping their output layer (wo) in "
            "float32 helps for some checkpoints only. Use precision: bf16 (or fp32), or set training.allow_fp16 to "
            "try fp16."
        )
