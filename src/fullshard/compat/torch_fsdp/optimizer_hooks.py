"""State-dict hooks of optimizers of sharded models, for ``torch.distributed.checkpoint``.

In torch's FSDP2 optimizer state consists of DTensors. Here it is tensors of this rank's rows. torch's checkpoints would
treat these as full tensors that are equal on all ranks, and save those of one rank. So after its first step on
parameters of FSDP2 modules an optimizer's ``state_dict()`` contains :class:`ShardTensor` values, which its
``load_state_dict()`` accepts. On parameters of FSDP1 wrappers it contains this rank's rows, as in torch, but
torch's getters get :class:`ShardTensor` values there too.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from fullshard.compat.torch_fsdp.tensor import place_like
from fullshard.core.optim.shards import comm_of, everyone_of
from fullshard.core.optim.walk import has_shape_here, part_of_saved, part_of_state
from fullshard.core.shards import STATE_ON_ALL_RANKS
from fullshard.core.torch_private import wrap_state_getters
from fullshard.state.saving.optimizer_state import cut
from fullshard.state.saving.shard_tensor import ShardTensor, UnsplitTensor, state_as_part

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


_FSDP1 = "_fullshard_in_fsdp1"
_HOOKED = "_fullshard_described"
_registered: list[object] = []


def describe_state_of(param: nn.Parameter) -> None:
    """Make state dicts of optimizers contain the place of their state of ``param``, a shard."""
    setattr(param, STATE_ON_ALL_RANKS, True)
    if not _registered:
        _registered.append(register_optimizer_step_post_hook(_after_step))


def describe_state_for_getters(param: nn.Parameter) -> None:
    """Make state dicts that torch's getters request contain the place of the state of ``param``, in FSDP1's wrapper."""
    setattr(param, _FSDP1, True)
    describe_state_of(param)


def _after_step(optimizer: Optimizer, _args: object, _kwargs: object) -> None:
    """Register the state-dict hooks of an optimizer after its first step: before it there is no state."""
    if _HOOKED in optimizer.__dict__:
        return
    optimizer.__dict__[_HOOKED] = True
    if any(hasattr(param, STATE_ON_ALL_RANKS) for param in _params(optimizer)):
        optimizer.register_state_dict_post_hook(_state_with_places)
        optimizer.register_load_state_dict_pre_hook(_state_of_this_rank)


def _params(optimizer: Optimizer) -> list[nn.Parameter]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _state_with_places(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    params = _params(optimizer)
    state = {
        number: values
        if not getter_asks() and hasattr(params[number], _FSDP1)
        else _described(optimizer, params[number], values)
        for number, values in state_dict["state"].items()
    }
    return state_dict | {"state": state}


def _described(optimizer: Optimizer, param: nn.Parameter, values: dict[str, Any]) -> dict[str, Any]:
    meta = getattr(param, "shard_meta", None)
    if meta is None or not hasattr(param, STATE_ON_ALL_RANKS):
        return values
    parts = {key: part_of_state(optimizer, param, key, value, meta.name) for key, value in values.items()}
    comm = everyone_of(param) if meta.block is not None else comm_of(param)
    return {
        key: value if (part := parts[key]) is None else place_like(state_as_part(part, value, comm), param, part.held)
        for key, value in values.items()
    }


def _state_of_this_rank(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    # By position, as in torch, whatever the keys in the saved state.
    saved = [key for group in state_dict["param_groups"] for key in group["params"]]
    params = dict(zip(saved, _params(optimizer), strict=False))
    state = {
        key: {name: _held(optimizer, params[key], name, value) for name, value in values.items()}
        if key in params
        else values
        for key, values in state_dict["state"].items()
    }
    return state_dict | {"state": state}


def _held(optimizer: Optimizer, param: nn.Parameter, key: str, value: Any) -> Any:
    """Return the elements that this rank holds of a part or of a full tensor.

    Raises:
        ShardingError: The part does not contain them.
    """
    meta = getattr(param, "shard_meta", None)
    if meta is None or not isinstance(value, torch.Tensor) or key == "step":
        return value
    if not isinstance(value, ShardTensor) and has_shape_here(optimizer, param, key, value.shape):
        return value.as_subclass(torch.Tensor)
    part = part_of_saved(optimizer, param, key, value.shape, meta.name)
    if part is None or not isinstance(value, ShardTensor):
        return value if part is None else cut(value, part)
    held = value.elements(f"{key} of {meta.name}", part.held, comm_of(param), part.block)
    return held.view(part.local_shape)
