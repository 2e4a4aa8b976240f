"""torch.compile, block by block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from fullshard.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def compile_blocks(model: PreTrainedModel, *, backend: str = "inductor", dynamic: bool | None = None) -> None:
    """Compile every transformer block of a Hugging Face model, in place; every rank calls it, before sharding.

    Names of modules and parameters do not change. Blocks are compiled in the first forward. An adapter is added before.

    Args:
        model: The model.
        backend: What compiles the graphs.
        dynamic: Whether the first graph is for every batch size and length. None: it is for those of the first batch,
            which is faster where all batches have the same; a second one is compiled for others.

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
        block.compile(backend=backend, dynamic=dynamic)


@contextmanager
def uncompiled(model: nn.Module) -> Iterator[None]:
    """Context in which compiled blocks run as if they were not.

    For evaluation: ``generate`` has a longer cache for every token, and the compiler gives up on a block that was
    compiled for too many kinds of inputs, in training too.
    """
    if not any(module._compiled_call_impl is not None for module in model.modules()):
        yield  # without importing the compiler, which takes a second
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def _blocks(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost blocks."""
    for child in model.children():
        if isinstance(child, GradientCheckpointingLayer):
            yield child
        else:
            yield from _blocks(child)
