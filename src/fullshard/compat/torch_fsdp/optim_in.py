"""A state dict by parameter name on its way into the optimizer of a sharded model."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from fullshard.comm import Mesh, together
from fullshard.compat.torch_fsdp.optim_out import StateDict, root_and_ranks
from fullshard.engine import local_tensors
from fullshard.errors import CheckpointError, ShardingError
from fullshard.saving.full_optimizer import group_options
from fullshard.saving.optimizer_state import cut
from fullshard.saving.shard_tensor import ShardTensor, state_as_part
from fullshard.saving.stepped import Stepped, by_parameter, local_of, saved_options

Source = Literal["own", "local", "rank 0"]
"""What a state dict is: full or sharded, this rank's own; this rank's rows; or full, and on rank 0 only."""


def state_to_load(
    model: nn.Module,
    optim: Optimizer | None,
    groups: Sequence[dict[str, Any]],
    saved: StateDict,
    source: Source,
    group: Any = None,
) -> StateDict:
    """What ``load_state_dict`` of an optimizer with ``groups`` takes on this rank; every rank calls it.

    Args:
        model: The wrapped or sharded model.
        optim: The optimizer, where there is one already.
        groups: Its parameter groups.
        saved: A state dict by parameter name.
        source: Where ``saved`` comes from.
        group: The model's process group; it knows it already.

    Returns:
        ``{"state": {number: {key: this rank's rows}}, "param_groups": [...]}``.

    Raises:
        CheckpointError: Names or shapes do not fit; on every rank.
    """
    root, mesh = root_and_ranks(model, group)
    by_param = by_parameter(local_tensors(root))

    def own_parameters() -> list[Stepped]:
        states: Mapping[Any, dict[str, Any]] = {} if optim is None else optim.state
        return [
            Stepped(local_of(by_param, param), param, states.get(param, {}), of_group, optim)
            for of_group in groups
            for param in of_group["params"]
        ]

    own = together(mesh, own_parameters)
    if source == "rank 0":
        saved = _Scattered(mesh, own).take(saved)
    loaded = together(mesh, lambda: _cut(own, saved, local=source == "local"))
    new: StateDict = {"state": {}, "param_groups": []}
    number = 0
    for of_group in groups:
        numbers = list(range(number, number + len(of_group["params"])))
        options = loaded[number][1] if numbers else {}
        new["param_groups"].append({**group_options(of_group), **options, "params": numbers})
        new["state"] |= {one: loaded[one][0] for one in numbers if loaded[one][0]}
        number += len(numbers)
    return new


def _cut(own: Sequence[Stepped], saved: StateDict, *, local: bool) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """This rank's part of each parameter's state, and the options it was saved with."""
    if not {"state", "param_groups"} <= saved.keys():
        raise CheckpointError(
            "An optimizer's state dict has the keys 'state' and 'param_groups'; this one has "
            f"{sorted(map(str, saved))[:5]}. Where rank 0 alone has it, say so: FullOptimStateDictConfig(rank0_only="
            "True), or scatter_full_optim_state_dict."
        )
    if any(not isinstance(name, str) for group in saved["param_groups"] for name in group["params"]):
        raise CheckpointError(
            "This optimizer state dict numbers its parameters, and numbers mean nothing to a sharded model: turn them "
            "into names first, rekey_optim_state_dict(state_dict, OptimStateKeyType.PARAM_NAME, unsharded_model)."
        )
    options = {name: group for group in saved["param_groups"] for name in group["params"]}
    cut = []
    for one, its_options in zip(own, saved_options(own, options), strict=True):
        state = saved["state"].get(one.saved_name(saved["state"]), {})
        one.require_same_kind(
            its_options, {key: v.dtype if isinstance(v, ShardTensor) else v for key, v in state.items()}
        )
        # What this rank holds nothing of stays as it is: its steps would not be counted on.
        part = _local_part if local else _part
        new = {key: part(one, key, value) for key, value in state.items()} if one.param.numel() else one.state
        cut.append((new, copy.deepcopy(its_options)))
    return cut


def _part(one: Stepped, key: str, value: Any) -> Any:
    """This rank's part of one value of a parameter's state, full or sharded."""
    if not isinstance(value, torch.Tensor):
        return value
    if hasattr(value, "local_shards"):
        raise CheckpointError(
            f"{key!r} of {one.local.name} is a ShardedTensor, cut evenly over ranks: torch's own "
            "load_sharded_optimizer_state_dict reads these. Import that name from fullshard.compat.torch_fsdp."
        )
    part = one.part_of_saved(key, value.shape)
    if isinstance(value, ShardTensor) and part is not None:
        try:
            return value.elements(f"{key!r} of {one.local.name}", part.held).clone().view(part.local_shape)
        except ShardingError as error:
            raise CheckpointError(str(error)) from error
    # A copy: a view would keep the whole alive.
    return (value.detach() if part is None else cut(value, part)).clone()


def _local_part(one: Stepped, key: str, value: Any) -> Any:
    """One value of a parameter's state that is this rank's part, or one number."""
    if not isinstance(value, torch.Tensor):
        return value
    try:
        one.part(key, value)
    except CheckpointError as error:
        raise CheckpointError(f"A local state dict fits the ranks and units that it was made with: {error}") from error
    return value.detach().clone()


class _Scattered:
    """A full state dict on its way from rank 0 to where its rows are wanted, one tensor at a time."""

    def __init__(self, mesh: Mesh, own: Sequence[Stepped]) -> None:
        """Bring it to the ranks of ``mesh``, which hold ``own``."""
        self.mesh = mesh
        self.own = {name: one for one in own for name in (one.local.name, *one.local.aliases)}

    def take(self, saved: StateDict) -> StateDict:
        """The same with this rank's part in place of each large tensor.

        Raises:
            CheckpointError: It does not fit.
        """
        first = self.mesh.rank == 0
        outline = self.mesh.all_gather_object(_outline(saved) if first else None)[0]
        sent = [
            (name, key, value)
            for name, of_param in outline.get("state", {}).items()
            for key, value in of_param.items()
            if isinstance(value, _Sent)
        ]
        # Before anything is on its way: on every rank, and alike.
        for name, key, value in sent:
            if name in self.own:
                self.own[name].part_of_saved(key, value.shape)
        state = {name: dict(of_param) for name, of_param in outline.get("state", {}).items()}
        for name, key, value in sent:
            whole = self._broadcast(value, saved["state"][name][key] if first else None)
            state[name][key] = self._held(name, key, whole)
        return {**outline, "state": state} if "state" in outline else outline

    def _broadcast(self, sent: _Sent, tensor: torch.Tensor | None) -> torch.Tensor:
        device = self.mesh.device
        if tensor is None:
            whole = torch.empty(sent.shape, dtype=sent.dtype, device=device)
        else:
            whole = tensor.detach().to(device).contiguous()
        for comm, takes_part in (
            (self.mesh.shard_group, self.mesh.replica_group.rank == 0),
            (self.mesh.replica_group, True),
        ):
            if takes_part:
                comm.broadcast(whole).wait()
        return whole

    def _held(self, name: str, key: str, whole: torch.Tensor) -> torch.Tensor | None:
        one = self.own.get(name)
        part = None if one is None else one.part_of_saved(key, whole.shape)
        if part is None or part.numel == whole.numel():
            return whole if one is not None else None
        return state_as_part(part, cut(whole, part).clone())


class _Sent:
    """Stands for a tensor that is sent on its own."""

    def __init__(self, tensor: torch.Tensor) -> None:
        """Note what ``tensor`` is like."""
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype


def _outline(saved: StateDict) -> StateDict:
    """A state dict with a word in place of each tensor that is not one number."""

    def as_sent(value: Any) -> Any:
        return _Sent(value) if isinstance(value, torch.Tensor) and value.ndim > 0 else value

    if "state" not in saved:
        return dict(saved)
    state = {name: {key: as_sent(value) for key, value in of.items()} for name, of in saved["state"].items()}
    return {**saved, "state": state}
