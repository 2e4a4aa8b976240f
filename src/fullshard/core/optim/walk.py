"""Iteration over an optimizer's state by parameter, for every kind of optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fullshard.core.layout import StatePart, elementwise
from fullshard.core.optim.in_backward import StepInBackward
from fullshard.core.optim.shards import meta_of
from fullshard.core.shards import on_rows
from fullshard.errors import CheckpointError


def parameter_states(
    optimizer: Optimizer | StepInBackward,
) -> list[tuple[nn.Parameter, dict[str, Any], dict[str, Any]]]:
    """Return each parameter that the optimizer steps, with its state and its group; any rank, no communication.

    Only a rank that holds elements of a parameter has its state: a shard without elements never gets a gradient, so its
    ``step``, if it has one at all, is not counted.

    Args:
        optimizer: A torch optimizer, or the result of :func:`step_in_backward`, which has parameters only where this
            rank holds rows of them.

    Returns:
        ``(parameter, state, group)`` in the order of the groups. State and group are the optimizer's own objects. A
        parameter without state, as all are before the first step, gets an empty one that is the optimizer's too.
    """
    return [
        (param, part.state[param], group)
        for part in _parts(optimizer)
        for group in part.param_groups
        for param in group["params"]
    ]


@on_rows
def load_parameter_states(
    optimizer: Optimizer | StepInBackward, loaded: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]
) -> None:
    """Load states and hyperparameters through the optimizer's own ``load_state_dict``; any rank, no communication.

    As there, tensors move to the parameter's device, and floating-point ones except ``step`` to its dtype, unless the
    optimizer overrides that method (Adafactor's statistics stay float32); tensors that need neither are not copied.

    Args:
        optimizer: A torch optimizer, or the result of :func:`step_in_backward`.
        loaded: For each entry of :func:`parameter_states`, in its order, the new state of the parameter (this rank's
            elements) and the group's hyperparameters to change, the same for all parameters of a group.
    """
    given = iter(loaded)
    for part in _parts(optimizer):
        state: dict[int, Any] = {}
        groups: list[dict[str, Any]] = []
        numbers = count()
        for group in part.param_groups:
            new = {**group, "params": [next(numbers) for _ in group["params"]]}
            for number in new["params"]:
                of_param, values = next(given)
                new |= values
                if of_param:
                    state[number] = dict(of_param)
            groups.append(new)
        part.load_state_dict({"state": state, "param_groups": groups})


@on_rows
def local_state_key_is_elementwise(param: nn.Parameter, key: str, value: Any) -> bool:
    """Return whether a value of a parameter's state has one element for each of this rank's elements.

    Args:
        param: This rank's shard.
        key: Name of the value in the state.
        value: The value; ``step``, a count of steps, belongs to the full parameter even if that has one element.
    """
    return isinstance(value, torch.Tensor) and value.shape == param.shape and (value.ndim > 0 or key != "step")


@on_rows
def part_of_state(
    optimizer: Optimizer | StepInBackward | None, param: nn.Parameter, key: str, value: Any, name: str
) -> StatePart | None:
    """Return which part of the unsharded optimizer's state a value of this rank's state is; no communication.

    Args:
        optimizer: The optimizer. One with a method ``state_part(param, key) -> StatePart | None`` describes its tensors
            itself; None for those that have the parameter's shape, and for plain values.
        param: This rank's shard, of which it holds elements.
        key: Name of the value in the state.
        value: The value.
        name: The parameter's name, for messages.

    Returns:
        None for one number and for what is not a tensor, which are the same on every rank with elements.

    Raises:
        CheckpointError: The tensor has another shape than the part, so it is unknown what it is a part of.
    """
    if not isinstance(value, torch.Tensor):
        return None
    part = _said(optimizer, param, key)
    if part is None and local_state_key_is_elementwise(param, key, value):
        part = elementwise(meta_of(param))
    if part is None and value.ndim == 0:
        return None
    if part is None or tuple(value.shape) != part.local_shape:
        known = (
            f"the {tuple(param.shape)} of this rank's shard"
            if part is None
            else f"{part.local_shape}, this rank's part"
        )
        raise CheckpointError(
            "Optimizer state can be sharded if it is one number, has the parameter's shape, or the optimizer "
            f"describes its parts; {key!r} of {name} has shape {tuple(value.shape)}, not {known}. Use an optimizer of "
            "fullshard.optim or one with elementwise state, or save the model alone."
        )
    return part


@on_rows
def require_same_kind(
    optimizer: Optimizer | StepInBackward | None,
    entry: tuple[nn.Parameter, Mapping[str, Any], Mapping[str, Any]],
    options: Mapping[str, Any],
    saved: Mapping[str, Any],
    name: str,
) -> dict[str, torch.Tensor]:
    """Refuse state and hyperparameters of another class of optimizer, before they are loaded; no communication.

    Args:
        optimizer: The optimizer that would load them. One with a method ``state_kinds(param, group) -> {key: kind}``
            describes which keys the state of a parameter of the group has after a step: a dtype for tensors that must
            have it, a tensor for one that must have these values, None for everything else. For other optimizers only
            the current state is known.
        entry: An entry of :func:`parameter_states`.
        options: The saved hyperparameters, which its group will have; others stay unchanged.
        saved: The saved state by key: values, or dtypes of tensors that are not read yet. None is always accepted.
        name: The parameter's name, for messages.

    Returns:
        By key, the tensors of the optimizer to use in place of saved ones of the same values.

    Raises:
        CheckpointError: They are of another class of optimizer.
    """
    param, state, group = entry
    describing = _with(_of_param(optimizer, param), "state_kinds")
    kinds: dict[str, Any] = {}
    if describing is not None:
        kinds = describing.state_kinds(param, {**group, **options})
        if saved and saved.keys() != kinds.keys():
            raise CheckpointError(_other_keys(name, saved, type(describing).__name__, kinds))
        for key, value in saved.items():
            _require_kind(f"{key} of {name}", value, kinds[key], type(describing).__name__)
    elif saved and state and not (saved.keys() <= state.keys() or state.keys() <= saved.keys()):
        raise CheckpointError(_other_keys(name, saved, "this optimizer", state))
    _require_kinds_of_options(group, options, name)
    return {key: kinds[key] for key in saved if isinstance(kinds.get(key), torch.Tensor)}


def _require_kinds_of_options(group: Mapping[str, Any], options: Mapping[str, Any], name: str) -> None:
    for option, value in options.items():
        now, then = _kind_of_option(group.get(option)), _kind_of_option(value)
        if option not in ("params", "param_names") and None not in (now, then) and now != then:
            raise CheckpointError(
                f"The saved option {option!r} of {name}'s group is a {then}, {value!r}; here it is a {now}, "
                f"{group[option]!r}. Load what an optimizer of the same class has saved."
            )


def _other_keys(name: str, saved: Mapping[str, Any], keeper: str, kept: Mapping[str, Any]) -> str:
    return (
        f"The saved state of {name} has {', '.join(sorted(saved))}; {keeper} keeps {', '.join(sorted(kept))}. It is "
        "another optimizer's: load what one of the same class has saved."
    )


def _require_kind(what: str, value: Any, kind: torch.dtype | torch.Tensor | None, keeper: str) -> None:
    if isinstance(kind, torch.dtype):
        found = value if isinstance(value, torch.dtype) else getattr(value, "dtype", type(value).__name__)
        if found != kind:
            raise CheckpointError(
                f"{keeper} keeps {what} as {kind}; the saved one is {found}. It is of another optimizer or of other "
                f"parameters: load the state of {keeper} for the same model."
            )
    elif isinstance(kind, torch.Tensor) and not isinstance(value, torch.dtype):
        require_same_values(what, value, kind)


def require_same_values(what: str, value: Any, known: torch.Tensor) -> None:
    """Refuse a saved tensor whose values differ from the optimizer's own; any rank, no communication.

    Raises:
        CheckpointError: Its shape differs, or its numbers differ by more than one in a million.
    """
    found = value.detach().to(known.device, known.dtype) if isinstance(value, torch.Tensor) else known.new_empty(0)
    if found.shape != known.shape or not torch.allclose(found, known, rtol=1e-6, atol=0):
        raise CheckpointError(
            f"The saved {what} has other numbers than this optimizer's, so codes that refer to it would have other "
            "values. Load the state of an optimizer of the same class."
        )


def _kind_of_option(value: Any) -> str | None:
    """Return a name for the kind of an option's value; None if any value is accepted."""
    if isinstance(value, (tuple, list)):
        return f"list of {len(value)}"
    if isinstance(value, (bool, int, float, torch.Tensor)):
        return "number"
    return "text" if isinstance(value, str) else None


@on_rows
def has_shape_here(optimizer: Optimizer, param: nn.Parameter, key: str, shape: Sequence[int]) -> bool:
    """Return whether a tensor of this shape can be this rank's part of the parameter's state."""
    part = _said(optimizer, param, key)
    return tuple(shape) == (tuple(param.shape) if part is None else part.local_shape)


@on_rows
def part_of_saved(
    optimizer: Optimizer | StepInBackward | None, param: nn.Parameter, key: str, shape: Sequence[int], name: str
) -> StatePart | None:
    """Return which part of a tensor of the unsharded optimizer's state this rank holds; see :func:`part_of_state`.

    Args:
        optimizer: The optimizer that will load it; None: one that describes nothing.
        param: This rank's shard, possibly without elements.
        key: Name of the tensor in the state.
        shape: Its unsharded shape.
        name: The parameter's name, for messages.

    Returns:
        None for one number.

    Raises:
        CheckpointError: It has another shape than the optimizer's state of this parameter.
    """
    meta, shape = meta_of(param), tuple(shape)
    part = _said(optimizer, param, key)
    if part is None and shape == meta.global_shape and (shape or key != "step"):
        part = elementwise(meta)
    if part is None and not shape:
        return None
    if part is None or part.shape != shape:
        known = "" if part is None else f" and the optimizer's state {part.shape}"
        raise CheckpointError(
            "Optimizer state can be sharded if it is one number, has the parameter's shape, or the optimizer "
            f"describes its parts; {key!r} of {name} has shape {shape} and the parameter {meta.global_shape}{known}. "
            "The state is of other parameters, in another order, or of another optimizer whose state is not "
            "elementwise."
        )
    return part


def _said(optimizer: Optimizer | StepInBackward | None, param: nn.Parameter, key: str) -> StatePart | None:
    describing = _with(_of_param(optimizer, param), "state_part")
    return None if describing is None else describing.state_part(param, key)


def _of_param(optimizer: Optimizer | StepInBackward | None, param: nn.Parameter) -> Optimizer | None:
    return optimizer.of_param.get(param) if isinstance(optimizer, StepInBackward) else optimizer


def _with(optimizer: Any, method: str) -> Any:
    """Return the optimizer, or the one inside it (Accelerate's wrapper), that has ``method``; None if neither has."""
    inside = (optimizer, getattr(optimizer, "optimizer", None))
    return next((one for one in inside if hasattr(one, method)), None)


def _parts(optimizer: Optimizer | StepInBackward) -> list[Optimizer]:
    return list(optimizer.optimizers.values()) if isinstance(optimizer, StepInBackward) else [optimizer]
