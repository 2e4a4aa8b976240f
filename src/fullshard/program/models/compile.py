"""torch.compile for each transformer block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn

from fullshard.errors import ModelError
from fullshard.program.models.activation_checkpointing import blocks_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def compile_blocks(model: PreTrainedModel, *, backend: str = "inductor", dynamic: bool | None = None) -> None:
    """Compile every transformer block of a Hugging Face model, in place; every rank calls it, before sharding.

    Names of modules and parameters do not change. Blocks are compiled in the first forward. Add an adapter before.

    Args:
        model: The model.
        backend: The compiler of the graphs.
        dynamic: True compiles the first graph for every batch size and length. None compiles it for those of the first
            batch, which is faster if all batches have the same; others need a second graph.

    Raises:
        ModelError: The model has no blocks of transformers' ``GradientCheckpointingLayer``.
    """
    blocks = blocks_of(model)
    if not blocks:
        raise ModelError(
            f"{type(model).__name__} has no transformer blocks that can be compiled one by one. "
            "Set training.torch_compile to false."
        )
    for block in blocks:
        block.compile(backend=backend, dynamic=dynamic)


@contextmanager
def uncompiled(model: nn.Module) -> Iterator[None]:
    """Run compiled blocks as if they were not compiled, inside the context.

    For evaluation: ``generate`` has a longer cache at every token, and the compiler gives up on a block that was
    compiled for too many kinds of inputs, also for training.
    """
    if not any(module._compiled_call_impl is not None for module in model.modules()):
        yield  # avoids importing the compiler, which takes a second
        return
    with torch.compiler.set_stance("force_eager"):
        yield
