"""What is done to each block of a model: activation checkpointing, and torch.compile, which evaluation leaves out."""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from fullshard.core.shards import untraced
from fullshard.core.torch_private import compiled, graphs_compiled, in_backward
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


MOST_GRAPHS = 8
"""Graphs of a shape, torch's own limit for a function. A model has one for each kind of its blocks; blocks that are cut
where their code depends on the data, such as routers in Python, have more with every batch."""

_ANY_SHAPES = 6
"""Shapes of which a block's graphs are kept before a run has announced its own."""


@dataclass
class CompiledShapes:
    """For how many shapes of inputs the blocks of a model are compiled: of each block those that come first."""

    most: int | None = None  # shapes that were announced; None: any number
    paused: bool = False  # whether blocks run uncompiled now
    full: bool = False  # whether nothing more is compiled
    before: int = field(default_factory=graphs_compiled)  # graphs of this process that are not of this model
    told: bool = False  # whether it was told that something runs uncompiled

    def take(self, shape: object, seen: set[object]) -> bool:
        """Return whether a block that is compiled for the shapes ``seen`` runs compiled on this one, which may join.

        A shape stays compiled or uncompiled, so a recomputed forward computes what the first one did.
        """
        if self.paused:
            return False
        if shape not in seen and self.most is not None and len(seen) >= self.most:
            self._tell(f"a micro-batch has another shape (a block's inputs are {shape})")
            return False
        seen.add(shape)
        return True

    def count(self) -> None:
        """Stop compiling when there are too many graphs for the shapes; called when a forward begins."""
        if self.most is None or self.full:
            return
        found = graphs_compiled() - self.before
        if found > MOST_GRAPHS * self.most:
            self.full = True
            self._tell(f"they were cut into {found} graphs, more than {MOST_GRAPHS} for each shape")

    def _tell(self, why: str) -> None:
        if not self.told:
            self.told = True
            logging.getLogger("fullshard").warning(
                "Blocks are compiled for %s announced shape%s, and %s: what is not compiled yet runs uncompiled from "
                "now on.",
                self.most,
                "" if self.most == 1 else "s",
                why,
            )


@dataclass
class _CompiledBlock:
    """The call of one block, compiled or not by the shapes of its inputs."""

    plain: Callable[..., Any]
    compiled: Callable[..., Any]
    shapes: CompiledShapes  # of the model
    first: bool  # whether it is the model's first block
    seen: set[object] = field(default_factory=set[object])  # this block's

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Not between a forward and its recomputation: compiled code draws other numbers for dropout.
        if self.first and not in_backward():
            self.shapes.count()
        if not self.shapes.take(_shapes((*args, *kwargs.values())), self.seen):
            return self.plain(*args, **kwargs)
        if self.shapes.full:
            with torch.compiler.set_stance("eager_on_recompile"):
                return self.compiled(*args, **kwargs)
        return self.compiled(*args, **kwargs)


def _shapes(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the shapes of tensors, and of those in tuples, such as the parts of rotary positions."""
    nested = (_shapes(one) if isinstance(one, tuple) else tuple(one.shape) for one in inputs if _has_shape(one))
    return tuple(nested)


def _has_shape(one: object) -> bool:
    return isinstance(one, torch.Tensor | tuple)


def announce_shapes(model: nn.Module, number: int) -> None:
    """Limit the shapes that blocks are compiled for to those of a run; on a further one they run uncompiled.

    Called alike on every rank, after :func:`compile_blocks`; without compiled blocks it does nothing.
    """
    for shapes in _compiled_shapes(model):
        shapes.most = number


def _compiled_shapes(model: nn.Module) -> list[CompiledShapes]:
    """Return what decides about the compiled blocks of a model: one, or none if no block is compiled."""
    calls = [module._compiled_call_impl for module in model.modules()]
    return list({id(call.shapes): call.shapes for call in calls if isinstance(call, _CompiledBlock)}.values())


def compile_blocks(model: PreTrainedModel, *, backend: str = "inductor") -> None:
    """Compile every transformer block of a Hugging Face model, in place; every rank calls it, before sharding.

    Blocks that are alike share a graph for each shape of their inputs; a graph is compiled when its shape first comes,
    unless :func:`announce_shapes` was called and as many came before.
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
    shapes = CompiledShapes()
    for place, block in enumerate(blocks):
        if _computes_bias(block):
            block.register_forward_pre_hook(_give_biases, with_kwargs=True)
        call = compiled(block._call_impl, graphs=MOST_GRAPHS * _ANY_SHAPES, backend=backend, dynamic=False)
        block._compiled_call_impl = _CompiledBlock(block._call_impl, call, shapes, first=not place)


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
    found = _compiled_shapes(model)
    if not found:
        yield  # avoids importing the compiler, which takes a second
        return
    for shapes in found:
        shapes.paused = True
    try:
        with torch.compiler.set_stance("force_eager"):  # for what is compiled beside blocks
            yield
    finally:
        for shapes in found:
            shapes.paused = False
