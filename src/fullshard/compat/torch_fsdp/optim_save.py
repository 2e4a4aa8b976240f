"""State dicts of sharded models' optimizers, by parameter name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fullshard.comm import Comm, Mesh, together
from fullshard.engine import local_tensors, mesh_of, sharded_roots
from fullshard.errors import CheckpointError, InvariantError, ProcessGroupError, ShardingError
from fullshard.layout import StatePart
from fullshard.optim.shards import comm_of
from fullshard.saving.full_optimizer import Described, StateDict, StatesOfAll, group_options
from fullshard.saving.shard_tensor import state_as_part
from fullshard.saving.stepped import Stepped, by_parameter, local_of


def root_and_ranks(model: nn.Module, group: Any) -> tuple[nn.Module, Mesh]:
    """Return the sharded model inside ``model`` and its ranks.

    Raises:
        ShardingError: ``model`` holds none, or several.
        ProcessGroupError: ``group`` has another number of ranks.
    """
    roots = sharded_roots(model)
    if len(roots) != 1:
        raise ShardingError(
            f"{type(model).__name__} holds {len(roots)} sharded models, but an optimizer state belongs to one. Pass "
            "that model."
        )
    mesh = mesh_of(roots[0])
    if group is not None and group.size() not in (mesh.size, mesh.shard_group.size):
        raise ProcessGroupError(
            f"group has {group.size()} ranks, but the model is sharded over {mesh.shard_group.size} of {mesh.size}. "
            "Leave out group: the model's own is used."
        )
    return roots[0], mesh


class OptimState:
    """State of an optimizer, to be returned as a full, sharded or local state dict; every rank creates it."""

    def __init__(
        self, model: nn.Module, optim: Optimizer, given: StateDict | None, group: Any, *, to_host: bool
    ) -> None:
        """Exchange descriptions of the state, so that all ranks know of every entry.

        Args:
            model: The wrapped or sharded model.
            optim: The optimizer of its parameters.
            given: What ``optim.state_dict()`` returned, to be used instead of the current state.
            group: The model's process group, or None.
            to_host: Put the values in host memory.
        """
        self.root, self.mesh = root_and_ranks(model, group)
        self.to_host = to_host
        groups = optim.param_groups if given is None else given["param_groups"]
        own = together(self.mesh, lambda: _stepped(self.root, optim, given))
        names = iter(one.local.name for one in own)
        self.groups = [
            {**group_options(of_group), "params": [next(names) for _ in of_group["params"]]} for of_group in groups
        ]
        self.all = StatesOfAll(self.root, own)

    def full(self, *, rank0_only: bool) -> StateDict:
        """Return full tensors; with ``rank0_only`` an empty dict on all ranks except 0."""
        state = self.all.full(rank0_only=rank0_only, to_host=self.to_host)
        return {} if rank0_only and self.mesh.rank > 0 else {"state": state, "param_groups": self.groups}

    def sharded(self) -> StateDict:
        """Return this rank's parts, for torch's distributed checkpoints."""
        return self._by_rank(state_as_part)

    def local(self) -> StateDict:
        """Return this rank's rows."""
        return self._by_rank(lambda part, held, comm: held)

    def _by_rank(self, as_value: Callable[[StatePart, torch.Tensor, Comm], torch.Tensor]) -> StateDict:
        state: dict[str, dict[str, Any]] = {}
        for name, of_param in self.all.states.items():
            one = self.all.own[name]
            state[name] = dict(of_param)
            for key, value in of_param.items():
                if isinstance(value, Described):
                    state[name][key] = self._part(one, key, value, as_value)
        return {"state": state, "param_groups": self.groups}

    def _part(
        self,
        one: Stepped,
        key: str,
        value: Described,
        as_value: Callable[[StatePart, torch.Tensor, Comm], torch.Tensor],
    ) -> torch.Tensor:
        part = one.part_of_saved(key, value.shape)
        if part is None:
            raise InvariantError(f"{key} of {one.local.name} is a number but was described as a tensor.")
        held = one.state.get(key)
        if held is None:
            held = torch.empty(part.local_shape, dtype=value.dtype, device=one.param.device)
        held = held.detach().to("cpu", copy=True) if self.to_host else held.detach().clone()
        return as_value(part, held, comm_of(one.param))


def _stepped(root: nn.Module, optim: Optimizer, given: StateDict | None) -> list[Stepped]:
    """Return the optimizer's parameters in its order, with their state in it, or in ``given``, a state dict of it.

    Raises:
        CheckpointError: A parameter is not the model's, or the state dict is of other parameters.
    """
    by_param = by_parameter(local_tensors(root))
    groups = optim.param_groups
    sizes = [len(group["params"]) for group in groups]
    if given is not None and [len(group["params"]) for group in given["param_groups"]] != sizes:
        raise CheckpointError(
            f"optim_state_dict has groups of {[len(group['params']) for group in given['param_groups']]} parameters, "
            f"but the optimizer has groups of {sizes}. Pass what optim.state_dict() returned."
        )
    found = []
    for number, group in enumerate(groups):
        keys = group["params"] if given is None else given["param_groups"][number]["params"]
        states = optim.state if given is None else given["state"]
        for param, key in zip(group["params"], keys, strict=True):
            found.append(Stepped(local_of(by_param, param), param, states.get(key, {}), group, optim))
    return found
