"""What is done to each block of a model: activation checkpointing, and torch.compile, which evaluation leaves out."""

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


def blocks_of(model: nn.Module) -> list[GradientCheckpointingLayer]:
    """Return the outermost transformer blocks, an encoder's before its decoder's; any process."""
    found: list[GradientCheckpointingLayer] = []
    for child in model.children():
        found += [child] if isinstance(child, GradientCheckpointingLayer) else blocks_of(child)
    return list(dict.fromkeys(found))  # stacks may share blocks


def enable_activation_checkpointing(model: PreTrainedModel, number: int | None = None) -> None:
    """Checkpoint transformer blocks of a Hugging Face model, in place; every rank calls it, before sharding.

    Checkpointing is non-reentrant, so that gradients of models with frozen or nested modules are correct. Train with
    ``model(..., use_cache=False)``: a recomputed block would fill the key-value cache twice. Generation in evaluation
    mode is not changed and still uses the cache.

    Args:
        model: With its adapter, if it has one.
        number: How many of the n blocks (:func:`blocks_of`) are recomputed: those at ``i * n // number`` for each i
            below it, which are evenly spread. The deepest one only comes with n, because recomputing it saves least:
            its activations are the first that backward frees. None: all blocks.

    Raises:
        ModelError: The model's class does not support it, or it has fewer blocks.
    """
    name = type(model).__name__
    if not model.supports_gradient_checkpointing:
        raise ModelError(
            f"{name} does not support activation checkpointing. Set training.gradient_checkpointing to false."
        )
    blocks = blocks_of(model)
    if number is not None and number > len(blocks):
        raise ModelError(
            f"training.gradient_checkpointing: {number} blocks cannot be recomputed, as {name} has {len(blocks)}. Set "
            f"{f'at most {len(blocks)}, ' if blocks else ''}true for all of them, or false."
        )
    # Newer transformers renamed the method; there the old name warns.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    number = len(blocks) if number is None else number
    chosen = {i * len(blocks) // number for i in range(number)}
    for place, block in enumerate(blocks):
        for module in block.modules():
            if hasattr(module, "gradient_checkpointing"):
                # T5's attention has a flag too: its constant bias then requires a gradient, which only reentrant
                # checkpoints need, and attention with such a bias takes another kernel, which rounds differently.
                is_block = isinstance(module, GradientCheckpointingLayer)
                module.gradient_checkpointing = is_block and place in chosen  # type: ignore[assignment]


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
