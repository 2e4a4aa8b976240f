"""torch.compile, block by block."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from fullshard.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def compile_blocks(model: PreTrainedModel, *, backend: str = "inductor") -> None:
    """Compile every transformer block of a Hugging Face model, in place; every rank calls it, before sharding.

    Names of modules and parameters do not change. Blocks are compiled in the first forward, and again for new shapes.
    An adapter is added before.

    Raises:
        ModelError: The model has no blocks of transformers' ``GradientCheckpointingLayer``.
    """
    blocks = list(_blocks(model))
    if not blocks:
        raise ModelError(
            f"{type(model).__name__} has no transformer blocks that can be compiled one by one. "
            "Set training.torch_compile to false."
        )
    for block in blocks:
        block.compile(backend=backend)


def _blocks(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost blocks."""
    for child in model.children():
        if isinstance(child, GradientCheckpointingLayer):
            yield child
        else:
            yield from _blocks(child)
