"""Loading of state dicts by parameter name into optimizers of sharded models, also from distributed checkpoints."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.storage import StorageReader
from torch.optim import Optimizer

from fullshard.comm import Mesh, together
from fullshard.compat.torch_fsdp.optim_save import Contents, StateDict
from fullshard.errors import CheckpointError, ShardingError
from fullshard.optim.shards import comm_of, holds_rows
from fullshard.saving.full_optimizer import group_options
from fullshard.saving.optimizer_state import cut
from fullshard.saving.shard_tensor import ShardTensor, state_as_part
from fullshard.saving.stepped import Stepped, local_of, saved_options
from fullshard.shards import STATE_ON_ALL_RANKS

Source = Literal["own", "local", "rank 0"]
"""Kind of a state dict: full or sharded and on every rank; this rank's rows; or full and on rank 0 only."""


def state_to_load(
    model: nn.Module,
    optim: Optimizer | None,
    groups: Sequence[dict[str, Any]],
    saved: StateDict,
    source: Source,
    group: Any = None,
) -> StateDict:
    """Convert ``saved`` to what ``load_state_dict`` of an optimizer takes on this rank; every rank calls it.

    Args:
        model: The wrapped or sharded model.
        optim: The optimizer, if it exists already.
        groups: Its parameter groups.
        saved: A state dict by parameter name.
        source: The kind of ``saved``.
        group: The model's process group, or None.

    Returns:
        ``{"state": {number: {key: this rank's rows}}, "param_groups": [...]}``.

    Raises:
        CheckpointError: Names or shapes do not match; raised on every rank.
    """
    contents = Contents(model, group)
    mesh, by_param = contents.mesh, contents.by_param

    def own_parameters() -> list[Stepped]:
        states: Mapping[Any, dict[str, Any]] = {} if optim is None else optim.state
        return [
            Stepped(local_of(by_param, param), param, states.get(param, {}), of_group, optim)
            for of_group in groups
            for param in of_group["params"]
        ]

    own = together(mesh, own_parameters)
    if source == "rank 0":
        contents.require_one_state()
        saved = _Scatter(mesh, own).scatter(saved)
    elif source == "own" and "state" in saved:
        saved = _Scatter(mesh, own).cut_anew(saved)
    saved = _with_groups(own, groups, saved)
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


def _with_groups(own: Sequence[Stepped], groups: Sequence[dict[str, Any]], saved: StateDict) -> StateDict:
    """Return ``saved`` with the optimizer's own groups if it has none: the options here are kept."""
    if "state" not in saved or "param_groups" in saved:
        return saved
    names = iter(one.saved_name(saved["state"]) for one in own)
    now = [{**group_options(of_group), "params": [next(names) for _ in of_group["params"]]} for of_group in groups]
    return {**saved, "param_groups": now}


