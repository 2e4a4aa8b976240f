"""Reading an unsharded optimizer's state, each rank its elements, and what all foreign states have in common."""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fullshard.comm import together
from fullshard.engine import LocalTensor, local_tensors, mesh_of
from fullshard.errors import CheckpointError
from fullshard.optim import load_parameter_states, local_state_key_is_elementwise, parameter_states
from fullshard.saving.pieces import Stepping, by_parameter, local_of, options_of

_NO_DECAY = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")
"""Names that Hugging Face's Trainer (transformers 5) keeps from weight decay, in lower case."""

_NOT_OPTIONS = ("params", "param_names")


@dataclass(frozen=True)
class Stepped:
    """A parameter as an optimizer has it.

    Attributes:
        local: What this rank holds of it.
        param: The Parameter.
        state: Its state now, the optimizer's own.
        group: Its group, the optimizer's own.
    """

    local: LocalTensor
    param: nn.Parameter
    state: dict[str, Any]
    group: dict[str, Any]

    def saved_name(self, known: Mapping[str, Any]) -> str:
        """The name under which something of it is ``known``: the first one where nothing is."""
        names = (self.local.name, *self.local.aliases)
        return next((name for name in names if name in known), names[0])

    def room(self, key: str, shape: Sequence[int], dtype: torch.dtype) -> tuple[torch.Tensor, bool]:
        """Where a saved tensor of the parameter's state goes: the tensor that is there, or a new one.

        Args:
            key: Its name in the state.
            shape: Its shape in the unsharded state.
            dtype: Its dtype there.

        Returns:
            The tensor, and whether it has this rank's elements (else it is one number, 0-d).

        Raises:
            CheckpointError: It is neither by element nor one number.
        """
        if not is_elementwise(self.local.name, self.local.shape, key, shape):
            return torch.empty((), dtype=dtype), False
        current: Any = self.state.get(key)
        if local_state_key_is_elementwise(self.param, key, current) and current.dtype == dtype:
            return current, True
        return torch.empty_like(self.param, dtype=dtype, requires_grad=False), True


def stepped(model: nn.Module, optimizer: Stepping) -> list[Stepped]:
    """The parameters that an optimizer steps here, in the order of :func:`parameter_states`; no communication.

    Raises:
        CheckpointError: One is not the model's.
    """
    by_param = by_parameter(local_tensors(model))
    return [
        Stepped(local_of(by_param, param), param, state, group) for param, state, group in parameter_states(optimizer)
    ]


