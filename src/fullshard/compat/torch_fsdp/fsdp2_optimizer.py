"""Optimizer states of FSDP2 modules as ``torch.distributed.checkpoint`` needs them: parts that know their place.

Of DTensor parameters an optimizer's state is DTensors. Here it is this rank's rows, which torch's checkpoints would
take for whole tensors, the same on every rank, and keep one rank's. So once an optimizer has stepped on such
parameters, its ``state_dict()`` gives a :class:`ShardTensor` for each of those, and its ``load_state_dict()`` takes
them. Of FSDP1's it gives rows, as torch's, and torch's getters, which do not know our wrapper, are refused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from fullshard.comm import Comm
from fullshard.compat.torch_fsdp.torch_getters import GETTERS, asking_getter, whole_on_this_rank
from fullshard.errors import ShardingError
from fullshard.optim.walk import has_shape_here, part_of_saved, part_of_state
from fullshard.saving.optimizer_state import cut
from fullshard.saving.shard_tensor import ShardTensor, state_as_part

_MARK = "_fullshard_in_fsdp2"
_WRAPPED_MARK = "_fullshard_in_fsdp1"
_SEEN = "_fullshard_described"
_registered: list[object] = []


def describe_state_of(param: nn.Parameter) -> None:
    """Have optimizers describe their state of ``param``, a shard."""
    _mark(param, _MARK)


def guard_state_of(param: nn.Parameter) -> None:
    """Have torch's getters refused for the state of ``param``, a shard inside FSDP1's wrapper."""
    _mark(param, _WRAPPED_MARK)


def _mark(param: nn.Parameter, mark: str) -> None:
    setattr(param, mark, True)
    if not _registered:
        _registered.append(register_optimizer_step_post_hook(_after_step))


def _after_step(optimizer: Optimizer, _args: object, _kwargs: object) -> None:
    """Look once at each optimizer of the process: there is no state before its first step."""
    if _SEEN in optimizer.__dict__:
        return
    optimizer.__dict__[_SEEN] = True
    if any(hasattr(param, _MARK) for param in _params(optimizer)):
        optimizer.register_state_dict_post_hook(_with_places)
        optimizer.register_load_state_dict_pre_hook(_without_places)
    if any(hasattr(param, _WRAPPED_MARK) for param in _params(optimizer)):
        optimizer.register_state_dict_pre_hook(_refuse_getters)


def _refuse_getters(_optimizer: Optimizer) -> None:
    """Torch's getters would take this rank's rows for whole tensors, and a checkpoint keep one rank's.

    Raises:
        ShardingError: One of them asks.
    """
    if asking_getter() is not None:
        raise ShardingError(
            f"{GETTERS} does not know fullshard's FullyShardedDataParallel: it would save one rank's rows of the "
            "optimizer's state as if they were all. Use FSDP.optim_state_dict(model, optimizer) and "
            "FSDP.optim_state_dict_to_load, or shard with fully_shard, whose state it knows."
        )


def _params(optimizer: Optimizer) -> list[nn.Parameter]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _with_places(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    params = _params(optimizer)
    state = {number: _described(optimizer, params[number], values) for number, values in state_dict["state"].items()}
    getter = asking_getter()
    if getter is not None and getter.full_state_dict:
        # Every rank gathers in the same order, whichever order its steps had.
        for number, values in sorted(state.items()):
            state[number] = {key: whole_on_this_rank(values[key], getter) for key in sorted(values)}
    return state_dict | {"state": state}


def _described(optimizer: Optimizer, param: nn.Parameter, values: dict[str, Any]) -> dict[str, Any]:
    meta = getattr(param, "shard_meta", None)
    if meta is None or not hasattr(param, _MARK):
        return values
    parts = {key: part_of_state(optimizer, param, key, value, meta.name) for key, value in values.items()}
    comm: Comm = param.shard_comm  # type: ignore[attr-defined]
    return {
        key: value if (part := parts[key]) is None else state_as_part(part, value, comm)
        for key, value in values.items()
    }


def _without_places(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    # As torch matches them: by their order, whatever they are called in what was saved.
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
    """What this rank holds of a part, or of a whole tensor.

    Raises:
        ShardingError: It is another part.
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
