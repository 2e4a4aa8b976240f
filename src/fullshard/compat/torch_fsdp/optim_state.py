"""Optimizer state dicts of sharded models: FSDP1's functions."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from fullshard.compat.torch_fsdp.api import OptimStateKeyType, StateDictType, get_state_dict_type
from fullshard.compat.torch_fsdp.optim_load import Source, state_to_load
from fullshard.compat.torch_fsdp.optim_save import OptimState, StateDict, group_options
from fullshard.engine import plain_name
from fullshard.errors import CheckpointError

OptimInput = list[dict[str, Any]] | Iterable[nn.Parameter] | None


def optim_state_dict(
    model: nn.Module, optim: Optimizer, optim_state_dict: StateDict | None = None, group: Any = None
) -> StateDict:
    """Return the optimizer's state by parameter name; every rank calls it. ``set_state_dict_type`` sets the kind.

    Args:
        model: The wrapped or sharded model.
        optim: The optimizer of its parameters.
        optim_state_dict: What ``optim.state_dict()`` returned, to be used instead of the current state.
        group: The model's process group; not needed.

    Returns:
        ``{"state": {name: {key: value}}, "param_groups": [{..., "params": [names]}]}``. FULL: the state of an unsharded
        optimizer, on every rank, or with ``rank0_only`` on rank 0 (``{}`` on others); SHARDED: this rank's part of each
        tensor as :class:`ShardTensor`; LOCAL: this rank's part as a plain tensor. Scalars, such as ``step``, are the
        same in all three. Values are in host memory with ``offload_to_cpu``, the default except for LOCAL.

    Raises:
        CheckpointError: A state tensor whose place in the full state is unknown, or a parameter that is not the
            model's.
        ProcessGroupError: ``group`` is not the model's.
    """
    settings = get_state_dict_type(model)
    config = settings.optim_state_dict_config
    state = OptimState(model, optim, optim_state_dict, group, to_host=config.offload_to_cpu)
    if settings.state_dict_type is StateDictType.FULL_STATE_DICT:
        return state.full(rank0_only=getattr(config, "rank0_only", False))
    return state.sharded() if settings.state_dict_type is StateDictType.SHARDED_STATE_DICT else state.local()


def full_optim_state_dict(
    model: nn.Module,
    optim: Optimizer,
    optim_input: OptimInput = None,
    rank0_only: bool = True,  # noqa: FBT001, FBT002 (torch's signature)
    group: Any = None,
) -> StateDict:
    """Return the full :func:`optim_state_dict` in host memory; every rank calls it. ``optim_input`` is not needed."""
    _not_needed(optim_input)
    return OptimState(model, optim, None, group, to_host=True).full(rank0_only=rank0_only)


def sharded_optim_state_dict(model: nn.Module, optim: Optimizer, group: Any = None) -> StateDict:
    """Return the sharded :func:`optim_state_dict` in host memory; every rank calls it."""
    return OptimState(model, optim, None, group, to_host=True).sharded()


def optim_state_dict_to_load(
    model: nn.Module,
    optim: Optimizer,
    optim_state_dict: StateDict,
    is_named_optimizer: bool = False,  # noqa: FBT001, FBT002 (torch's signature)
    load_directly: bool = False,  # noqa: FBT001, FBT002
    group: Any = None,
) -> StateDict:
    """Convert what :func:`optim_state_dict` returned to what ``optim.load_state_dict`` takes; every rank calls it.

    It may come from any number of ranks. A full state dict must be on every rank, or with ``rank0_only`` on rank 0.
    A parameter keeps its place in the groups of ``optim``, and gets the options it was saved with.

    Args:
        model: The wrapped or sharded model.
        optim: The optimizer of its parameters.
        optim_state_dict: Full, sharded or local, by names of the unwrapped model; a tied parameter may have any of its
            names.
        is_named_optimizer: Whether the keys of ``optim.state_dict()`` are parameter names.
        load_directly: Also load the result into ``optim``.
        group: The model's process group; not needed.

    Returns:
        ``{"state": {number: {key: this rank's rows}}, "param_groups": [...]}``.

    Raises:
        CheckpointError: Names or shapes do not match; raised on every rank.
        ProcessGroupError: ``group`` is not the model's.
    """
    settings = get_state_dict_type(model)
    source: Source = "local" if settings.state_dict_type is StateDictType.LOCAL_STATE_DICT else "own"
    if getattr(settings.optim_state_dict_config, "rank0_only", False):
        source = "rank 0"
    result = state_to_load(model, optim, optim.param_groups, optim_state_dict, source, group)
    if is_named_optimizer:
        result = rekey_optim_state_dict(result, OptimStateKeyType.PARAM_NAME, model, optim=optim)
    if load_directly:
        optim.load_state_dict(result)
    return result


def shard_full_optim_state_dict(
    full_optim_state_dict: StateDict, model: nn.Module, optim_input: OptimInput = None, optim: Optimizer | None = None
) -> StateDict:
    """Convert a full state dict that every rank has, as :func:`optim_state_dict_to_load` does.

    Without ``optim`` the result is for an optimizer created from ``optim_input``, default ``model.parameters()``.
    """
    return state_to_load(model, optim, _groups(model, optim_input, optim), full_optim_state_dict, "own")


def flatten_sharded_optim_state_dict(
    sharded_optim_state_dict: StateDict, model: nn.Module, optim: Optimizer
) -> StateDict:
    """Convert what :func:`sharded_optim_state_dict` returned, as :func:`optim_state_dict_to_load` does."""
    return state_to_load(model, optim, optim.param_groups, sharded_optim_state_dict, "own")


def scatter_full_optim_state_dict(
    full_optim_state_dict: StateDict | None,
    model: nn.Module,
    optim_input: OptimInput = None,
    optim: Optimizer | None = None,
    group: Any = None,
) -> StateDict:
    """Convert a full state dict of rank 0 as :func:`shard_full_optim_state_dict` does; other ranks' is ignored."""
    groups = _groups(model, optim_input, optim)
    return state_to_load(model, optim, groups, full_optim_state_dict or {}, "rank 0", group)


def rekey_optim_state_dict(
    optim_state_dict: StateDict,
    optim_state_key_type: OptimStateKeyType,
    model: nn.Module,
    optim_input: OptimInput = None,
    optim: Optimizer | None = None,
) -> StateDict:
    """Return the state dict with names instead of numbers as keys, or the reverse; no communication.

    To load the state of an unsharded optimizer into a sharded one, convert it to names and call
    ``shard_full_optim_state_dict``. For the reverse, convert a full one to numbers and call ``load_state_dict``.

    Args:
        optim_state_dict: With either kind of keys; returned unchanged if they already are of the requested kind.
        optim_state_key_type: The requested kind.
        model: The model that defines names and order, sharded or not.
        optim_input: What the optimizer was created from; None: ``model.parameters()``.
        optim: The optimizer; if given it defines the order.

    Raises:
        CheckpointError: Keys are names and numbers mixed, or one is not the model's.
    """
    groups = optim_state_dict["param_groups"]
    kinds = {type(key) for group in groups for key in group["params"]} | {
        type(key) for key in optim_state_dict["state"]
    }
    if len(kinds) > 1 or not kinds <= {str, int}:
        raise CheckpointError(f"Keys of an optimizer state dict must be all names or all numbers; got {kinds}.")
    if kinds <= {str if optim_state_key_type is OptimStateKeyType.PARAM_NAME else int}:
        return optim_state_dict
    named = [(plain_name(name), id(p)) for name, p in model.named_parameters(remove_duplicate=False)]
    params = (param for group in _groups(model, optim_input, optim) for param in group["params"])
    numbers = {id(param): number for number, param in enumerate(params)}
    pairs = [(name, numbers[identity]) for name, identity in named if identity in numbers]
    if optim_state_key_type is OptimStateKeyType.PARAM_NAME:
        new: dict[Any, Any] = {number: name for name, number in reversed(pairs)}  # the first of tied names
    else:
        new = dict(pairs)
    unknown = [key for group in groups for key in group["params"] if key not in new]
    if unknown:
        raise CheckpointError(f"{type(model).__name__} and its optimizer have no parameters {unknown[:5]}.")
    return {
        "state": {new[key]: value for key, value in optim_state_dict["state"].items()},
        "param_groups": [
            {**group_options(group), "params": sorted(new[key] for key in group["params"])} for group in groups
        ],
    }


def _groups(model: nn.Module, optim_input: OptimInput, optim: Optimizer | None) -> list[dict[str, Any]]:
    """Return the parameter groups of ``optim``, or of an optimizer created from ``optim_input``."""
    _not_needed(optim_input)
    if optim is not None:
        return optim.param_groups
    given = list(model.parameters() if optim_input is None else optim_input)
    if any(isinstance(one, dict) for one in given):
        return [{**one, "params": list(one["params"])} for one in given]  # type: ignore[index]
    return [{"params": given}]


def _not_needed(optim_input: OptimInput) -> None:
    if optim_input is not None:
        warnings.warn(
            "The `optim_input` argument is deprecated, as in torch: pass optim=, with which it has no effect.",
            FutureWarning,
            stacklevel=3,
        )