def saved_options(own: Sequence[Stepped], options: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The hyperparameters that each of this rank's parameters was saved with.

    Args:
        own: The optimizer's parameters.
        options: Hyperparameters by the parameter's name; parameters of one group have the very same mapping.

    Returns:
        For each of ``own``, those of its group.

    Raises:
        CheckpointError: A trainable parameter has none, or those of one group have different ones.
    """
    by_group: dict[int, list[str]] = {id(one.group): [] for one in own}
    for one in own:
        name = one.saved_name(options)
        if one.param.requires_grad or name in options:
            by_group[id(one.group)].append(name)
    chosen = {group: options_of(names, options) for group, names in by_group.items()}
    return [{key: value for key, value in chosen[id(one.group)].items() if key not in _NOT_OPTIONS} for one in own]


def is_elementwise(name: str, whole: Sequence[int], key: str, shape: Sequence[int]) -> bool:
    """Whether a saved tensor of a parameter's state has an element for each of the parameter's; else it is one number.

    Args:
        name: The parameter's.
        whole: Shape of the unsharded parameter.
        key: Name of the tensor in the state.
        shape: Its shape in the unsharded state.

    Raises:
        CheckpointError: It is neither.
    """
    if tuple(shape) == tuple(whole) and (len(shape) > 0 or key != "step"):
        return True
    if len(shape) > 0:
        raise CheckpointError(
            f"Optimizer state can be cut where it is one number or has the parameter's shape; {key!r} of {name} has "
            f"shape {tuple(shape)} and the parameter {tuple(whole)}. Either the state is of other parameters, or in "
            "another order, or of an optimizer whose state is not by element."
        )
    return False


def load_optimizer_state(
    model: nn.Module,
    optimizer: Stepping,
    state: Mapping[str, Any] | str | Path,
    *,
    names: Sequence[Sequence[str]] | None = None,
) -> None:
    """Take over the state of an optimizer of the unsharded model; every rank calls it, with the same arguments.

    Each rank copies the elements it holds. The hyperparameters of the groups (``lr``, ``betas``, …) are taken over too.
    A ``state_dict()`` numbers parameters; which those are is known, in this order, from

    - names in place of numbers, as torch's ``get_optimizer_state_dict(full_state_dict=True)`` gives;
    - ``names``;
    - the groups' ``param_names``, which torch writes for optimizers that were made from ``named_parameters()``;
    - the order of ``model.named_parameters()``, all or the trainable ones, for one group;
    - the order of Hugging Face's Trainer, first what has weight decay, then what has none, for two groups.

    State of parameters that ``optimizer`` does not step is not read.

    Args:
        model: A sharded model.
        optimizer: Over its parameters, a torch optimizer of the same class, or what ``step_in_backward`` returned.
        state: What ``state_dict()`` gave, or a file of ``torch.save`` with it, such as Trainer's ``optimizer.pt``: each
            rank maps it into memory and reads only its elements.
        names: The parameters of each group, in order.

    Raises:
        CheckpointError: The file cannot be read, names or shapes do not fit, or the state is neither by element nor
            one number. On every rank, with the same text; nothing has changed then.
    """
    plan = together(mesh_of(model), lambda: _plan(model, optimizer, state, names))
    with torch.no_grad():
        for target, source in plan.copies:
            target.copy_(source)
    load_parameter_states(optimizer, plan.loaded)


@dataclass
class _Plan:
    """What is copied, to where, and what the optimizer is handed then."""

    copies: list[tuple[torch.Tensor, torch.Tensor]]
    loaded: list[tuple[dict[str, Any], dict[str, Any]]]


def _plan(
    model: nn.Module,
    optimizer: Stepping,
    state: Mapping[str, Any] | str | Path,
    names: Sequence[Sequence[str]] | None,
) -> _Plan:
    saved = _read(Path(state)) if isinstance(state, (str, Path)) else state
    if not isinstance(saved, Mapping) or not {"state", "param_groups"} <= saved.keys():
        raise CheckpointError(
            "An optimizer's state_dict() has the keys 'state' and 'param_groups'; this is a "
            f"{type(saved).__name__}{f' with {sorted(map(str, saved))[:5]}' if isinstance(saved, Mapping) else ''}."
        )
    groups = saved["param_groups"]
    values: dict[str, Mapping[str, Any]] = {}
    options: dict[str, Mapping[str, Any]] = {}
    for group, of_group in zip(groups, _names_of_groups(model, groups, names), strict=True):
        for name, number in zip(of_group, group["params"], strict=True):
            options[name], values[name] = group, saved["state"].get(number, {})
    _check(model, values)
    own = stepped(model, optimizer)
    plan = _Plan([], [])
    for one, its_options in zip(own, saved_options(own, options), strict=True):
        of_param = values.get(one.saved_name(values), {})
        # What this rank holds nothing of stays as it is: its steps would not be counted on.
        new = (
            {key: _place(plan, one, key, value) for key, value in of_param.items()} if one.param.numel() else one.state
        )
        plan.loaded.append((new, its_options))
    return plan


def _place(plan: _Plan, one: Stepped, key: str, value: Any) -> Any:
    """What the optimizer is given for one saved value; what a tensor is filled from is noted in the plan."""
    if not isinstance(value, torch.Tensor):
        return value
    target, elementwise = one.room(key, value.shape, value.dtype)
    start, numel = one.local.start, one.local.tensor.numel()
    source = value.detach().reshape(-1)[start : start + numel].view(target.shape) if elementwise else value.detach()
    plan.copies.append((target, source))
    return target


def _read(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except OSError as error:
        raise CheckpointError(f"Cannot read the optimizer state {path}: {error.strerror or error}.") from error
    except (RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        raise CheckpointError(
            f"{path} is not a whole file of torch.save (since torch 1.6) that holds tensors and plain values only: "
            f"{str(error).splitlines()[0]}"
        ) from error


def _names_of_groups(
    model: nn.Module, groups: Sequence[Mapping[str, Any]], names: Sequence[Sequence[str]] | None
) -> Sequence[Sequence[str]]:
    """The parameters of each group, by name, in order.

    Raises:
        CheckpointError: They are not known, or not as many as were saved.
    """
    sizes = [len(group["params"]) for group in groups]
    if any(isinstance(one, str) for group in groups for one in group["params"]):
        return [group["params"] for group in groups]
    guesses = list(_guesses(model, len(groups)))
    if names is None and all("param_names" in group for group in groups):
        names = [group["param_names"] for group in groups]
    if names is None:
        names = next((guess for guess in guesses if [len(one) for one in guess] == sizes), None)
    if names is None:
        raise CheckpointError(
            f"The optimizer state has groups of {sizes} parameters without names; the model's would be "
            f"{' or '.join(str([len(one) for one in guess]) for guess in guesses) or 'one group or two'}. Give the "
            "names of each group's parameters: load_optimizer_state(..., names=[[...], ...])."
        )
    if [len(one) for one in names] != sizes:
        raise CheckpointError(
            f"The optimizer state has groups of {sizes} parameters; there are names for "
            f"{[len(one) for one in names]}. Give one list of names for each group, in the order of its parameters."
        )
    return names


def _guesses(model: nn.Module, count: int) -> Iterator[list[list[str]]]:
    """The groups that are usually made, ``count`` of them."""
    trainable = [name for name, param in model.named_parameters() if param.requires_grad]
    if count == 1:
        yield [[name for name, _ in model.named_parameters()]]
        yield [trainable]
    if count == 2:
        norms = tuple(f"{path}." for path, module in model.named_modules() if path and isinstance(module, nn.LayerNorm))
        plain = {name for name in trainable if _NO_DECAY.search(name.lower()) or name.startswith(norms)}
        yield [[name for name in trainable if name not in plain], [name for name in trainable if name in plain]]


def _check(model: nn.Module, values: Mapping[str, Mapping[str, Any]]) -> None:
    """Compare all that was saved with the model, also what other ranks hold, so that every rank finds the same.

    Raises:
        CheckpointError: A name is unknown, or a tensor has neither its parameter's shape nor is one number.
    """
    shapes = {
        name: local.shape
        for local in local_tensors(model)
        if local.param is not None
        for name in (local.name, *local.aliases)
    }
    unknown = [name for name in values if name not in shapes]
    if unknown:
        raise CheckpointError(
            f"The optimizer state is of {len(unknown)} parameters that the model does not have: "
            f"{', '.join(unknown[:5])}{', …' if len(unknown) > 5 else ''}. Give the model's names with names=."
        )
    for name, of_param in values.items():
        for key, value in of_param.items():
            if isinstance(value, torch.Tensor):
                is_elementwise(name, shapes[name], key, value.shape)
            elif isinstance(value, (list, tuple, dict)):
                raise CheckpointError(
                    f"Optimizer state can be cut where it is a tensor or one value; {key!r} of {name} is a "
                    f"{type(value).__name__}."
                )
