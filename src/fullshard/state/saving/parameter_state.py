"""The parameters that an optimizer steps, each with this rank's part of it and its optimizer state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fullshard.core.engine import LocalTensor
from fullshard.core.layout import StatePart
from fullshard.core.optim.in_backward import StepInBackward
from fullshard.core.optim.shards import holds_rows
from fullshard.core.optim.walk import parameter_states, part_of_saved, part_of_state, require_same_kind
from fullshard.core.shards import rows_of
from fullshard.errors import CheckpointError

Stepping = torch.optim.Optimizer | StepInBackward

_NOT_OPTIONS = ("params", "param_names")


@dataclass(frozen=True)
class StateValue:
    """One value of a parameter's optimizer state on this rank, as every format of a checkpoint describes it."""

    key: str  # its name in the state
    value: Any  # a tensor or a plain value, the optimizer's own
    part: StatePart | None  # its part of the unsharded optimizer's tensor; None: the same on every rank with elements

    @property
    def run(self) -> torch.Tensor:
        """The elements that this rank writes when state is saved, (n,): a view."""
        assert self.part is not None, "of a tensor that is split"
        start, stop = (max(at - self.part.held[0], 0) for at in self.part.written)
        return rows_of(self.value).detach().reshape(-1)[start:stop]


@dataclass(frozen=True)
class ParameterState:
    """One parameter that an optimizer steps."""

    local: LocalTensor  # this rank's part of the parameter
    param: nn.Parameter  # the Parameter
    state: dict[str, Any]  # its current state, the optimizer's own dict
    group: dict[str, Any]  # its group, the optimizer's own dict
    optimizer: Stepping | None  # the optimizer; None if only a state dict is available

    def saved_name(self, known: Mapping[str, Any]) -> str:
        """Return the first of the parameter's names that is ``known``, or its first name if none is."""
        names = (self.local.name, *self.local.aliases)
        return next((name for name in names if name in known), names[0])

    def values(self) -> list[StateValue]:
        """Describe the current state; nothing on a rank without elements of the parameter, whose state is stale.

        Raises:
            CheckpointError: A tensor's part of the unsharded state is unknown.
        """
        here = self.state if holds_rows(self.param) else {}
        return [StateValue(key, value, self.part(key, value)) for key, value in here.items()]

    def part(self, key: str, value: Any) -> StatePart | None:
        """Apply :func:`part_of_state` to a value of the current state."""
        return part_of_state(self.optimizer, self.param, key, value, self.local.name)

    def part_of_saved(self, key: str, shape: Sequence[int]) -> StatePart | None:
        """Apply :func:`part_of_saved` to a tensor of an unsharded optimizer's state."""
        return part_of_saved(self.optimizer, self.param, key, shape, self.local.name)

    def require_same_kind(self, options: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Apply :func:`fullshard.core.optim.walk.require_same_kind` to the saved state of the parameter."""
        entry = (self.param, self.state, self.group)
        return require_same_kind(self.optimizer, entry, options, saved, self.local.name)

    def room(self, key: str, part: StatePart | None, dtype: torch.dtype, options: Mapping[str, Any]) -> torch.Tensor:
        """Return the tensor that a saved value is read into: the current one if it fits, otherwise a new one.

        Args:
            key: Name of the value in the state.
            part: Which part of the saved tensor it receives; None: a single number, 0-d.
            dtype: Dtype of the saved tensor.
            options: The hyperparameters that its group will have.
        """
        # As in torch's own load_state_dict: counters stay on the CPU, except for optimizers that step in one kernel.
        taken = {**self.group, **options}
        on_cpu = part is None and not (taken.get("fused") or taken.get("capturable"))
        device = torch.device("cpu") if on_cpu else self.param.device
        shape = () if part is None else part.local_shape
        current: Any = self.state.get(key)
        fits = isinstance(current, torch.Tensor) and (tuple(current.shape), current.dtype) == (shape, dtype)
        if fits and current.device == device and current.is_contiguous():
            return current
        return torch.empty(shape, dtype=dtype, device=device)


def stepped(held: Sequence[LocalTensor], optimizer: Stepping) -> list[ParameterState]:
    """Return the parameters that an optimizer steps on this rank, in its order; no communication.

    Args:
        held: What this rank holds of the model, as :func:`fullshard.core.engine.local_tensors` returns it.
        optimizer: Over the model's parameters, or what ``step_in_backward`` returned.

    Raises:
        CheckpointError: A parameter is not the model's.
    """
    by_param = by_parameter(held)
    return [
        ParameterState(local_of(by_param, param), param, state, group, optimizer)
        for param, state, group in parameter_states(optimizer)
    ]


def by_parameter(held: Sequence[LocalTensor]) -> dict[int, LocalTensor]:
    """Return this rank's part of each parameter, by the ``id`` of the Parameter that optimizers see."""
    return {id(local.param): local for local in held if local.param is not None}


def local_of(by_param: Mapping[int, LocalTensor], param: nn.Parameter) -> LocalTensor:
    """Look up an optimizer's parameter in the result of :func:`by_parameter`.

    Raises:
        CheckpointError: The parameter is not the model's.
    """
    found = by_param.get(id(param))
    if found is None:
        raise CheckpointError(
            f"The optimizer steps a parameter of shape {tuple(param.shape)} that the model does not have. Build it on "
            "model.parameters() after fully_shard, or before on the same Parameters."
        )
    return found


def saved_options(own: Sequence[ParameterState], options: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the hyperparameters that each of the optimizer's parameters was saved with, in the order of ``own``.

    Args:
        own: The optimizer's parameters.
        options: Hyperparameters by parameter name; parameters of one group share the same mapping object.

    Raises:
        CheckpointError: A trainable parameter has none, or those of one group differ.
    """
    by_group: dict[int, list[str]] = {id(one.group): [] for one in own}
    for one in own:
        name = one.saved_name(options)
        if one.param.requires_grad or name in options:
            by_group[id(one.group)].append(name)
    chosen = {group: options_of(names, options) for group, names in by_group.items()}
    return [{key: value for key, value in chosen[id(one.group)].items() if key not in _NOT_OPTIONS} for one in own]


def options_of(names: Sequence[str], options: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the saved options of one group's parameters.

    Raises:
        CheckpointError: The parameters were saved in several groups with different options, or were not stepped by the
            saved optimizer.
    """
    unknown = [name for name in names if name not in options]
    if unknown:
        raise CheckpointError(
            f"The saved optimizer did not step {len(unknown)} parameters that this one steps: "
            f"{', '.join(unknown[:5])}{', …' if len(unknown) > 5 else ''}. Build the optimizer with the parameters it "
            "had when it was saved."
        )
    different = {id(options[name]): options[name] for name in names}
    if len(different) > 1:
        raise CheckpointError(
            f"{len(names)} parameters of one group were saved in {len(different)} groups with different options. Build "
            "the optimizer with the groups it had when it was saved."
        )
    return next(iter(different.values()), {})


def take_options(group: dict[str, Any], options: Mapping[str, Any]) -> None:
    """Set a group's options, each in the type it has in the group."""
    for name, value in options.items():
        if name == "params":
            continue
        current = group.get(name)
        if isinstance(current, torch.Tensor):
            current.fill_(value)
        else:
            group[name] = tuple(value) if isinstance(current, tuple) else value
