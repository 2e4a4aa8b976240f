"""State dicts of sharded models' optimizers by parameter name: what is saved, what is loaded, FSDP1's functions."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.storage import StorageReader
from torch.optim import Optimizer

from fullshard.compat.torch_fsdp.api import OptimStateKeyType, StateDictType, get_state_dict_type
from fullshard.core.comm import Comm, Mesh, together
from fullshard.core.engine import (
    LocalTensor,
    local_tensors,
    mesh_of,
    plain_name,
    require_one_state,
    require_undivided,
    sharded_roots,
)
from fullshard.core.layout import StatePart
from fullshard.core.optim.shards import comm_of, holds_rows
from fullshard.core.shards import STATE_ON_ALL_RANKS
from fullshard.core.torch_private import unflatten
from fullshard.errors import CheckpointError, InvariantError, ProcessGroupError, ShardingError
from fullshard.state.saving.optimizer_state import StateDict, StatesOfAll, TensorPlaceholder, cut, group_options
from fullshard.state.saving.parameter_state import ParameterState, by_parameter, local_of, saved_options
from fullshard.state.saving.shard_tensor import ShardTensor, state_as_part


class Contents:
    """The sharded models that a module is, belongs to or holds, and the other parameters, which are full.

    Attributes:
        mesh: The ranks of the sharded models.
        parts: Each sharded model with the prefix of its names in the module, such as ``"layers.0."``.
        by_param: This rank's part of each parameter, under its names in the module, by ``id`` of the Parameter.
        beside: ``id`` of the parameters outside of the sharded models.
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
        for root in roots:
            require_undivided(root, "optim_state_dict() of FSDP1")
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
        self.beside: set[int] = set()
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
        self.beside = set(map(id, names))
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
                    if isinstance(value, TensorPlaceholder):
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
        one: ParameterState,
        key: str,
        value: TensorPlaceholder,
        as_value: Callable[[StatePart, torch.Tensor, Comm], torch.Tensor],
    ) -> torch.Tensor:
        part = one.part_of_saved(key, value.shape)
        if part is None:
            raise InvariantError(f"{key} of {one.local.name} is a number but was described as a tensor.")
        held = one.state.get(key)
        if held is None:
            held = torch.empty(part.local_shape, dtype=value.dtype, device=one.param.device)
        return as_value(part, self._copied(held), comm_of(one.param))


def _stepped(by_param: Mapping[int, LocalTensor], optim: Optimizer, given: StateDict | None) -> list[ParameterState]:
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
            found.append(ParameterState(local_of(by_param, param), param, states.get(key, {}), group, optim))
    return found


Source = Literal["own", "local", "rank 0"]
"""Kind of a state dict: full or sharded and on every rank; this rank's rows; or full and on rank 0 only."""


