"""An optimizer's state parameter by parameter, whichever kind of optimizer it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fullshard.errors import CheckpointError
from fullshard.layout import StatePart, elementwise
from fullshard.optim.in_backward import StepInBackward
from fullshard.optim.shards import meta_of


def parameter_states(
    optimizer: Optimizer | StepInBackward,
) -> list[tuple[nn.Parameter, dict[str, Any], dict[str, Any]]]:
    """Each parameter that the optimizer steps, with its state and its group; any rank, no communication.

    Only a rank that holds elements of a parameter can tell its state: a shard without elements never gets a gradient,
    so that its ``step``, if it has one at all, stands still.

    Args:
        optimizer: torch's, or what :func:`step_in_backward` returned, which has parameters only where this rank holds
            rows of them.

    Returns:
        ``(parameter, state, group)`` in the order of the groups. State and group are the optimizer's own: what is
        changed in them is changed there. A parameter without state, as all are before the first step, gets one that is
        empty and is the optimizer's too.
    """
    return [
        (param, part.state[param], group)
        for part in _parts(optimizer)
        for group in part.param_groups
        for param in group["params"]
    ]


def load_parameter_states(
    optimizer: Optimizer | StepInBackward, loaded: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]
) -> None:
    """Give an optimizer states and hyperparameters through its own ``load_state_dict``; any rank, no communication.

    As there, tensors move to the parameter's device, and floating ones but ``step`` to its dtype, unless that method is
    the optimizer's own (Adafactor's statistics stay float32); one that needs neither is taken over, not copied.

    Args:
        optimizer: torch's, or what :func:`step_in_backward` returned.
        loaded: For each entry of :func:`parameter_states`, in its order, the new state of the parameter, of this rank's
            elements, and the group's hyperparameters to change, the same for all parameters of a group.
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


def local_state_key_is_elementwise(param: nn.Parameter, key: str, value: Any) -> bool:
    """Whether a value of a parameter's state has one element for each of this rank's elements, so is cut as it is.

    Args:
        param: This rank's shard.
        key: Name of the value in the state.
        value: The value; ``step``, a count of steps, is of the whole parameter also where that has one element.
    """
    return isinstance(value, torch.Tensor) and value.shape == param.shape and (value.ndim > 0 or key != "step")


def part_of_state(
    optimizer: Optimizer | StepInBackward | None, param: nn.Parameter, key: str, value: Any, name: str
) -> StatePart | None:
    """Where a value of a parameter's state, as this rank has it, lies in the unsharded optimizer's; no communication.

    Args:
        optimizer: Whose state it is. One with a method ``state_part(param, key) -> StatePart | None`` says itself where
            its tensors lie, and None of those that have the parameter's shape, and of plain values.
        param: This rank's shard, of which it holds elements.
        key: Name of the value in the state.
        value: The value.
        name: The parameter's, for messages.

    Returns:
        None for one number and for what is no tensor, which are the same on every rank with elements.

    Raises:
        CheckpointError: It is a tensor of another shape than the part has, so that nobody knows what it is a part of.
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
            f"the {tuple(param.shape)} of this rank's shard" if part is None else f"{part.local_shape}, its part here"
        )
        raise CheckpointError(
            f"Optimizer state can be cut where it is one number, has the parameter's shape, or the optimizer says "
            f"where it lies; {key!r} of {name} has shape {tuple(value.shape)}, not {known}. Use an optimizer of "
            "fullshard.optim or one whose state is by element, or save the model alone."
        )
    return part


def require_same_kind(
    optimizer: Optimizer | StepInBackward | None,
    entry: tuple[nn.Parameter, Mapping[str, Any], Mapping[str, Any]],
    options: Mapping[str, Any],
    saved: Mapping[str, Any],
    name: str,
) -> dict[str, torch.Tensor]:
    """Refuse state and hyperparameters of another class of optimizers, before they are loaded; no communication.

    Args:
        optimizer: Who will take them. One with a method ``state_kinds(param, group) -> {key: kind}`` says itself which
            keys the state of a parameter of the group has once it is stepped: a dtype for tensors that must be of it, a
            tensor for one that must have these values, None for everything else. Of others it is known only what state
            they have now.
        entry: One of :func:`parameter_states`.
        options: The hyperparameters that its group will have, those that were saved; others stay as they are.
        saved: Its state by key: values, dtypes of tensors that are not read yet. None is always right.
        name: The parameter's, for messages.

    Returns:
        By key, what the state is to have in place of the saved tensor: the optimizer's own, of the same values.

    Raises:
        CheckpointError: They are another optimizer's.
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
                f"The option {option!r} of {name}'s group was saved as {value!r}, a {then}; it is a {now} here, "
                f"{group[option]!r}. Load what an optimizer of the same class has saved."
            )


