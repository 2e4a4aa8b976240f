"""Model, optimizer and gradients as pieces of named tensors: what a rank writes, and what it fills."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import Any

import torch
from torch import nn

from fullshard.engine import LocalTensor, local_tensors, mesh_of
from fullshard.errors import CheckpointError
from fullshard.layout import StatePart
from fullshard.optim.average import ExponentialMovingAverage
from fullshard.optim.in_backward import StepInBackward
from fullshard.optim.walk import (
    parameter_states,
    part_of_saved,
    part_of_state,
    require_same_kind,
    require_same_values,
)
from fullshard.storage import CheckpointReader, Index, Piece, TensorEntry, dtype_of

Stepping = torch.optim.Optimizer | StepInBackward

MODEL, OPTIMIZER, GRADIENT, AVERAGE = "model/", "optimizer/", "gradient/", "average/"

UPDATES = "averaged"
"""How often the average of the weights was updated."""

_SPLIT_NUMEL = 1 << 14
"""Elements from which on the ranks that hold copies of a tensor write a share each."""


@dataclass
class State:
    """What one rank holds of a training state.

    Attributes:
        pieces: Runs of tensors, none empty.
        groups: Options of the optimizer's parameter groups that JSON can hold, with parameter names under ``params``.
        scalars: The optimizer's state that is no tensor, by parameter name and key.
    """

    pieces: list[Piece] = field(default_factory=list)
    groups: list[dict[str, Any]] = field(default_factory=list)
    scalars: dict[str, dict[str, Any]] = field(default_factory=dict)


def state_to_write(
    model: nn.Module,
    optimizer: Stepping | None,
    *,
    gradients: bool,
    average: ExponentialMovingAverage | None = None,
) -> State:
    """What this rank writes of a training state; together the ranks write each element once. No communication.

    Args:
        model: A sharded model.
        optimizer: Over its parameters; None: it is not written.
        gradients: Whether ``.grad`` of the shards is written too.
        average: The average of the weights that is written too; None: none is.

    Returns:
        Views of the memory that training uses.

    Raises:
        CheckpointError: The optimizer has parameters of another model, or state that cannot be cut by rows.
    """
    state = State()
    held = local_tensors(model)
    for local in held:
        low, high = _share(local, local.tensor.numel())
        if high > low:
            state.pieces.append(Piece(MODEL + local.name, local.shape, local.start + low, local.tensor[low:high]))
            if gradients and local.param is not None and local.param.grad is not None:
                part = local.param.grad.detach().reshape(-1)[low:high]
                state.pieces.append(Piece(GRADIENT + local.name, local.shape, local.start + low, part))
            if average is not None and local.name in average.averages:
                part = average.averages[local.name].reshape(-1)[low:high]
                state.pieces.append(Piece(AVERAGE + local.name, local.shape, local.start + low, part))
    if average is not None and mesh_of(model).rank == 0:
        state.pieces.append(Piece(UPDATES, (), 0, torch.tensor([average.updates])))
    if optimizer is not None:
        by_param = by_parameter(held)
        for param, values, _ in parameter_states(optimizer):
            local = local_of(by_param, param)
            for key, value in values.items() if param.numel() else ():
                _add_state(state, local, key, value, part_of_state(optimizer, param, key, value, local.name))
        state.groups = [_group_as_plain(group, by_param) for group in _groups(optimizer)]
    return state


def _share(local: LocalTensor, numel: int) -> tuple[int, int]:
    """Which of ``numel`` elements a rank writes: all, or its share where others hold copies of them."""
    # The values of a buffer may be each rank's own (running statistics): some of each would be nobody's.
    if local.replicas > 1 and (local.param is None or numel < _SPLIT_NUMEL):
        return (0, numel) if local.replica == 0 else (0, 0)
    return numel * local.replica // local.replicas, numel * (local.replica + 1) // local.replicas


def by_parameter(held: list[LocalTensor]) -> dict[int, LocalTensor]:
    """What this rank holds of each parameter, by the ``id`` of the Parameter that optimizers know."""
    return {id(local.param): local for local in held if local.param is not None}


def local_of(by_param: Mapping[int, LocalTensor], param: nn.Parameter) -> LocalTensor:
    """The entry of an optimizer's parameter.

    Raises:
        CheckpointError: It is none of the model's.
    """
    found = by_param.get(id(param))
    if found is None:
        raise CheckpointError(
            f"The optimizer steps a parameter of shape {tuple(param.shape)} that the model does not have. Build it on "
            "model.parameters() after fully_shard, or before on the same Parameters."
        )
    return found


def _groups(optimizer: Stepping) -> list[dict[str, Any]]:
    """The optimizer's parameter groups, each once."""
    return list({id(group): group for _, _, group in parameter_states(optimizer)}.values())