def state_to_load(
    model: nn.Module,
    optim: Optimizer | None,
    groups: Sequence[dict[str, Any]],
    saved: StateDict,
    source: Source,
    group: Any = None,
    *,
    complete: bool = False,
) -> StateDict:
    """Convert ``saved`` to what ``load_state_dict`` of an optimizer takes on this rank; every rank calls it.

    Args:
        model: The wrapped or sharded model.
        optim: The optimizer, if it exists already.
        groups: Its parameter groups.
        saved: A state dict by parameter name.
        source: The kind of ``saved``.
        group: The model's process group, or None.
        complete: Whether parameters outside of the sharded models must have been saved too.

    Returns:
        ``{"state": {number: {key: this rank's rows}}, "param_groups": [...]}``. As in torch, the numbers of parameters
        outside of the sharded models that were not saved are left out, for the caller to add, unless ``complete``.

    Raises:
        CheckpointError: Names or shapes do not match; raised on every rank.
    """
    contents = Contents(model, group)
    mesh, by_param = contents.mesh, contents.by_param

    def own_parameters() -> list[ParameterState]:
        states: Mapping[Any, dict[str, Any]] = {} if optim is None else optim.state
        return [
            ParameterState(local_of(by_param, param), param, states.get(param, {}), of_group, optim)
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
    beside = set() if complete else contents.beside
    loaded = together(mesh, lambda: _cut(own, saved, beside, local=source == "local"))
    new: StateDict = {"state": {}, "param_groups": []}
    number = 0
    for of_group in groups:
        numbers = [one for one in range(number, number + len(of_group["params"])) if one in loaded]
        options = loaded[number][1] if numbers else {}
        new["param_groups"].append({**group_options(of_group), **options, "params": numbers})
        new["state"] |= {one: loaded[one][0] for one in numbers if loaded[one][0]}
        number += len(of_group["params"])
    return new


def _with_groups(own: Sequence[ParameterState], groups: Sequence[dict[str, Any]], saved: StateDict) -> StateDict:
    """Return ``saved`` with the optimizer's own groups if it has none: the options here are kept."""
    if "state" not in saved or "param_groups" in saved:
        return saved
    names = iter(one.saved_name(saved["state"]) for one in own)
    now = [{**group_options(of_group), "params": [next(names) for _ in of_group["params"]]} for of_group in groups]
    return {**saved, "param_groups": now}


def _cut(
    own: Sequence[ParameterState], saved: StateDict, beside: set[int], *, local: bool
) -> dict[int, tuple[dict[str, Any], dict[str, Any]]]:
    """Return this rank's part of each parameter's state, and the options it was saved with, by its number.

    Parameters outside of the sharded models (``beside``, their ``id``) that were not saved are left out.
    """
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
    numbered = {
        number: one
        for number, one in enumerate(own)
        if id(one.param) not in beside or one.saved_name(options) in options
    }
    cut = {}
    for (number, one), its_options in zip(
        numbered.items(), saved_options(list(numbered.values()), options), strict=True
    ):
        state = saved["state"].get(one.saved_name(saved["state"]), {})
        one.require_same_kind(
            its_options, {key: v.dtype if isinstance(v, ShardTensor) else v for key, v in state.items()}
        )
        # A rank that never steps a parameter, for lack of rows, would let a loaded step count go stale: keep its state.
        part = _local_part if local else _part
        steps = holds_rows(one.param) or hasattr(one.param, STATE_ON_ALL_RANKS)
        new = {key: part(one, key, value) for key, value in state.items()} if steps else one.state
        cut[number] = (new, copy.deepcopy(its_options))
    return cut


def _part(one: ParameterState, key: str, value: Any) -> Any:
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


def _local_part(one: ParameterState, key: str, value: Any) -> Any:
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

    def __init__(self, mesh: Mesh, own: Sequence[ParameterState]) -> None:
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
    return unflatten(state, {key: paths[key] for key in state})


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


OptimInput = list[dict[str, Any]] | Iterable[nn.Parameter] | None


def optim_state_dict(
    model: nn.Module, optim: Optimizer, optim_state_dict: StateDict | None = None, group: Any = None
) -> StateDict:
    """Return the optimizer's state by parameter name; every rank calls it. ``set_state_dict_type`` sets the kind.

    Args:
        model: The wrapped or sharded model.
        optim: The optimizer of its parameters.
        optim_state_dict: What ``optim.state_dict()`` returned, to be used instead of the current state.
        group: The model's process group; not needed.

    Returns:
        ``{"state": {name: {key: value}}, "param_groups": [{..., "params": [names]}]}``. FULL: the state of an unsharded
        optimizer, on every rank, or with ``rank0_only`` on rank 0 (``{}`` on others); SHARDED: this rank's part of each
        tensor as :class:`ShardTensor`; LOCAL: this rank's part as a plain tensor. Scalars, such as ``step``, are the
        same in all three. Values are in host memory with ``offload_to_cpu``, the default except for LOCAL.

    Raises:
        CheckpointError: A state tensor whose place in the full state is unknown, or a parameter that is not the
            model's.
        ProcessGroupError: ``group`` is not the model's.
    """
    settings = get_state_dict_type(model)
    config = settings.optim_state_dict_config
    state = OptimState(model, optim, optim_state_dict, group, to_host=config.offload_to_cpu)
    if settings.state_dict_type is StateDictType.FULL_STATE_DICT:
        return state.full(rank0_only=getattr(config, "rank0_only", False))
    return state.sharded() if settings.state_dict_type is StateDictType.SHARDED_STATE_DICT else state.local()


def full_optim_state_dict(
    model: nn.Module,
    optim: Optimizer,
    optim_input: OptimInput = None,
    rank0_only: bool = True,  # noqa: FBT001, FBT002 (torch's signature)
    group: Any = None,
) -> StateDict:
    """Return the full :func:`optim_state_dict` in host memory; every rank calls it. ``optim_input`` is not needed."""
    _not_needed(optim_input)
    return OptimState(model, optim, None, group, to_host=True).full(rank0_only=rank0_only)


def sharded_optim_state_dict(model: nn.Module, optim: Optimizer, group: Any = None) -> StateDict:
    """Return the sharded :func:`optim_state_dict` in host memory; every rank calls it."""
    return OptimState(model, optim, None, group, to_host=True).sharded()


def optim_state_dict_to_load(
    model: nn.Module,
    optim: Optimizer,
    optim_state_dict: StateDict,
    is_named_optimizer: bool = False,  # noqa: FBT001, FBT002 (torch's signature)
    load_directly: bool = False,  # noqa: FBT001, FBT002
    group: Any = None,
) -> StateDict:
    """Convert what :func:`optim_state_dict` returned to what ``optim.load_state_dict`` takes; every rank calls it.

    It may come from any number of ranks. A full state dict must be on every rank, or with ``rank0_only`` on rank 0.
    A parameter keeps its place in the groups of ``optim``, and gets the options it was saved with.

    Args:
        model: The wrapped or sharded model.
        optim: The optimizer of its parameters.
        optim_state_dict: Full, sharded or local, by names of the unwrapped model; a tied parameter may have any of its
            names.
        is_named_optimizer: Whether the keys of ``optim.state_dict()`` are parameter names.
        load_directly: Also load the result into ``optim``.
        group: The model's process group; not needed.

    Returns:
        ``{"state": {number: {key: this rank's rows}}, "param_groups": [...]}``. As in torch, the numbers of parameters
        outside of the sharded models that were not saved are left out, for the caller to add; with ``load_directly``
        they are an error.

    Raises:
        CheckpointError: Names or shapes do not match; raised on every rank.
        ProcessGroupError: ``group`` is not the model's.
    """
    settings = get_state_dict_type(model)
    source: Source = "local" if settings.state_dict_type is StateDictType.LOCAL_STATE_DICT else "own"
    if getattr(settings.optim_state_dict_config, "rank0_only", False):
        source = "rank 0"
    result = state_to_load(model, optim, optim.param_groups, optim_state_dict, source, group, complete=load_directly)
    if is_named_optimizer:
        result = rekey_optim_state_dict(result, OptimStateKeyType.PARAM_NAME, model, optim=optim)
    if load_directly:
        optim.load_state_dict(result)
    return result


def shard_full_optim_state_dict(
    full_optim_state_dict: StateDict, model: nn.Module, optim_input: OptimInput = None, optim: Optimizer | None = None
) -> StateDict:
    """Convert a full state dict that every rank has, as :func:`optim_state_dict_to_load` does.

    Without ``optim`` the result is for an optimizer created from ``optim_input``, default ``model.parameters()``.
    """
    return state_to_load(model, optim, _groups(model, optim_input, optim), full_optim_state_dict, "own")


def flatten_sharded_optim_state_dict(
    sharded_optim_state_dict: StateDict, model: nn.Module, optim: Optimizer
) -> StateDict:
    """Convert what :func:`sharded_optim_state_dict` returned, as :func:`optim_state_dict_to_load` does."""
    return state_to_load(model, optim, optim.param_groups, sharded_optim_state_dict, "own")


def scatter_full_optim_state_dict(
    full_optim_state_dict: StateDict | None,
    model: nn.Module,
    optim_input: OptimInput = None,
    optim: Optimizer | None = None,
    group: Any = None,
) -> StateDict:
    """Convert a full state dict of rank 0 as :func:`shard_full_optim_state_dict` does; other ranks' is ignored."""
    groups = _groups(model, optim_input, optim)
    return state_to_load(model, optim, groups, full_optim_state_dict or {}, "rank 0", group)


def rekey_optim_state_dict(
    optim_state_dict: StateDict,
    optim_state_key_type: OptimStateKeyType,
    model: nn.Module,
    optim_input: OptimInput = None,
    optim: Optimizer | None = None,
) -> StateDict:
    """Return the state dict with names instead of numbers as keys, or the reverse; no communication.

    To load the state of an unsharded optimizer into a sharded one, convert it to names and call
    ``shard_full_optim_state_dict``. For the reverse, convert a full one to numbers and call ``load_state_dict``.

    Args:
        optim_state_dict: With either kind of keys; returned unchanged if they already are of the requested kind.
        optim_state_key_type: The requested kind.
        model: The model that defines names and order, sharded or not.
        optim_input: What the optimizer was created from; None: ``model.parameters()``.
        optim: The optimizer; if given it defines the order.

    Raises:
        CheckpointError: Keys are names and numbers mixed, or one is not the model's.
    """
    groups = optim_state_dict["param_groups"]
    kinds = {type(key) for group in groups for key in group["params"]} | {
        type(key) for key in optim_state_dict["state"]
    }
    if len(kinds) > 1 or not kinds <= {str, int}:
        raise CheckpointError(f"Keys of an optimizer state dict must be all names or all numbers; got {kinds}.")
    if kinds <= {str if optim_state_key_type is OptimStateKeyType.PARAM_NAME else int}:
        return optim_state_dict
    named = [(plain_name(name), id(p)) for name, p in model.named_parameters(remove_duplicate=False)]
    params = (param for group in _groups(model, optim_input, optim) for param in group["params"])
    numbers = {id(param): number for number, param in enumerate(params)}
    pairs = [(name, numbers[identity]) for name, identity in named if identity in numbers]
    if optim_state_key_type is OptimStateKeyType.PARAM_NAME:
        new: dict[Any, Any] = {number: name for name, number in reversed(pairs)}  # the first of tied names
    else:
        new = dict(pairs)
    unknown = [key for group in groups for key in group["params"] if key not in new]
    if unknown:
        raise CheckpointError(f"{type(model).__name__} and its optimizer have no parameters {unknown[:5]}.")
    return {
        "state": {new[key]: value for key, value in optim_state_dict["state"].items()},
        "param_groups": [
            {**group_options(group), "params": sorted(new[key] for key in group["params"])} for group in groups
        ],
    }


def _groups(model: nn.Module, optim_input: OptimInput, optim: Optimizer | None) -> list[dict[str, Any]]:
    """Return the parameter groups of ``optim``, or of an optimizer created from ``optim_input``."""
    _not_needed(optim_input)
    if optim is not None:
        return optim.param_groups
    given = list(model.parameters() if optim_input is None else optim_input)
    if any(isinstance(one, dict) for one in given):
        return [{**one, "params": list(one["params"])} for one in given]  # type: ignore[index]
    return [{"params": given}]


def _not_needed(optim_input: OptimInput) -> None:
    if optim_input is not None:
        warnings.warn(
            "The `optim_input` argument is deprecated, as in torch: pass optim=, with which it has no effect.",
            FutureWarning,
            stacklevel=3,
        )