def _cut(own: Sequence[Stepped], saved: StateDict, *, local: bool) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return this rank's part of each parameter's state, and the options it was saved with."""
    if not {"state", "param_groups"} <= saved.keys():
        raise CheckpointError(
            "An optimizer's state dict must have the keys 'state' and 'param_groups'; this one has "
            f"{sorted(map(str, saved))[:5]}. If only rank 0 has it, set FullOptimStateDictConfig(rank0_only=True) or "
            "use scatter_full_optim_state_dict."
        )
    if any(not isinstance(name, str) for group in saved["param_groups"] for name in group["params"]):
        raise CheckpointError(
            "The keys of this optimizer state dict are numbers; a sharded model needs parameter names. Convert it with "
            "rekey_optim_state_dict(state_dict, OptimStateKeyType.PARAM_NAME, unsharded_model)."
        )
    options = {name: group for group in saved["param_groups"] for name in group["params"]}
    cut = []
    for one, its_options in zip(own, saved_options(own, options), strict=True):
        state = saved["state"].get(one.saved_name(saved["state"]), {})
        one.require_same_kind(
            its_options, {key: v.dtype if isinstance(v, ShardTensor) else v for key, v in state.items()}
        )
        # A rank that never steps a parameter, for lack of rows, would let a loaded step count go stale: keep its state.
        part = _local_part if local else _part
        steps = holds_rows(one.param) or hasattr(one.param, STATE_ON_ALL_RANKS)
        new = {key: part(one, key, value) for key, value in state.items()} if steps else one.state
        cut.append((new, copy.deepcopy(its_options)))
    return cut


def _part(one: Stepped, key: str, value: Any) -> Any:
    """Return this rank's part of one full or sharded value of a parameter's state."""
    if not isinstance(value, torch.Tensor):
        return value
    if hasattr(value, "local_shards"):
        raise CheckpointError(
            f"{key!r} of {one.local.name} is a ShardedTensor, as returned by torch's own "
            "load_sharded_optimizer_state_dict. Import that function from fullshard.compat.torch_fsdp instead."
        )
    part = one.part_of_saved(key, value.shape)
    if isinstance(value, ShardTensor) and part is not None:
        try:
            return (
                value.elements(f"{key!r} of {one.local.name}", part.held, comm_of(one.param))
                .clone()
                .view(part.local_shape)
            )
        except ShardingError as error:
            raise CheckpointError(str(error)) from error
    # Cloned: a view would keep the full tensor alive.
    return (value.detach() if part is None else cut(value, part)).clone()


def _local_part(one: Stepped, key: str, value: Any) -> Any:
    """Return a copy of one value of a parameter's state, which must be this rank's part or a number."""
    if not isinstance(value, torch.Tensor):
        return value
    try:
        one.part(key, value)
    except CheckpointError as error:
        raise CheckpointError(
            f"A local state dict can only be loaded with the ranks and units it was saved with: {error}"
        ) from error
    return value.detach().clone()


class _Scatter:
    """Gives each rank its part of a state dict, one tensor at a time: from rank 0, or from ranks with other parts."""

    def __init__(self, mesh: Mesh, own: Sequence[Stepped]) -> None:
        """Create it for the ranks of ``mesh``, of which this one holds ``own``."""
        self.mesh = mesh
        self.own = {name: one for one in own for name in (one.local.name, *one.local.aliases)}

    def scatter(self, saved: StateDict) -> StateDict:
        """Return ``saved`` of rank 0 with this rank's part instead of each full tensor.

        Raises:
            CheckpointError: A shape does not match; raised on every rank.
        """
        first = self.mesh.rank == 0
        outline = self.mesh.all_gather_object(_outline(saved) if first else None)[0]
        sent = [
            (name, key, value)
            for name, of_param in outline.get("state", {}).items()
            for key, value in of_param.items()
            if isinstance(value, _Sent)
        ]
        # Checked before anything is sent, so that all ranks raise the same error.
        for name, key, value in sent:
            if name in self.own:
                self.own[name].part_of_saved(key, value.shape)
        state = {name: dict(of_param) for name, of_param in outline.get("state", {}).items()}
        for name, key, value in sent:
            full = self._broadcast(value, saved["state"][name][key] if first else None)
            state[name][key] = self._part(name, key, full)
        return {**outline, "state": state} if "state" in outline else outline

    def cut_anew(self, saved: StateDict) -> StateDict:
        """Return ``saved`` with this rank's parts of tensors, if some rank has another part than it steps.

        This happens with a state dict of a model with other units; its ranks gather each in one order.
        """
        parts = {
            (name, key): value
            for name in sorted(saved["state"])
            for key, value in saved["state"][name].items()
            if name in self.own and getattr(value, "comm", None) is not None
        }
        if not parts:  # on any rank: whether a value is a part does not depend on the rank
            return saved
        others = [place for place, value in parts.items() if not self._fits(*place, value)]
        state = dict(saved["state"])
        for name, key in sorted({place for of_rank in self.mesh.all_gather_object(others) for place in of_rank}):
            state[name] = {**state[name], key: self._part(name, key, parts[name, key].full_tensor())}
        return {**saved, "state": state}

    def _fits(self, name: str, key: str, value: Any) -> bool:
        part = self.own[name].part_of_saved(key, value.shape)
        if not isinstance(value, ShardTensor):
            return True  # this rank has all elements
        if part is None or value.flat.numel() != part.numel:
            return False
        return part.numel == 0 or value.start == part.held[0]

    def _broadcast(self, sent: _Sent, tensor: torch.Tensor | None) -> torch.Tensor:
        device = self.mesh.device
        if tensor is None:
            full = torch.empty(sent.shape, dtype=sent.dtype, device=device)
        else:
            full = tensor.detach().to(device).contiguous()
        for comm, takes_part in (
            (self.mesh.shard_group, self.mesh.replica_group.rank == 0),
            (self.mesh.replica_group, True),
        ):
            if takes_part:
                comm.broadcast(full).wait()
        return full

    def _part(self, name: str, key: str, full: torch.Tensor) -> torch.Tensor | None:
        one = self.own.get(name)
        part = None if one is None else one.part_of_saved(key, full.shape)
        if part is None or part.numel == full.numel():
            return full if one is not None else None
        return state_as_part(part, cut(full, part).clone())


class _Sent:
    """Placeholder of a tensor that is sent separately."""

    def __init__(self, tensor: torch.Tensor) -> None:
        """Create the placeholder of ``tensor``."""
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype


def _outline(saved: StateDict) -> StateDict:
    """Return ``saved`` with a placeholder instead of each tensor that is not a scalar."""

    def as_sent(value: Any) -> Any:
        return _Sent(value) if isinstance(value, torch.Tensor) and value.ndim > 0 else value

    if "state" not in saved:
        return dict(saved)
    state = {name: {key: as_sent(value) for key, value in of.items()} for name, of in saved["state"].items()}
    return {**saved, "state": state}


def load_sharded_optimizer_state_dict(
    model_state_dict: Mapping[str, Any],
    optimizer_key: str,
    storage_reader: StorageReader,
    planner: LoadPlanner | None = None,
) -> dict[str, Any]:
    """Read an optimizer's state from a distributed checkpoint before its first step; every rank calls it.

    Args:
        model_state_dict: ``model.state_dict()`` under ``StateDictType.SHARDED_STATE_DICT``. Of a tensor with a
            parameter's shape, the elements are read that this rank holds of the parameter. Other tensors are read in
            full.
        optimizer_key: Key of the state in the checkpoint, ``"optimizer"`` in torch's examples.
        storage_reader: Reader of the checkpoint.
        planner: Plan of the read; None: torch's default.

    Returns:
        ``{optimizer_key: {"state": …, "param_groups": …}}``, for ``FSDP.optim_state_dict_to_load``.

    Raises:
        CheckpointError: The checkpoint has no ``optimizer_key``.
    """
    metadata = storage_reader.read_metadata()
    paths = metadata.planner_data or {}
    state = {
        key: _empty(entry, model_state_dict.get(_parameter(paths[key])))
        for key, entry in metadata.state_dict_metadata.items()
        if paths[key][0] == optimizer_key
    }
    if not state:
        known = ", ".join(sorted({str(path[0]) for path in paths.values()}))
        raise CheckpointError(f"The distributed checkpoint has no key {optimizer_key!r}; it has {known}.")
    load(state, storage_reader=storage_reader, planner=planner)
    return unflatten_state_dict(state, {key: paths[key] for key in state})


def _parameter(path: tuple[Any, ...]) -> str:
    """Return the name of the parameter whose state is at ``path``: ``(optimizer_key, "state", name, key)``."""
    return str(path[2]) if len(path) > 2 and path[1] == "state" else ""


def _empty(entry: Any, param: Any) -> Any:
    """Return memory for reading a value: the same share of it as ``param`` is of its parameter."""
    if not isinstance(entry, TensorStorageMetadata):
        return None
    if isinstance(param, ShardTensor) and param.shape == entry.size:
        flat = torch.empty(param.flat.numel(), dtype=entry.properties.dtype, device=param.flat.device)
        return ShardTensor.of(entry.size, param.start, flat, comm=param.comm)
    device = param.device if isinstance(param, torch.Tensor) else "cpu"
    return torch.empty(entry.size, dtype=entry.properties.dtype, device=device)
