"""Support for torch's ``get_model_state_dict`` and ``get_optimizer_state_dict``.

With ``StateDictOptions(full_state_dict=True)`` they call ``state_dict()`` and gather each ``ShardedTensor`` and
``DTensor`` in it. Our shards are runs of rows or elements of unequal size, which neither class can describe: both are
gathered as equal chunks. Plain tensors are kept. So a state dict that such a getter requests contains full tensors, as
with torch's own FSDP1. The getter's options are found on the call stack. If a later torch has them elsewhere, it gets
parts, which raise an error as soon as they are used.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions

from fullshard.saving.shard_tensor import ShardTensor, UnsplitTensor

GETTERS = "torch.distributed.checkpoint.state_dict"


def asking_getter() -> StateDictOptions | None:
    """Return the options of the torch getter that is calling; None if there is none on the stack."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == GETTERS:
            given = (value for value in frame.f_locals.values() if isinstance(value, StateDictOptions))
            return next(given, StateDictOptions())
        frame = frame.f_back
    return None


def keeps_on_rank0_only(options: StateDictOptions) -> bool:
    """Return whether torch keeps the values on rank 0 only, as it does with full states in host memory."""
    return options.full_state_dict and options.cpu_offload and dist.is_initialized()


def full_for_getter(value: Any, options: StateDictOptions) -> Any:
    """Gather one value of a state dict; every rank calls it.

    Args:
        value: A part, or anything else, which is returned unchanged.
        options: The getter's options.

    Returns:
        The full tensor; on ranks where torch drops it, a part without elements.
    """
    if not isinstance(value, (ShardTensor, UnsplitTensor)):
        return value
    full = value.full_tensor()
    if keeps_on_rank0_only(options) and dist.get_rank() > 0:
        return empty_part_of(value)
    return full.cpu() if options.cpu_offload else full


def empty_part_of(tensor: torch.Tensor) -> ShardTensor:
    """Return a part of ``tensor`` without elements."""
    return ShardTensor.of(tensor.shape, 0, torch.empty(0, dtype=tensor.dtype))
