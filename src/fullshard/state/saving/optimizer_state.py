"""Loading of an unsharded optimizer's state: each rank reads its elements."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fullshard.core.comm import together
from fullshard.core.engine import local_tensors, mesh_of
from fullshard.core.layout import StatePart
from fullshard.core.optim.walk import load_parameter_states
from fullshard.errors import CheckpointError
from fullshard.state.saving.load_plan import LoadPlan
from fullshard.state.saving.stepped import Stepped, Stepping, stepped
from fullshard.state.storage import Piece, TensorSpec, load_plain

_NO_DECAY = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")
"""Parameter names in lower case that Hugging Face's Trainer (transformers 5) excludes from weight decay."""

_QUANTISED = "__bnb_optimizer_quant_state__"

UnshardedState = Mapping[str, Any] | str | Path


def load_optimizer_state(
    model: nn.Module,
    optimizer: Stepping,
    state: UnshardedState | Sequence[UnshardedState],
    *,
    names: Sequence[Sequence[str]] | None = None,
) -> None:
    """Load the state of an optimizer of the unsharded model; every rank calls it, with the same arguments.

    Each rank copies what it holds: elements, or rows, columns and blocks if ``optimizer`` defines them. The
    hyperparameters of the groups (``lr``, ``betas``, …) are loaded too. A ``state_dict()`` numbers parameters; their
    names are taken from the first of these that applies:

    - names in place of numbers, as torch's ``get_optimizer_state_dict(full_state_dict=True)`` returns;
    - ``names``;
    - the groups' ``param_names``, which torch writes for optimizers that were made from ``named_parameters()``;
    - the order of ``model.named_parameters()``, all or the trainable ones, for one group;
    - the order of Hugging Face's Trainer, parameters with weight decay first, for two groups;
    - the groups of ``optimizer``, and their order.

    State of parameters that ``optimizer`` does not step is not read.

    Args:
        model: A sharded model.
        optimizer: Over its parameters: a torch optimizer of the same class, the one of ``optim`` with the
            same state, or what ``step_in_backward`` returned.
        state: What ``state_dict()`` returned, or a file of ``torch.save`` with it, such as Trainer's ``optimizer.pt``:
            each rank maps it into memory and reads only what it holds. Or a list (also in a file) of the states of
            several optimizers whose parameters ``optimizer`` steps together, such as torch's Muon and AdamW: their
            groups are concatenated.
        names: The parameter names of each group, in order.

    Raises:
        CheckpointError: The file cannot be read, or names or shapes do not fit; on every rank, with the same text.
            Nothing has changed then.
    """
    plan, tensors = together(mesh_of(model), lambda: _plan(model, optimizer, state, names))
    for piece in plan.pieces:
        _read_piece(piece, tensors)
    load_parameter_states(optimizer, plan.loaded)


def _plan(
    model: nn.Module,
    optimizer: Stepping,
    state: UnshardedState | Sequence[UnshardedState],
    names: Sequence[Sequence[str]] | None,
) -> tuple[LoadPlan, dict[str, torch.Tensor]]:
    """Return what is read, and the tensors that it is read from."""
    saved = _state_dicts(state)
    groups = [(of_one["state"], group) for of_one in saved for group in of_one["param_groups"]]
    own = stepped(local_tensors(model), optimizer)
    states: dict[str, dict[str, Any]] = {}
    tensors: dict[str, torch.Tensor] = {}
    names = _names_of_groups(model, own, [group for _, group in groups], names)
    for (of_one, group), of_group in zip(groups, names, strict=True):
        for name, number in zip(of_group, group["params"], strict=True):
            states[name] = {}
            for key, value in _unnested(of_one.get(number, {})).items():
                states[name][key] = value
                if isinstance(value, torch.Tensor):
                    tensors[f"{name}/{key}"] = value
                    states[name][key] = TensorSpec(f"{name}/{key}", tuple(value.shape), value.dtype)
    _check(model, own, states)
    plan = LoadPlan()
    named = [{**group, "params": of_group} for (_, group), of_group in zip(groups, names, strict=True)]
    plan.add_optimizer(own, states, named)
    for piece, _ in plan.constants:
        _read_piece(piece, tensors)
    plan.compare()
    return plan, tensors


def _read_piece(piece: Piece, tensors: Mapping[str, torch.Tensor]) -> None:
    piece.tensor.copy_(tensors[piece.name].detach().reshape(-1)[piece.start : piece.stop])