def _group_as_plain(group: Mapping[str, Any], by_param: Mapping[int, LocalTensor]) -> dict[str, Any]:
    """A group's options as JSON holds them."""
    plain: dict[str, Any] = {"params": [local_of(by_param, param).name for param in group["params"]]}
    for name, value in group.items():
        if name in ("params", "param_names"):
            continue
        if isinstance(value, torch.Tensor):
            value = value.item()
        _require_plain(f"option {name!r} of the optimizer's group", value)
        plain[name] = list(value) if isinstance(value, tuple) else value
    return plain


def _require_plain(what: str, value: Any) -> None:
    values = value if isinstance(value, (tuple, list)) else (value,)
    if not all(one is None or isinstance(one, (bool, int, float, str)) for one in values):
        raise CheckpointError(f"The {what} is a {type(value).__name__}; checkpoints hold numbers, texts and tensors.")


def _add_state(state: State, local: LocalTensor, key: str, value: Any, part: StatePart | None) -> None:
    """Add one value of a parameter's optimizer state, of which it is a ``part``, to what this rank writes."""
    name = f"{OPTIMIZER}{local.name}/{key}"
    if part is not None:
        start, stop = part.written
        low, high = _share(local, stop - start)
        if high > low:
            run = value.detach().reshape(-1)[start - part.held[0] :][low:high]
            state.pieces.append(Piece(name, part.shape, start + low, run))
    elif local.start == 0 and local.replica == 0:
        if isinstance(value, torch.Tensor):
            state.pieces.append(Piece(name, (), 0, value.detach().reshape(1)))
        else:
            _require_plain(f"state {key!r} of {local.name}", value)
            state.scalars.setdefault(local.name, {})[key] = value


