"""A sharded optimizer's state in the form of the unsharded optimizer's."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, cast

import torch
from torch import nn

from fullshard.core.comm import Mesh, together
from fullshard.core.engine import gathered, local_tensors, mesh_of, plain_name, require_one_state
from fullshard.core.layout import elementwise
from fullshard.core.optim.exchange import PieceExchange
from fullshard.core.optim.in_backward import StepInBackward
from fullshard.core.optim.shards import comm_of, meta_of
from fullshard.errors import CheckpointError
from fullshard.state.saving.stepped import Stepped, Stepping, stepped

StateDict = dict[str, Any]


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
class Described:
    """Placeholder for a tensor of a parameter's state."""

    shape: tuple[int, ...]  # its shape in the unsharded state
    dtype: torch.dtype
    by_element: bool  # whether it has one element for each of the parameter's


class StatesOfAll:
    """An optimizer's state over all ranks, by parameter name.

    Attributes:
        own: This rank's parameters by name.
        states: The state of each parameter, the same on every rank: values, and :class:`Described` for tensors.
    """

    def __init__(self, model: nn.Module, own: Sequence[Stepped]) -> None:
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
            described = {n: one for n, s in self.states.items() if isinstance(one := s.get(key), Described)}
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

    def _gather_runs(self, name: str, key: str, described: Described, *, rank0_only: bool) -> torch.Tensor | None:
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


def _described(one: Stepped) -> tuple[int, StateDict, dict[str, tuple[int, int]]]:
    """Describe a parameter's state on this rank, for other ranks.

    Returns:
        The rank's number among those that share the parameter, the state with :class:`Described` for tensors, and the
        elements that this rank contributes, by key.

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
            state[key] = Described(part.shape, value.dtype, by_element)
            if not by_element:
                runs[key] = part.written
    return meta.rank, state, runs
