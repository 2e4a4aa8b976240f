"""An optimizer's state in the form of the unsharded optimizer's: read by each rank's elements, or gathered."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from fullshard.core.comm import Mesh, together
from fullshard.core.engine import gathered, local_tensors, mesh_of, plain_name, require_one_state
from fullshard.core.layout import StatePart, elementwise
from fullshard.core.optim.exchange import PieceExchange
from fullshard.core.optim.in_backward import StepInBackward
from fullshard.core.optim.shards import comm_of, meta_of
from fullshard.core.optim.walk import load_parameter_states
from fullshard.core.shards import run_of
from fullshard.errors import CheckpointError
from fullshard.state.saving.load_plan import LoadPlan
from fullshard.state.saving.parameter_state import ParameterState, Stepping, stepped
from fullshard.state.storage import Piece, TensorSpec, load_plain

_NO_DECAY = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")
"""Parameter names in lower case that Hugging Face's Trainer (transformers 5) excludes from weight decay."""

_QUANTISED = "__bnb_optimizer_quant_state__"

UnshardedState = Mapping[str, Any] | str | Path
StateDict = dict[str, Any]


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
            values = of_one.get(number, {})
            # bitsandbytes hides quantized tensors from FSDP in a nested dict.
            for key, value in {**values, **values.get(_QUANTISED, {})}.items():
                if key == _QUANTISED:
                    continue
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
    piece.tensor.copy_(run_of(tensors[piece.name].detach(), piece.block, piece.start, piece.stop))


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


def cut(full: torch.Tensor, part: StatePart) -> torch.Tensor:
    """Return this rank's part of a full tensor of state: a view."""
    return run_of(full.detach(), part.block, *part.held).view(part.local_shape)