class Target:
    """What one rank fills from a checkpoint; planned and checked first, so that a misfit changes nothing.

    Attributes:
        pieces: What is read from the files.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Stepping | None,
        index: Index,
        average: ExponentialMovingAverage | None = None,
    ) -> None:
        """Plan what is read; nothing is changed yet.

        Raises:
            CheckpointError: Names or shapes do not fit, or there is no optimizer's state, or no average of the weights,
                though one is to be loaded.
        """
        self.index = index
        self.pieces: list[Piece] = []
        self._constants: list[tuple[Piece, torch.Tensor]] = []
        self._copies: list[LocalTensor] = []
        self._states: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._options: list[tuple[dict[str, Any], Mapping[str, Any]]] = []
        self._gradients: list[tuple[nn.Parameter, torch.Tensor | None]] = []
        held = [_as_saved(local, index) for local in local_tensors(model)]
        self._plan_model(held)
        for local in held:
            if local.param is not None:
                self._plan_gradient(local, local.param)
        if optimizer is not None:
            self._plan_optimizer(optimizer, by_parameter(held))
        self._average, self._updates = average, torch.zeros(1, dtype=torch.int64)
        if average is not None:
            self._plan_average(average, held)

    def compare(self, reader: CheckpointReader) -> None:
        """Read what must be saved as this optimizer has it; on every rank before anything is read into place.

        Raises:
            CheckpointError: It is something else, or the file is damaged.
        """
        for piece, known in self._constants:
            reader.read(piece)
            require_same_values(piece.name.removeprefix(OPTIMIZER), piece.tensor.view(known.shape), known)

    def finish(self) -> None:
        """Everything was read: hand it over."""
        for local in self._copies:
            with torch.no_grad():
                local.home.copy_(local.tensor.view(local.home.shape))
        for state, values in self._states:
            state.clear()
            state.update(values)
        for group, options in self._options:
            _take_options(group, options)
        for param, gradient in self._gradients:
            param.grad = gradient
        if self._average is not None:
            self._average.updates = int(self._updates)

    def _plan_model(self, held: list[LocalTensor]) -> None:
        """Names must fit exactly, a tied parameter under any of its names."""
        stored = {name for name in self.index.tensors if name.startswith(MODEL)}
        missing, misshaped = [], []
        for local in held:
            names = [MODEL + name for name in (local.name, *local.aliases)]
            name = next((name for name in names if name in stored), None)
            stored.difference_update(names)
            if name is None and prod(local.shape) == 0:
                continue  # nothing was written
            if name is None:
                missing.append(local.name)
            elif self.index.tensors[name].shape != local.shape:
                misshaped.append(f"{local.name} {self.index.tensors[name].shape} instead of {local.shape}")
            elif local.tensor.numel():
                self.pieces.append(Piece(name, local.shape, local.start, local.tensor))
                if local.tensor.data_ptr() != local.home.data_ptr():
                    self._copies.append(local)
        unexpected = sorted(name.removeprefix(MODEL) for name in stored)
        problems = [
            f"{len(names)} {what}: {', '.join(names[:5])}{', …' if len(names) > 5 else ''}"
            for what, names in (("lacking", missing), ("not in the model", unexpected), ("of another shape", misshaped))
            if names
        ]
        if problems:
            raise CheckpointError(f"The checkpoint is of another model. Tensors {'; '.join(problems)}.")

    def _plan_gradient(self, local: LocalTensor, param: nn.Parameter) -> None:
        if GRADIENT + local.name in self.index.tensors and param.numel():
            gradient = torch.empty_like(param, requires_grad=False)
            self.pieces.append(Piece(GRADIENT + local.name, local.shape, local.start, gradient.view(-1)))
            self._gradients.append((param, gradient))
        else:
            self._gradients.append((param, None))

    def _plan_average(self, average: ExponentialMovingAverage, held: list[LocalTensor]) -> None:
        if UPDATES not in self.index.tensors:
            raise CheckpointError(
                "The checkpoint was saved without an average of the weights: load it without average."
            )
        self.pieces.append(Piece(UPDATES, (), 0, self._updates))
        names = {name: local for local in held for name in (local.name, *local.aliases)}
        for name, tensor in average.averages.items():
            local = names[name]
            if not tensor.numel():
                continue
            if AVERAGE + local.name not in self.index.tensors:
                raise CheckpointError(
                    f"The average of the weights that was saved is not of {name}, which was frozen then. Make the "
                    "average of the parameters of then."
                )
            self.pieces.append(Piece(AVERAGE + local.name, local.shape, local.start, tensor.view(-1)))

    def _plan_optimizer(self, optimizer: Stepping, by_param: Mapping[int, LocalTensor]) -> None:
        if not self.index.groups:
            raise CheckpointError("The checkpoint was saved without an optimizer: load it with optimizer=None.")
        saved: dict[str, dict[str, TensorEntry]] = {}
        for name, entry in self.index.tensors.items():
            if name.startswith(OPTIMIZER):
                parameter, _, key = name.removeprefix(OPTIMIZER).rpartition("/")
                saved.setdefault(parameter, {})[key] = entry
        options = {name: group for group in self.index.groups for name in group["params"]}
        for group in _groups(optimizer):
            names = [local_of(by_param, param).name for param in group["params"]]
            self._options.append((group, options_of(names, options)))
        taken = {id(group): saved_options for group, saved_options in self._options}
        for entry in parameter_states(optimizer):
            name = local_of(by_param, entry[0]).name
            self._plan_state(optimizer, entry, taken[id(entry[2])], name, saved.get(name, {}))

    def _plan_state(
        self,
        optimizer: Stepping,
        entry: tuple[nn.Parameter, dict[str, Any], dict[str, Any]],
        options: Mapping[str, Any],
        name: str,
        saved: Mapping[str, TensorEntry],
    ) -> None:
        """Plan one parameter's state, of which the checkpoint has the tensors ``saved`` under ``name``."""
        param, state, group = entry
        parts = {key: part_of_saved(optimizer, param, key, one.shape, name) for key, one in saved.items()}
        values: dict[str, Any] = dict(self.index.scalars.get(name, {}))
        kinds = values | {key: dtype_of(one) for key, one in saved.items()}
        constants = require_same_kind(optimizer, entry, options, kinds, name)
        if not param.numel():
            return
        taken = {**group, **options}
        # As torch's own load_state_dict: counters live on the CPU but for optimizers that step in one kernel.
        one_kernel = taken.get("fused") or taken.get("capturable")
        for key, part in parts.items():
            dtype, start = dtype_of(saved[key]), 0 if part is None else part.held[0]
            piece = partial(Piece, f"{OPTIMIZER}{name}/{key}", saved[key].shape, start)
            if key in constants:
                # One tensor may be every parameter's: it is compared and kept, never read into.
                values[key] = constants[key]
                self._constants.append((piece(torch.empty_like(constants[key], dtype=dtype).view(-1)), constants[key]))
            else:
                device = param.device if part is not None or one_kernel else torch.device("cpu")
                values[key] = room = _room(state.get(key), part, dtype, device)
                self.pieces.append(piece(room.view(-1)))
        self._states.append((state, values))


