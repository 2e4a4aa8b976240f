"""Small exact changes of a model, and what is known to go wrong with some kinds."""

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
    """Set the dropout of T5's attention weights, in place, and leave its other dropout as it is. Any rank.

    T5's configuration has one rate for all its dropout. The masks of the attention weights grow with the square of the
    length and are a large part of the activations in training.

    Args:
        model: On any device; not sharded.
        probability: From 0 up to, but not, 1.

    Raises:
        ModelError: The model is not of T5's family.
    """
    kind = model.config.model_type
    if kind not in T5_FAMILY:
        own = [name for name in ("attention_dropout", "attn_pdrop") if hasattr(model.config, name)]
        raise ModelError(
            f"model.attention_dropout is for models of T5's family ({', '.join(sorted(T5_FAMILY))}); this is {kind}. "
            + (f"Its own option is {own[0]}, in model.config or the model's config.json." if own else "Leave it out.")
        )
    for module in _attention_modules(model):
        module.dropout = probability  # type: ignore[assignment]


def _attention_modules(model: nn.Module) -> Iterator[nn.Module]:
    """Modules that drop attention weights; the layers around them hold an ``nn.Dropout`` of the same name."""
    return (
        m for m in model.modules() if "Attention" in type(m).__name__ and isinstance(getattr(m, "dropout", None), float)
    )


def require_fp16_fit(kind: str) -> None:
    """Refuse float16 for a model that overflows in it; any process, alone.

    Args:
        kind: The model's type.

    Raises:
        ModelError: It is of T5's family.
    """
    if kind in T5_FAMILY:
        raise ModelError(
            f"precision: fp16 does not fit {kind}: T5 was trained in bfloat16, and its activations go beyond float16's "
            "65,504, in the feed-forward layers most of all. Keeping their output layer (wo) in float32 mends some "
            "checkpoints and not others. Use precision: bf16 (or fp32), or set training.allow_fp16 to try."
        )
