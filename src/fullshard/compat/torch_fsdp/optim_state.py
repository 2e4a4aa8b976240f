"""Optimizer state dicts of sharded models: keys are parameter names, values the unsharded state."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from fullshard.compat.torch_fsdp.api import OptimStateKeyType, StateDictType
from fullshard.compat.torch_fsdp.optim_in import Source, state_to_load
from fullshard.compat.torch_fsdp.optim_out import StateDict, StateOut, group_options
from fullshard.compat.torch_fsdp.state_dict_type import get_state_dict_type
from fullshard.engine import plain_name
from fullshard.errors import CheckpointError

OptimInput = list[dict[str, Any]] | Iterable[nn.Parameter] | None


def optim_state_dict(
    model: nn.Module, optim: Optimizer, optim_state_dict: StateDict | None = None, group: Any = None
) -> StateDict:
    """The optimizer's state by parameter name, of the kind that ``set_state_dict_type`` chose; every rank calls it.

    Args:
        model: The wrapped or sharded model.
        optim: Over its parameters.
        optim_state_dict: What ``optim.state_dict()`` gave, to be used in place of the state now.
        group: The model's process group; it knows it already.

    Returns:
        ``{"state": {name: {key: value}}, "param_groups": [{..., "params": [names]}]}``. FULL: what an unsharded
        optimizer would have, on every rank, or on rank 0 with ``rank0_only`` (``{}`` elsewhere); SHARDED: this rank's
        part of each tensor as :class:`ShardTensor`; LOCAL: the part alone. Numbers, such as ``step``, are whole in
        each. In host memory with ``offload_to_cpu``, which is the default but for LOCAL.

    Raises:
        CheckpointError: State of which it is not known what part it is, or a parameter that is not the model's.
        ProcessGroupError: ``group`` is another one.
    """
    settings = get_state_dict_type(model)
    config = settings.optim_state_dict_config
    out = StateOut(model, optim, optim_state_dict, group, to_host=config.offload_to_cpu)
    if settings.state_dict_type is StateDictType.FULL_STATE_DICT:
        return out.full(rank0_only=getattr(config, "rank0_only", False))
    return out.sharded() if settings.state_dict_type is StateDictType.SHARDED_STATE_DICT else out.local()


def full_optim_state_dict(
    model: nn.Module,
    optim: Optimizer,
    optim_input: OptimInput = None,
    rank0_only: bool = True,  # noqa: FBT001, FBT002 (torch's signature)
    group: Any = None,
) -> StateDict:
    """:func:`optim_state_dict` of the full kind, in host memory; every rank calls it. ``optim_input`` is not needed."""
    _not_needed(optim_input)
    return StateOut(model, optim, None, group, to_host=True).full(rank0_only=rank0_only)


def sharded_optim_state_dict(model: nn.Module, optim: Optimizer, group: Any = None) -> StateDict:
    """:func:`optim_state_dict` of the sharded kind, in host memory; every rank calls it."""
    return StateOut(model, optim, None, group, to_host=True).sharded()


def optim_state_dict_to_load(
    model: nn.Module,
    optim: Optimizer,
    optim_state_dict: StateDict,
    is_named_optimizer: bool = False,  # noqa: FBT001, FBT002 (torch's signature)
    load_directly: bool = False,  # noqa: FBT001, FBT002
    group: Any = None,
) -> StateDict:
    """Cut what :func:`optim_state_dict` gave, on any number of ranks, to what ``optim.load_state_dict`` takes here.

    Every rank calls it. What a full state dict holds comes from this rank's own, or under ``rank0_only`` from rank 0's.
    A parameter keeps its place in the optimizer's groups here, and gets the options it was saved with.

    Args:
        model: The wrapped or sharded model.
        optim: Over its parameters.
        optim_state_dict: Full, sharded or local; names of the unwrapped model, a tied parameter under any of them.
        is_named_optimizer: Whether ``optim`` numbers parameters by name.
        load_directly: Whether ``optim`` loads it at once.
        group: The model's process group; it knows it already.

    Returns:
        ``{"state": {number: {key: this rank's rows}}, "param_groups": [...]}``.

    Raises:
        CheckpointError: Names or shapes do not fit; on every rank.
        ProcessGroupError: ``group`` is another one.
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
    """:func:`optim_state_dict_to_load` of a full state dict that every rank has.

    Without ``optim``, for an optimizer over ``optim_input``, or over ``model.parameters()``.
    """
    return state_to_load(model, optim, _groups(model, optim_input, optim), full_optim_state_dict, "own")


def flatten_sharded_optim_state_dict(
    sharded_optim_state_dict: StateDict, model: nn.Module, optim: Optimizer
) -> StateDict:
    """:func:`optim_state_dict_to_load` of what :func:`sharded_optim_state_dict` gave."""
    return state_to_load(model, optim, optim.param_groups, sharded_optim_state_dict, "own")


def scatter_full_optim_state_dict(
    full_optim_state_dict: StateDict | None,
    model: nn.Module,
    optim_input: OptimInput = None,
    optim: Optimizer | None = None,
    group: Any = None,
) -> StateDict:
    """:func:`shard_full_optim_state_dict` of a state dict that rank 0 has; that of other ranks is not looked at."""
    groups = _groups(model, optim_input, optim)
    return state_to_load(model, optim, groups, full_optim_state_dict or {}, "rank 0", group)


def rekey_optim_state_dict(
    optim_state_dict: StateDict,
    optim_state_key_type: OptimStateKeyType,
    model: nn.Module,
    optim_input: OptimInput = None,
    optim: Optimizer | None = None,
) -> StateDict:
    """The same state dict with names for numbers, or numbers for names; no communication.

    So the state of an unsharded optimizer goes into a sharded one (names, then ``shard_full_optim_state_dict``), and a
    full one into an unsharded one (numbers, then ``load_state_dict``).

    Args:
        optim_state_dict: With either; one that has the wanted ones already is returned as it is.
        optim_state_key_type: What is wanted.
        model: Whose names and order count, sharded or not.
        optim_input: What the optimizer was made from; None: ``model.parameters()``.
        optim: The optimizer, whose order counts then.

    Raises:
        CheckpointError: Some keys are names and some numbers, or one is not the model's.
    """
    groups = optim_state_dict["param_groups"]
    kinds = {type(key) for group in groups for key in group["params"]} | {
        type(key) for key in optim_state_dict["state"]
    }
    if len(kinds) > 1 or not kinds <= {str, int}:
        raise CheckpointError(f"Keys of an optimizer state dict are all names or all numbers; got {kinds}.")
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
    """Parameters in the order of an optimizer, which is there or was made from ``optim_input``."""
    if optim is not None:
        _not_needed(optim_input)
        return optim.param_groups
    given = list(model.parameters() if optim_input is None else optim_input)
    if any(isinstance(one, dict) for one in given):
        return [{**one, "params": list(one["params"])} for one in given]  # type: ignore[index]
    return [{"params": given}]


def _not_needed(optim_input: OptimInput) -> None:
    if optim_input is not None:
        warnings.warn("optim_input is not needed beside the optimizer; leave it out.", FutureWarning, stacklevel=3)