def _room(current: Any, part: StatePart | None, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The tensor that one value of a parameter's state is read into: the one that is there, if it fits."""
    shape = () if part is None else part.local_shape
    fits = isinstance(current, torch.Tensor) and (tuple(current.shape), current.dtype) == (shape, dtype)
    if fits and current.device == device and current.is_contiguous():
        return current
    return torch.empty(shape, dtype=dtype, device=device)


def _as_saved(local: LocalTensor, index: Index) -> LocalTensor:
    """The same, with that of its names first under which the checkpoint has it."""
    names = (local.name, *local.aliases)
    name = next((name for name in names if MODEL + name in index.tensors), local.name)
    return replace(local, name=name, aliases=tuple(other for other in names if other != name))


def options_of(names: list[str], options: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
    """The saved options of a group's parameters, which must be one group's.

    Raises:
        CheckpointError: They are of several groups, or the optimizer of then did not step them.
    """
    unknown = [name for name in names if name not in options]
    if unknown:
        raise CheckpointError(
            f"The optimizer that was saved did not step {len(unknown)} parameters that this one steps: "
            f"{', '.join(unknown[:5])}{', …' if len(unknown) > 5 else ''}. Build it with the parameters of then."
        )
    different = {id(options[name]): options[name] for name in names}
    if len(different) > 1:
        raise CheckpointError(
            f"{len(names)} parameters of one group here were in {len(different)} groups with different options when "
            "they were saved. Build the optimizer with the groups of then."
        )
    return next(iter(different.values()), {})


def _take_options(group: dict[str, Any], options: Mapping[str, Any]) -> None:
    """Set a group's options, each in the kind it has now."""
    for name, value in options.items():
        if name == "params":
            continue
        current = group.get(name)
        if isinstance(current, torch.Tensor):
            current.fill_(value)
        else:
            group[name] = tuple(value) if isinstance(current, tuple) else value
