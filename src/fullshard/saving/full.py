"""A sharded model as a Hugging Face directory, streamed unit by unit through one rank."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fullshard.checkpoint import TensorSpec, atomic_directory, write_full
from fullshard.engine import full_tensors, mesh_of, persistent_buffers
from fullshard.errors import CheckpointError


def save(model: nn.Module, directory: str | Path, *, tokenizer: Any = None) -> None:
    """Write the whole model's weights, and of a Hugging Face model its configuration; every rank calls it.

    Afterwards ``from_pretrained(directory)`` loads a Hugging Face model; of any other ``model.safetensors`` holds each
    parameter once, under its first name, and the persistent buffers. Rank 0 writes; it holds its shards and one unit,
    never the model. The directory appears, or is replaced, at the end and at once.

    Args:
        model: The sharded model.
        directory: Where the model shall be, on rank 0's file system.
        tokenizer: Saved beside it by its own ``save_pretrained``, if given.

    Raises:
        ShardingError: The model is not sharded.
        CheckpointError: Rank 0 could not write; on every rank, with the same text.
    """
    mesh = mesh_of(model)
    stream = full_tensors(model)
    problem: str | None = None
    if mesh.rank == 0:
        try:
            _write(stream, model, tokenizer, Path(directory))
        except CheckpointError as error:
            problem = str(error)
    # The other ranks take part in every gather, and so must rank 0 after it gave up writing.
    for _ in stream:
        pass
    problem = mesh.all_gather_object(problem)[0]
    if problem is not None:
        raise CheckpointError(problem)


def tensor_specs(model: nn.Module) -> list[TensorSpec]:
    """Name, full shape and dtype of every tensor of a saved model; any rank.

    Args:
        model: The sharded model.

    Returns:
        Each parameter once, under its first name, then persistent buffers.
    """
    specs = []
    for name, parameter in model.named_parameters():
        meta = getattr(parameter, "shard_meta", None)
        if meta is None:  # a parameter that was left out of sharding
            specs.append(TensorSpec(name, tuple(parameter.shape), parameter.dtype))
        else:
            specs.append(TensorSpec(meta.name, meta.global_shape, parameter.dtype))
    return specs + [TensorSpec(name, tuple(buffer.shape), buffer.dtype) for name, buffer in persistent_buffers(model)]


def _write(
    stream: Iterator[tuple[str, dict[str, torch.Tensor | None]]], model: Any, tokenizer: Any, directory: Path
) -> None:
    with atomic_directory(directory) as temporary:
        write_full(stream, temporary, specs=tensor_specs(model))
        if hasattr(model, "config"):
            # What Hugging Face's own save_pretrained records beside the weights.
            model.config.architectures = [type(model).__name__]
            model.config.save_pretrained(temporary)
        if getattr(model, "generation_config", None) is not None:
            model.generation_config.save_pretrained(temporary)
        if tokenizer is not None:
            tokenizer.save_pretrained(temporary)
