"""State-dict hooks of optimizers of sharded models, for ``torch.distributed.checkpoint``.

In torch's FSDP2 optimizer state consists of DTensors. Here it is plain tensors of this rank's rows. torch's checkpoints
would treat these as full tensors that are equal on all ranks, and save those of one rank. So after its first step on
parameters of FSDP2 modules an optimizer's ``state_dict()`` contains :class:`ShardTensor` values, which its
``load_state_dict()`` accepts. On parameters of FSDP1 wrappers it contains this rank's rows, as in torch, and torch's
getters, which do not know our wrapper, raise an error.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from fullshard.comm import Comm
from fullshard.compat.torch_fsdp.torch_getters import GETTERS, asking_getter, full_for_getter
from fullshard.errors import ShardingError
from fullshard.optim.walk import has_shape_here, part_of_saved, part_of_state
from fullshard.saving.optimizer_state import cut
from fullshard.saving.shard_tensor import ShardTensor, state_as_part

_FSDP2 = "_fullshard_in_fsdp2"
_FSDP1 = "_fullshard_in_fsdp1"
_HOOKED = "_fullshard_described"
_registered: list[object] = []


def describe_state_of(param: nn.Parameter) -> None:
    """Make state dicts of optimizers contain the place of their state of ``param``, a shard."""
    _mark(param, _FSDP2)


def guard_state_of(param: nn.Parameter) -> None:
    """Make torch's getters raise an error for the state of ``param``, a shard inside FSDP1's wrapper."""
    _mark(param, _FSDP1)


def _mark(param: nn.Parameter, mark: str) -> None:
    setattr(param, mark, True)
    if not _registered:
        _registered.append(register_optimizer_step_post_hook(_after_step))


def _after_step(optimizer: Optimizer, _args: object, _kwargs: object) -> None:
    """Register the state-dict hooks of an optimizer after its first step: before it there is no state."""
    if _HOOKED in optimizer.__dict__:
        return
    optimizer.__dict__[_HOOKED] = True
    if any(hasattr(param, _FSDP2) for param in _params(optimizer)):
        optimizer.register_state_dict_post_hook(_state_with_places)
        optimizer.register_load_state_dict_pre_hook(_state_of_this_rank)
    if any(hasattr(param, _FSDP1) for param in _params(optimizer)):
        optimizer.register_state_dict_pre_hook(_refuse_getters)


def _refuse_getters(_optimizer: Optimizer) -> None:
    """Raise if one of torch's getters calls: it would treat this rank's rows as full tensors.

    Raises:
        ShardingError: One of them calls.
    """
    if asking_getter() is not None:
        raise ShardingError(
            f"{GETTERS} does not support fullshard's FullyShardedDataParallel: it would save one rank's rows as the "
            "full optimizer state. Use FSDP.optim_state_dict(model, optimizer) and FSDP.optim_state_dict_to_load, or "
            "shard with fully_shard, which it supports."
        )


def _params(optimizer: Optimizer) -> list[nn.Parameter]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _state_with_places(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    params = _params(optimizer)
    state = {number: _described(optimizer, params[number], values) for number, values in state_dict["state"].items()}
    getter = asking_getter()
    if getter is not None and getter.full_state_dict:
        # Sorted, so that every rank gathers in the same order, whatever the order of its first steps.
        for number, values in sorted(state.items()):
            state[number] = {key: full_for_getter(values[key], getter) for key in sorted(values)}
    return state_dict | {"state": state}


def _described(optimizer: Optimizer, param: nn.Parameter, values: dict[str, Any]) -> dict[str, Any]:
    meta = getattr(param, "shard_meta", None)
    if meta is None or not hasattr(param, _FSDP2):
        return values
    parts = {key: part_of_state(optimizer, param, key, value, meta.name) for key, value in values.items()}
    comm: Comm = param.shard_comm  # type: ignore[attr-defined]
    return {
        key: value if (part := parts[key]) is None else state_as_part(part, value, comm)
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
    return value.elements(f"{key} of {meta.name}", part.held).view(part.local_shape)
