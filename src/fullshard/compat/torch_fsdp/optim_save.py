"""State dicts of sharded models' optimizers, by parameter name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fullshard.comm import Comm, together
from fullshard.engine import LocalTensor, local_tensors, mesh_of, plain_name, require_one_state, sharded_roots
from fullshard.errors import CheckpointError, InvariantError, ProcessGroupError, ShardingError
from fullshard.layout import StatePart
from fullshard.optim.shards import comm_of
from fullshard.saving.full_optimizer import Described, StateDict, StatesOfAll, group_options
from fullshard.saving.shard_tensor import state_as_part
from fullshard.saving.stepped import Stepped, by_parameter, local_of


class Contents:
    """The sharded models that a module is, belongs to or holds, and the other parameters, which are full.

    Attributes:
        mesh: The ranks of the sharded models.
        parts: Each sharded model with the prefix of its names in the module, such as ``"layers.0."``.
        by_param: This rank's part of each parameter, under its names in the module, by ``id`` of the Parameter.
    """

    def __init__(self, model: nn.Module, group: Any) -> None:
        """Inspect ``model``; no communication.

        Raises:
            ShardingError: It holds no sharded model, or some over different numbers of ranks.
            ProcessGroupError: ``group`` has another number of ranks.
        """
        roots = sharded_roots(model)
        if not roots:
            raise ShardingError(f"{type(model).__name__} holds no sharded model. Wrap it, or a module in it, first.")
        self.mesh = mesh = mesh_of(roots[0])
        sizes = sorted({mesh_of(root).size for root in roots})
        if len(sizes) > 1:
            raise ShardingError(
                f"{type(model).__name__} holds {len(roots)} models, sharded over {' and '.join(map(str, sizes))} "
                "ranks, which have no common optimizer state. Pass each of them with its own optimizer."
            )
        if group is not None and group.size() not in (mesh.size, mesh.shard_group.size):
            raise ProcessGroupError(
                f"group has {group.size()} ranks, but the model is sharded over {mesh.shard_group.size} of "
                f"{mesh.size}. Leave out group: the model's own is used."
            )
        places = {module: f"{plain}." for path, module in model.named_modules() if (plain := plain_name(path))}
        self.parts = [(places.get(root, ""), root) for root in roots]
        self.by_param: dict[int, LocalTensor] = {}
        for prefix, root in self.parts:
            for identity, local in by_parameter(local_tensors(root)).items():
                names = [prefix + name for name in (local.name, *local.aliases)]
                self.by_param[identity] = replace(local, name=names[0], aliases=tuple(names[1:]))
        if any(prefix for prefix, _ in self.parts):
            self._add_beside(model)

    def require_one_state(self) -> None:
        """Refuse models in which groups of ranks hold parameters of their own."""
        for _, root in self.parts:
            require_one_state(root)

    def _add_beside(self, model: nn.Module) -> None:
        names: dict[nn.Parameter, list[str]] = {}
        for name, param in model.named_parameters(remove_duplicate=False):
            if id(param) not in self.by_param:
                names.setdefault(param, []).append(plain_name(name))
        for param, (name, *aliases) in names.items():
            shape, flat = tuple(param.shape), param.detach().reshape(-1)
            rank, size = self.mesh.rank, self.mesh.size
            self.by_param[id(param)] = LocalTensor(name, tuple(aliases), shape, 0, flat, param, rank, size, param)


class OptimState:
    """State of an optimizer, to be returned as a full, sharded or local state dict; every rank creates it."""

    def __init__(
        self, model: nn.Module, optim: Optimizer, given: StateDict | None, group: Any, *, to_host: bool
    ) -> None:
        """Exchange descriptions of the state, so that all ranks know of every entry.

        Args:
            model: The wrapped or sharded model.
            optim: The optimizer of its parameters.
            given: What ``optim.state_dict()`` returned, to be used instead of the current state; if its groups were
                removed, the result has none.
            group: The model's process group, or None.
            to_host: Put the values in host memory.
        """
        self.contents = contents = Contents(model, group)
        self.mesh, self.to_host = contents.mesh, to_host
        self.without_groups = given is not None and "param_groups" not in given
        if given is not None and self.without_groups:
            given = {**given, "param_groups": optim.state_dict()["param_groups"]}
        groups = optim.param_groups if given is None else given["param_groups"]
        own = together(self.mesh, lambda: _stepped(contents.by_param, optim, given))
        names = iter(one.local.name for one in own)
        self.groups = [
            {**group_options(of_group), "params": [next(names) for _ in of_group["params"]]} for of_group in groups
        ]
        self.parts: list[tuple[str, StatesOfAll]] = []
        beside = {id(one.param): one for one in own}
        for prefix, root in contents.parts:
            inside = by_parameter(local_tensors(root))  # under the names that they have in this sharded model
            here = [beside.pop(identity) for identity in list(beside) if identity in inside]
            renamed = [replace(one, local=inside[id(one.param)]) for one in here]
            self.parts.append((prefix, StatesOfAll(root, renamed)))
        self.beside = list(beside.values())

    def full(self, *, rank0_only: bool) -> StateDict:
        """Return full tensors; with ``rank0_only`` an empty dict on all ranks except 0."""
        if rank0_only:
            self.contents.require_one_state()
        state: dict[str, dict[str, Any]] = {}
        for prefix, part in self.parts:
            of_part = part.full(rank0_only=rank0_only, to_host=self.to_host)
            state |= {prefix + name: of_param for name, of_param in of_part.items()}
        if rank0_only and self.mesh.rank > 0:
            return {}
        return self._with_groups(state)

    def sharded(self) -> StateDict:
        """Return this rank's parts, for torch's distributed checkpoints."""
        self.contents.require_one_state()
        return self._by_rank(state_as_part)

    def local(self) -> StateDict:
        """Return this rank's rows."""
        return self._by_rank(lambda part, held, comm: held)

    def _by_rank(self, as_value: Callable[[StatePart, torch.Tensor, Comm], torch.Tensor]) -> StateDict:
        state: dict[str, dict[str, Any]] = {}
        for prefix, part in self.parts:
            for name, of_param in part.states.items():
                one = part.own[name]
                state[prefix + name] = dict(of_param)
                for key, value in of_param.items():
                    if isinstance(value, Described):
                        state[prefix + name][key] = self._part(one, key, value, as_value)
        return self._with_groups(state)

    def _with_groups(self, state: StateDict) -> StateDict:
        state |= self._beside()
        return {"state": state} if self.without_groups else {"state": state, "param_groups": self.groups}

    def _beside(self) -> dict[str, dict[str, Any]]:
        """Return the state of the parameters outside of the sharded models."""
        return {
            one.local.name: {
                key: self._copied(value) if isinstance(value, torch.Tensor) else value
                for key, value in one.state.items()
            }
            for one in self.beside
            if one.state
        }

    def _copied(self, value: torch.Tensor) -> torch.Tensor:
        return value.detach().to("cpu", copy=True) if self.to_host else value.detach().clone()

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
        return as_value(part, self._copied(held), comm_of(one.param))


def _stepped(by_param: Mapping[int, LocalTensor], optim: Optimizer, given: StateDict | None) -> list[Stepped]:
    """Return the optimizer's parameters in its order, with their state in it, or in ``given``, a state dict of it.

    Raises:
        CheckpointError: A parameter is not the model's, or the state dict is of other parameters.
    """
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