def _other_keys(name: str, saved: Mapping[str, Any], keeper: str, kept: Mapping[str, Any]) -> str:
    return (
        f"The state of {name} that was saved has {', '.join(sorted(saved))}; {keeper} keeps {', '.join(sorted(kept))}. "
        "It is another optimizer's: load what one of the same class has saved."
    )


def _require_kind(what: str, value: Any, kind: torch.dtype | torch.Tensor | None, keeper: str) -> None:
    if isinstance(kind, torch.dtype):
        found = value if isinstance(value, torch.dtype) else getattr(value, "dtype", type(value).__name__)
        if found != kind:
            raise CheckpointError(
                f"{keeper} keeps {what} as {kind}; what was saved is {found}. It is of another optimizer or of other "
                f"parameters: load the state of {keeper} for the same model."
            )
    elif isinstance(kind, torch.Tensor) and not isinstance(value, torch.dtype):
        require_same_values(what, value, kind)


def require_same_values(what: str, value: Any, known: torch.Tensor) -> None:
    """Refuse a saved tensor that stands for something else than this optimizer's own; any rank, no communication.

    Raises:
        CheckpointError: Its shape or its numbers are others, to six digits.
    """
    found = value.detach().to(known.device, known.dtype) if isinstance(value, torch.Tensor) else known.new_empty(0)
    if found.shape != known.shape or not torch.allclose(found, known, rtol=1e-6, atol=0):
        raise CheckpointError(
            f"{what} that was saved has other numbers than this optimizer's, so that all that refers to it would mean "
            "something else. Load the state of an optimizer of the same class."
        )


def _kind_of_option(value: Any) -> str | None:
    """None where anything may be meant."""
    if isinstance(value, (tuple, list)):
        return f"list of {len(value)}"
    if isinstance(value, (bool, int, float, torch.Tensor)):
        return "number"
    return "text" if isinstance(value, str) else None


def has_shape_here(optimizer: Optimizer, param: nn.Parameter, key: str, shape: Sequence[int]) -> bool:
    """Whether a tensor of this shape can be this rank's part of the parameter's state."""
    part = _said(optimizer, param, key)
    return tuple(shape) == (tuple(param.shape) if part is None else part.local_shape)


def part_of_saved(
    optimizer: Optimizer | StepInBackward | None, param: nn.Parameter, key: str, shape: Sequence[int], name: str
) -> StatePart | None:
    """Which part of a tensor of the unsharded optimizer's state this rank holds; as :func:`part_of_state`.

    Args:
        optimizer: Who will take it; None: one that describes nothing.
        param: This rank's shard, possibly without elements.
        key: Name of the tensor in the state.
        shape: Its shape there.
        name: The parameter's, for messages.

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
            f"Optimizer state can be cut where it is one number, has the parameter's shape, or the optimizer says "
            f"where it lies; {key!r} of {name} has shape {shape} and the parameter {meta.global_shape}{known}. Either "
            "the state is of other parameters, or in another order, or of another optimizer whose state is not by "
            "element."
        )
    return part


def _said(optimizer: Optimizer | StepInBackward | None, param: nn.Parameter, key: str) -> StatePart | None:
    describing = _with(_of_param(optimizer, param), "state_part")
    return None if describing is None else describing.state_part(param, key)


def _of_param(optimizer: Optimizer | StepInBackward | None, param: nn.Parameter) -> Optimizer | None:
    return optimizer.optimizers.get(meta_of(param).name) if isinstance(optimizer, StepInBackward) else optimizer


def _with(optimizer: Any, method: str) -> Any:
    """The optimizer, or the one it wraps as Accelerate's does, if it has a method that tells about state; else None."""
    inside = (optimizer, getattr(optimizer, "optimizer", None))
    return next((one for one in inside if hasattr(one, method)), None)


def _parts(optimizer: Optimizer | StepInBackward) -> list[Optimizer]:
    return list(optimizer.optimizers.values()) if isinstance(optimizer, StepInBackward) else [optimizer]
