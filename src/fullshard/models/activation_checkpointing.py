"""Activation checkpointing: a block's activations are recomputed in backward instead of being kept."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fullshard.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def enable_activation_checkpointing(model: PreTrainedModel) -> None:
    """Checkpoint every transformer block of a Hugging Face model, in place; every rank calls it, before sharding.

    Checkpointing is non-reentrant, so that gradients of models with frozen or nested modules are correct. Train with
    ``model(..., use_cache=False)``: a recomputed block would fill the key-value cache twice. Generation in evaluation
    mode is not changed and still uses the cache.

    Raises:
        ModelError: The model's class does not support it.
    """
    if not model.supports_gradient_checkpointing:
        raise ModelError(
            f"{type(model).__name__} does not support activation checkpointing. "
            "Set training.gradient_checkpointing to false."
        )
    # Newer transformers renamed the method; there the old name warns.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
