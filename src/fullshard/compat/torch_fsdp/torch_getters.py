"""What torch's ``get_model_state_dict`` and ``get_optimizer_state_dict`` want of the state dict that they ask for.

With ``StateDictOptions(full_state_dict=True)`` they ask for ``state_dict()`` and gather what is a ``ShardedTensor`` or
a ``DTensor``. A shard is a run of rows or elements, uneven over ranks, which neither can say: both are put together by
even chunks. Plain tensors they keep as they are. So a state dict that such a getter asks for has whole tensors at once,
as torch's own FSDP1 gives it then; the getter's options stand on the call stack, and where they do not (a later torch),
it gets parts, which are refused as soon as they are used.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions

from fullshard.saving.shard_tensor import ShardTensor, WholeTensor

GETTERS = "torch.distributed.checkpoint.state_dict"


def asking_getter() -> StateDictOptions | None:
    """The options of torch's function that asks for this state dict; None where somebody else asks."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == GETTERS:
            given = (value for value in frame.f_locals.values() if isinstance(value, StateDictOptions))
            return next(given, StateDictOptions())
        frame = frame.f_back
    return None


def keeps_on_rank0_only(options: StateDictOptions) -> bool:
    """Whether torch keeps what it is given on the first rank only: full states in host memory."""
    return options.full_state_dict and options.cpu_offload and dist.is_initialized()


def whole_on_this_rank(value: Any, options: StateDictOptions) -> Any:
    """A part as the whole, gathered by every rank; where torch drops it, a part without elements.

    Args:
        value: One value of a state dict; what is no part stays.
        options: Who asks.
    """
    if not isinstance(value, (ShardTensor, WholeTensor)):
        return value
    whole = value.full_tensor()
    if keeps_on_rank0_only(options) and dist.get_rank() > 0:
        return nothing_of(value)
    return whole.cpu() if options.cpu_offload else whole


def nothing_of(tensor: torch.Tensor) -> ShardTensor:
    """A part of ``tensor`` without elements."""
    return ShardTensor.of(tensor.shape, 0, torch.empty(0, dtype=tensor.dtype))
