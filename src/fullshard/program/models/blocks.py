"""What is done to each block of a model: activation checkpointing, and torch.compile, which evaluation leaves out."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from fullshard.core.shards import untraced
from fullshard.core.torch_private import compiled
from fullshard.core.transformers_private import always_mask
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


MOST_GRAPHS = 48
"""Graphs that a block's code is compiled to before the compiler gives up: torch's default of 8 for each of 6 shapes."""


def compile_blocks(model: PreTrainedModel, *, backend: str = "inductor") -> None:
    """Compile every transformer block of a Hugging Face model, in place; every rank calls it, before sharding.

    Blocks that are alike share a graph for each shape of their inputs; a graph is compiled when its shape first comes.
    Names of modules and parameters do not change. Add an adapter before. ``backend`` is the compiler of the graphs.

    Raises:
        ModelError: The model has no blocks of transformers' ``GradientCheckpointingLayer``.
    """
    blocks = blocks_of(model)
    if not blocks:
        raise ModelError(
            f"{type(model).__name__} has no transformer blocks that can be compiled one by one. "
            "Set training.torch_compile to false."
        )
    always_mask()
    for block in blocks:
        if _computes_bias(block):
            block.register_forward_pre_hook(_give_biases, with_kwargs=True)
        block._compiled_call_impl = compiled(block._call_impl, graphs=MOST_GRAPHS, backend=backend, dynamic=False)


def _computes_bias(block: Any) -> bool:
    """Return True for the first block of a T5's stack, whose position bias all others get from it.

    Earlier versions of transformers add the mask to the bias, only where it is computed; there it must not be given.
    """
    attention: Any = getattr(next(iter(getattr(block, "layer", ())), None), "SelfAttention", None)
    if not getattr(attention, "has_relative_attention_bias", False):
        return False
    computes: Any = getattr(sys.modules[type(attention).__module__], "eager_attention_forward", None)
    both = (type(block).forward, computes)
    return computes is not None and all("position_bias" in inspect.signature(one).parameters for one in both)


@untraced
def _give_biases(block: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Give a stack's first block the biases that it would compute itself, so that it shares the graph of the others."""
    names = [*inspect.signature(type(block).forward).parameters][1:]
    given, attention = dict(zip(names, args, strict=False)) | kwargs, block.layer[0].SelfAttention
    if not torch.is_grad_enabled() or given.get("past_key_values") or given.get("position_bias") is not None:
        return args, kwargs
    states, memory = given["hidden_states"], given.get("encoder_hidden_states")
    length, prepare = states.shape[1], getattr(attention, "prepare_bias", None)  # by a way of attention
    biases: dict[str, Any] = {}
    if prepare is not None:
        biases["position_bias"] = prepare(attention, given.get("attention_mask"), states)
    else:
        biases["position_bias"] = attention.compute_bias(length, length, device=states.device)
    if memory is not None and prepare is not None:
        mask = given.get("encoder_attention_mask")
        biases["encoder_decoder_position_bias"] = prepare(block.layer[1].EncDecAttention, mask, states)
    elif memory is not None:
        biases["encoder_decoder_position_bias"] = states.new_zeros(1, attention.n_heads, length, memory.shape[1])
    # Arguments stay positional or by name, as the other blocks get them.
    at = {name: value for name, value in biases.items() if name not in names[: len(args)]}
    return tuple(biases.get(name, value) for name, value in zip(names, args, strict=False)), {**kwargs, **at}


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
