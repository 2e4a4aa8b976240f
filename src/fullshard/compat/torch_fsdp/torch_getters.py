"""Support for torch's getters and setters of state dicts (``torch.distributed.checkpoint.state_dict``).

They make full tensors of each ``ShardedTensor`` and ``DTensor`` that a ``state_dict()`` contains. Our shards are runs
of rows or elements of unequal size, which neither class can describe: both are gathered as equal chunks. So the two
functions by which all getters and setters ask for a state dict, and make a full one of it, are wrapped here.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist

from fullshard.core.torch_private import wrap_state_getters
from fullshard.state.saving.shard_tensor import ShardTensor, UnsplitTensor

_asking: ContextVar[bool] = ContextVar("asking", default=False)


def getter_asks() -> bool:
    """Return whether one of torch's getters or setters is calling ``state_dict()`` or ``load_state_dict()``."""
    return _asking.get()


def _asked_by_getter(ask: Callable[..., Callable[..., Any]]) -> Callable[..., Callable[..., Any]]:
    def function_of(owner: Any, api: str) -> Callable[..., Any]:
        function = ask(owner, api)

        def call(*args: Any, **kwargs: Any) -> Any:
            before = _asking.set(True)
            try:
                return function(*args, **kwargs)
            finally:
                _asking.reset(before)

        return call

    return function_of


def _with_full_tensors(finish: Callable[..., Any]) -> Callable[..., Any]:
    def finished(state_dict: Any, info: Any) -> Any:
        if info.full_state_dict:
            # torch keeps full states in host memory on rank 0 only.
            dropped = info.cpu_offload and dist.is_initialized() and dist.get_rank() > 0
            state_dict = _full(state_dict, torch.device("cpu") if info.cpu_offload else None, dropped=dropped)
        return finish(state_dict, info)

    return finished


def _full(value: Any, device: torch.device | None, *, dropped: bool) -> Any:
    """Return ``value`` with full tensors, on ``device``, in place of parts; every rank calls it."""
    if isinstance(value, dict):
        # Sorted, so that every rank gathers in the same order, whatever the order of an optimizer's first steps.
        full = {key: _full(value[key], device, dropped=dropped) for key in sorted(value, key=str)}
        return type(value)((key, full[key]) for key in value)
    if not isinstance(value, (ShardTensor, UnsplitTensor)):
        return value
    full = value.full_tensor()
    if dropped:
        return full.new_empty(0)
    return full if device is None else full.to(device)


wrap_state_getters(_asked_by_getter, _with_full_tensors)