def _names_of_groups(
    model: nn.Module,
    own: Sequence[ParameterState],
    groups: Sequence[Mapping[str, Any]],
    names: Sequence[Sequence[str]] | None,
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


def _groups_of(own: Sequence[ParameterState]) -> list[list[str]]:
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


def _check(model: nn.Module, own: Sequence[ParameterState], values: Mapping[str, Mapping[str, Any]]) -> None:
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


def full_optimizer_state(model: nn.Module, optimizer: Stepping, *, groups: Sequence[int] | None = None) -> StateDict:
    """Return the state of the unsharded model's optimizer on rank 0; every rank calls it.

    ``optimizer_class(unsharded.parameters()).load_state_dict`` accepts it, and so does :func:`load_optimizer_state` on
    any number of ranks. Tensors of the parameters' shape are gathered one lane at a time, others one by one; other
    ranks keep no full tensor.

    Args:
        model: A sharded model.
        optimizer: Over its parameters, or what ``step_in_backward`` returned, of which parameters with the same
            hyperparameters become one group.
        groups: Numbers of the parameter groups to return, if the unsharded model has several optimizers: Muon's for
            ``torch.optim.Muon``, the others for its AdamW; None: all.

    Returns:
        On rank 0 ``{"state": {number: {key: value}}, "param_groups": [{..., "params": [numbers]}]}``, tensors on the
        CPU; ``{}`` on other ranks.

    Raises:
        CheckpointError: A tensor's part of the unsharded state is unknown, a parameter is not the model's, or
            ranks step different parameters; on every rank, with the same text.
    """
    require_one_state(model)
    mesh = mesh_of(model)
    own = together(mesh, lambda: stepped(local_tensors(model), optimizer))
    named = named_groups(model, optimizer)
    chosen = named if groups is None else [named[number] for number in groups]
    numbers = {name: number for number, name in enumerate(name for group in chosen for name in group["params"])}
    state = StatesOfAll(model, [one for one in own if one.local.name in numbers]).full(rank0_only=True, to_host=True)
    if mesh.rank > 0:
        return {}
    return {
        "state": {number: state[name] for name, number in numbers.items() if name in state},
        "param_groups": [
            {key: value.cpu() if isinstance(value, torch.Tensor) else value for key, value in group.items()}
            | {"params": [numbers[name] for name in group["params"]]}
            for group in chosen
        ],
    }


def named_groups(model: nn.Module, optimizer: Stepping) -> list[StateDict]:
    """Return the optimizer's groups with parameters by name, the same on every rank; every rank calls it.

    Optimizers that step in backward have one parameter each, of which this rank may hold nothing: those with the same
    hyperparameters become one group, in the order of the model's parameters.

    Raises:
        CheckpointError: A parameter is not the model's, or the groups differ between ranks; on every rank.
    """
    mesh = mesh_of(model)
    own = together(mesh, lambda: stepped(local_tensors(model), optimizer))
    if not isinstance(optimizer, StepInBackward):
        names = iter([one.local.name for one in own])
        groups = [{**group_options(g), "params": [next(names) for _ in g["params"]]} for g in optimizer.param_groups]
        _require_same(mesh, [group["params"] for group in groups])
        return groups
    mine = {one.local.name: group_options(one.group) for one in own}
    options = {name: group for of_rank in mesh.all_gather_object(mine) for name, group in of_rank.items()}
    groups = []
    for name in (plain for name, _ in model.named_parameters() if (plain := plain_name(name)) in options):
        like = next((group for group in groups if _plain(group) == _plain(options[name])), None)
        if like is None:
            groups.append({**options[name], "params": [name]})
        else:
            like["params"].append(name)
    return groups


def group_options(group: Mapping[str, Any]) -> StateDict:
    """Return a copy of a parameter group without its parameters."""
    return {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}


def _plain(group: Mapping[str, Any]) -> StateDict:
    """Return the hyperparameters of a group in a form that can be compared."""
    return {
        key: value.tolist() if isinstance(value, torch.Tensor) else value
        for key, value in group.items()
        if key not in ("params", "param_names")
    }


def _require_same(mesh: Mesh, names: list[list[str]]) -> None:
    """Refuse groups that differ between ranks: a parameter's number would be ambiguous."""
    by_rank = mesh.all_gather_object(names)
    other = next((rank for rank, of_rank in enumerate(by_rank) if of_rank != by_rank[0]), None)
    if other is not None:
        sizes = [[len(group) for group in by_rank[rank]] for rank in (0, other)]
        raise CheckpointError(
            f"The optimizer has different parameters, or another order, on rank {other} than on rank 0: groups of "
            f"{sizes[1]} and {sizes[0]}. Build it from model.parameters() on every rank, including parameters of which "
            "a rank holds no rows."
        )


@dataclass(frozen=True)
class TensorPlaceholder:
    """Placeholder for a tensor of a parameter's state."""

    shape: tuple[int, ...]  # its shape in the unsharded state
    dtype: torch.dtype
    by_element: bool  # whether it has one element for each of the parameter's


class StatesOfAll:
    """An optimizer's state over all ranks, by parameter name.

    Attributes:
        own: This rank's parameters by name.
        states: The state of each parameter, the same on every rank: values, and :class:`TensorPlaceholder` for tensors.
    """

    def __init__(self, model: nn.Module, own: Sequence[ParameterState]) -> None:
        """Exchange descriptions of the state of ``own``, this rank's parameters; every rank calls it.

        Raises:
            CheckpointError: A tensor's part of the unsharded state is unknown; on every rank.
        """
        self.model, self.mesh = model, mesh_of(model)
        self.own = {one.local.name: one for one in own}
        self._locals = {local.name: local for local in local_tensors(model) if local.param is not None}
        mine = together(self.mesh, lambda: {one.local.name: _described(one) for one in own})
        found: dict[str, StateDict] = {}
        # By name and key, the elements contributed by each of the ranks that share the parameter.
        self._runs: dict[tuple[str, str], dict[int, tuple[int, int]]] = {}
        for of_rank in self.mesh.all_gather_object(mine):
            for name, (rank, state, runs) in of_rank.items():
                if state:  # only ranks with elements of a parameter have its state
                    found.setdefault(name, state)
                for key, run in runs.items():
                    self._runs.setdefault((name, key), {})[rank] = run
        self.states = {name: found[name] for name in self._locals if name in found}

    def full(self, *, rank0_only: bool, to_host: bool) -> dict[str, StateDict]:
        """Return the state with full tensors, which are copies; every rank calls it.

        With ``rank0_only`` other ranks than 0 return ``{}``; with ``to_host`` the copies are on the CPU.
        """

        def copied(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.detach().to("cpu", copy=True) if to_host else tensor.detach().clone()

        state = {name: dict(of_param) for name, of_param in self.states.items()}
        for key in dict.fromkeys(key for of_param in state.values() for key in of_param):
            described = {n: one for n, s in self.states.items() if isinstance(one := s.get(key), TensorPlaceholder)}
            wanted = {name: one.dtype for name, one in described.items() if one.by_element}
            held = {name: one.state[key] for name, one in self.own.items() if name in wanted and key in one.state}
            for name, tensor in held.items():
                if not hasattr(self.own[name].param, "shard_meta"):  # replicated on every rank
                    state[name][key] = copied(tensor)
            for lane in gathered(self.model, held, wanted, rank0_only=rank0_only):
                for name, tensor in lane.items():
                    state[name][key] = copied(tensor)
            for name, one in described.items():
                if not one.by_element:
                    tensor = self._gather_runs(name, key, one, rank0_only=rank0_only)
                    state[name][key] = None if tensor is None else copied(tensor)
        return {} if rank0_only and self.mesh.rank > 0 else state

    def _gather_runs(
        self, name: str, key: str, described: TensorPlaceholder, *, rank0_only: bool
    ) -> torch.Tensor | None:
        """Gather a full tensor of state from the runs of the ranks that share the parameter ``name``."""
        local = self._locals[name]
        if rank0_only and local.replica > 0:  # another replica sends the same values
            return None
        comm = comm_of(cast("nn.Parameter", local.param))
        runs = self._runs[name, key]
        receivers = range(1 if rank0_only else comm.size)
        here = self.own[name].values() if name in self.own else []
        run = next((said.run.to(comm.device) for said in here if said.key == key and said.part is not None), None)
        run = torch.empty(0, dtype=described.dtype, device=comm.device) if run is None else run
        sent = {rank: [run] for rank in receivers}
        awaited = {rank: {0: stop - start} for rank, (start, stop) in runs.items()} if comm.rank in receivers else {}
        exchange = PieceExchange(comm, sent, awaited, described.dtype, f"exchange of {key} of {name}")
        exchange.wait()
        exchange.settle()
        if comm.rank not in receivers:
            return None
        full = torch.empty(prod(described.shape), dtype=described.dtype, device=comm.device)
        for rank, (start, stop) in runs.items():
            full[start:stop] = exchange.received[rank, 0]
        return full.view(described.shape)


def _described(one: ParameterState) -> tuple[int, StateDict, dict[str, tuple[int, int]]]:
    """Describe a parameter's state on this rank, for other ranks.

    Returns:
        The rank's number among those that share the parameter, the state with :class:`TensorPlaceholder` for tensors,
        and the elements that this rank contributes, by key.

    Raises:
        CheckpointError: A tensor's part of the unsharded state is unknown.
    """
    meta = meta_of(one.param)
    state: StateDict = {}
    runs: dict[str, tuple[int, int]] = {}
    for said in one.values():
        key, value, part = said.key, said.value, said.part
        if part is None:
            state[key] = value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value
        else:
            by_element = part == elementwise(meta)
            state[key] = TensorPlaceholder(part.shape, value.dtype, by_element)
            if not by_element:
                runs[key] = part.written
    return meta.rank, state, runs
