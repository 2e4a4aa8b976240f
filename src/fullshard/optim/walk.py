"""An optimizer's state parameter by parameter, whichever kind of optimizer it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fullshard.optim.in_backward import StepInBackward


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

    As there, tensors move to the parameter's device, and floating ones but ``step`` to its dtype; one that needs
    neither is taken over, not copied.

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


def _parts(optimizer: Optimizer | StepInBackward) -> list[Optimizer]:
    return list(optimizer.optimizers.values()) if isinstance(optimizer, StepInBackward) else [optimizer]