def _state_dicts(state: UnshardedState | Sequence[UnshardedState]) -> list[Mapping[str, Any]]:
    """Return the given state dicts, read from files where paths are given.

    Raises:
        CheckpointError: One is not an optimizer's state.
    """
    saved = load_plain(Path(state), mmap=True) if isinstance(state, (str, Path)) else state
    if isinstance(saved, (list, tuple)):
        return [found for one in saved for found in _state_dicts(one)]
    if not isinstance(saved, Mapping) or not {"state", "param_groups"} <= saved.keys():
        raise CheckpointError(
            "An optimizer's state_dict() has the keys 'state' and 'param_groups'; this is a "
            f"{type(saved).__name__}{f' with {sorted(map(str, saved))[:5]}' if isinstance(saved, Mapping) else ''}."
        )
    return [saved]


def _unnested(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a parameter's state without the nested dict in which bitsandbytes hides quantized tensors from FSDP."""
    return {**{key: value for key, value in values.items() if key != _QUANTISED}, **values.get(_QUANTISED, {})}


def cut(full: torch.Tensor, part: StatePart) -> torch.Tensor:
    """Return this rank's part of a full tensor of state: a view."""
    return full.detach().reshape(-1)[slice(*part.held)].view(part.local_shape)


def _names_of_groups(
    model: nn.Module, own: Sequence[Stepped], groups: Sequence[Mapping[str, Any]], names: Sequence[Sequence[str]] | None
) -> Sequence[Sequence[str]]:
    """Return the parameter names of each group, in order.

    Raises:
        CheckpointError: They are unknown, or not as many as were saved.
    """
    sizes = [len(group["params"]) for group in groups]
    if any(isinstance(one, str) for group in groups for one in group["params"]):
        return [group["params"] for group in groups]
    guesses = [*_guesses(model, len(groups)), _groups_of(own)]
    if names is None and all("param_names" in group for group in groups):
        names = [group["param_names"] for group in groups]
    if names is None:
        names = next((guess for guess in guesses if [len(one) for one in guess] == sizes), None)
    if names is None:
        raise CheckpointError(
            f"The optimizer state has groups of {sizes} parameters without names; the model would have "
            f"{' or '.join(dict.fromkeys(str([len(one) for one in guess]) for guess in guesses))}. Pass the "
            "names of each group's parameters: load_optimizer_state(..., names=[[...], ...])."
        )
    if [len(one) for one in names] != sizes:
        raise CheckpointError(
            f"The optimizer state has groups of {sizes} parameters; names were given for "
            f"{[len(one) for one in names]}. Pass one list of names for each group, in the order of its parameters."
        )
    return names


def _groups_of(own: Sequence[Stepped]) -> list[list[str]]:
    """Return the parameter names of each group of the sharded optimizer, except groups without parameters here."""
    groups: dict[int, list[str]] = {}
    for one in own:
        groups.setdefault(id(one.group), []).append(one.local.name)
    return list(groups.values())


def _guesses(model: nn.Module, count: int) -> Iterator[list[list[str]]]:
    """Yield the usual ways to divide the parameters into ``count`` groups."""
    trainable = [name for name, param in model.named_parameters() if param.requires_grad]
    if count == 1:
        yield [[name for name, _ in model.named_parameters()]]
        yield [trainable]
    if count == 2:
        norms = tuple(f"{path}." for path, module in model.named_modules() if path and isinstance(module, nn.LayerNorm))
        plain = {name for name in trainable if _NO_DECAY.search(name.lower()) or name.startswith(norms)}
        yield [[name for name in trainable if name not in plain], [name for name in trainable if name in plain]]


def _check(model: nn.Module, own: Sequence[Stepped], values: Mapping[str, Mapping[str, Any]]) -> None:
    """Compare everything saved with model and optimizer, not only this rank's part: every rank raises the same error.

    Raises:
        CheckpointError: A name is unknown, or a value does not fit its parameter's state.
    """
    stepping = {name: one for one in own for name in (one.local.name, *one.local.aliases)}
    known = {name for local in local_tensors(model) if local.param is not None for name in (local.name, *local.aliases)}
    unknown = [name for name in values if name not in known]
    if unknown:
        raise CheckpointError(
            f"The optimizer state has {len(unknown)} parameters that the model does not have: "
            f"{', '.join(unknown[:5])}{', …' if len(unknown) > 5 else ''}. Pass the model's names with names=."
        )
    for name, one in ((name, stepping[name]) for name in values if name in stepping):
        for key, value in values[name].items():
            if isinstance(value, TensorSpec):
                one.part_of_saved(key, value.shape)
            elif isinstance(value, (list, tuple, dict)):
                raise CheckpointError(
                    f"Optimizer state can be cut if it is a tensor or a single value; {key!r} of {name} is a "
                    f"{type(value).__name__}."
                )
