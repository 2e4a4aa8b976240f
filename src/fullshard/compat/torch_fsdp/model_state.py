"""``state_dict()`` and ``load_state_dict()`` of a sharded model: full, sharded or local."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn

from fullshard.compat.torch_fsdp.api import (
    FullStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
    get_state_dict_type,
)
from fullshard.compat.torch_fsdp.optimizer_hooks import getter_asks
from fullshard.compat.torch_fsdp.tensor import DTensor, place_like
from fullshard.core.comm import Comm, together
from fullshard.core.engine import (
    StateEntry,
    gathered,
    mesh_of,
    plain_name,
    require_one_state,
    sharded_roots,
    state_entries,
)
from fullshard.core.optim.shards import comm_of, everyone_of
from fullshard.core.shards import rows_of, run_of
from fullshard.core.torch_private import incompatible_keys
from fullshard.errors import ShardingError
from fullshard.state.saving.shard_tensor import ShardTensor, part_or_full

_EXTRA = "_extra_state"
_PLACE = "fullshard_place"
"""Attribute of the values of a local state dict; torch.save keeps it."""


def model_state_dict(
    module: nn.Module, *args: Any, destination: dict[str, Any] | None = None, prefix: str = "", keep_vars: bool = False
) -> dict[str, Any]:
    """Return the state dict of a sharded model or of a module inside it; every rank calls it.

    ``set_state_dict_type`` sets the kind. SHARDED and LOCAL need no communication.

    Args:
        module: A wrapper, a sharded model or a module inside.
        args: ``destination``, ``prefix`` and ``keep_vars`` by position, as in older torch.
        destination: A dict to add to; None: a new one.
        prefix: Put before every name.
        keep_vars: No effect: values are never the Parameters.

    Returns:
        The unwrapped module's names in their order, including tied ones, with

        - FULL: copies of full tensors in the shards' dtype, on the model's device, or in host memory with
          ``offload_to_cpu`` (then at most one unit is full on the device at a time); with ``rank0_only``, an empty dict
          on all ranks except 0;
        - SHARDED: this rank's rows as :class:`ShardTensor`, for ``torch.distributed.checkpoint``: copies of them, with
          ``fully_shard`` the rows themselves;
        - LOCAL: this rank's rows themselves.

        What is not sharded (ignored parameters, buffers) is full in all three.

    Raises:
        ShardingError: The module is not part of a sharded model, only rank 0 has the full parameters, or parameters
            are a group's own (experts): only FULL on all ranks and LOCAL have them.
    """
    by_place = dict(zip(("destination", "prefix"), args, strict=False))
    destination, prefix = by_place.get("destination", destination), by_place.get("prefix", prefix)
    kind, config = _requested(module)
    entries = state_entries(module)
    if kind is StateDictType.SHARDED_STATE_DICT or getattr(config, "rank0_only", False):
        require_one_state(sharded_roots(module)[0])
    if kind is StateDictType.FULL_STATE_DICT:
        values = _full(module, entries, config)
    elif kind is StateDictType.SHARDED_STATE_DICT:
        values = [_sharded(entry) for entry in entries]
    else:
        values = [rows_of(_shard_of(entry)) for entry in entries]
    found = OrderedDict() if destination is None else destination
    if values is None:
        return found
    if config.offload_to_cpu:
        values = [value.cpu() for value in values]
    if kind is StateDictType.LOCAL_STATE_DICT:
        for entry, value in zip(entries, values, strict=True):
            if entry.meta is not None:
                setattr(value, _PLACE, _place_of(entry))
    names = [entry.name for entry in entries]
    found.update(_in_module_order(module, dict(zip(names, values, strict=True)), prefix))
    return found


def _requested(module: nn.Module) -> tuple[StateDictType, Any]:
    """Return the kind of state dict and its settings: those of torch's getter if one calls, else the set ones."""
    if getter_asks():  # as torch's getters do with its FSDP1, whatever type was set
        return StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig()
    settings = get_state_dict_type(module)
    return settings.state_dict_type, settings.state_dict_config


def _in_module_order(module: nn.Module, tensors: dict[str, Any], prefix: str) -> dict[str, Any]:
    """Return ``tensors`` and the extra states under prefixed names, in the order of ``nn.Module.state_dict()``."""
    values = tensors | {name: owner.get_extra_state() for name, owner in _extra_states(module).items()}
    order = {plain_name(path): place for place, (path, _) in enumerate(module.named_modules(remove_duplicate=False))}
    names = sorted(values, key=lambda name: order[name.rpartition(".")[0]])
    return {prefix + name: values[name] for name in names}


def _full(module: nn.Module, entries: Sequence[StateEntry], config: Any) -> list[torch.Tensor] | None:
    """Return the full tensors; None on ranks that ``rank0_only`` leaves without them."""
    root = sharded_roots(module)[0]
    rank0_only = isinstance(config, FullStateDictConfig) and config.rank0_only
    shards = {entry.meta.name: entry.tensor for entry in entries if entry.meta is not None}
    dtypes = {name: shard.dtype for name, shard in shards.items()}
    full: dict[str, torch.Tensor] = {}
    for lane in gathered(root, shards, dtypes, rank0_only=rank0_only):
        for name, tensor in lane.items():
            full[name] = tensor.to("cpu", copy=True) if config.offload_to_cpu else tensor.clone()
    if rank0_only and mesh_of(root).rank > 0:
        return None
    return [entry.tensor.detach().clone() if entry.meta is None else full[entry.meta.name] for entry in entries]


def _sharded(entry: StateEntry) -> torch.Tensor:
    tensor = _shard_of(entry)
    if entry.meta is None:
        return tensor.detach().clone()
    start, stop = entry.meta.element_range
    param = cast("nn.Parameter", tensor)
    comm = everyone_of(param) if entry.meta.block is not None else comm_of(param)
    rows = rows_of(tensor).reshape(-1)
    # Version 2's values are the parameters' memory, as a module's are: dcp.load(model.state_dict()) loads the model.
    flat = rows if "placements" in vars(tensor) else rows.clone()
    part = part_or_full(entry.shape, start, flat, comm=comm, block=entry.meta.block)
    return place_like(part, tensor, (start, stop))


def _shard_of(entry: StateEntry) -> torch.Tensor:
    """Return this rank's shard.

    Raises:
        ShardingError: Full parameters are registered on the module.
    """
    if entry.is_full:
        raise ShardingError(
            "SHARDED_STATE_DICT and LOCAL_STATE_DICT consist of shards, but full parameters are registered on the "
            "module: call state_dict() outside of summon_full_params, or with FULL_STATE_DICT."
        )
    return entry.tensor


def _extra_states(module: nn.Module) -> dict[str, nn.Module]:
    """Return the modules with extra state, by its name in the state dict."""
    return {
        plain_name(f"{path}.{_EXTRA}" if path else _EXTRA): owner
        for path, owner in module.named_modules(remove_duplicate=False)
        if type(owner).get_extra_state is not nn.Module.get_extra_state
    }


def load_model_state_dict(
    module: nn.Module,
    state_dict: Mapping[str, Any],
    strict: bool = True,  # noqa: FBT001, FBT002 (torch's signature)
    assign: bool = False,  # noqa: FBT001, FBT002
) -> Any:
    """Load a state dict of the kind that ``set_state_dict_type`` set; every rank calls it.

    Args:
        module: A wrapper, a sharded model or a module inside.
        state_dict: What :func:`model_state_dict` returned for the same module. FULL: of any model with these names, the
            same on every rank; each rank copies its rows. SHARDED and LOCAL: of a model with the same sharding (to load
            a sharded one on other ranks use ``torch.distributed.checkpoint.load``). A tied parameter may have any of
            its names.
        strict: Whether names must match exactly.
        assign: Without effect where all values are parts, which are copied into the shards; else must be False.

    Returns:
        ``missing_keys`` and ``unexpected_keys``.

    Raises:
        ShardingError: Names (if strict) or a shape do not match; raised on every rank before anything is changed.
    """
    if assign and any(isinstance(v, torch.Tensor) and not isinstance(v, DTensor) for v in state_dict.values()):
        raise ShardingError(
            "load_state_dict(assign=True) would replace the shards with full tensors. Leave out assign: each rank "
            "copies its rows."
        )
    kind = get_state_dict_type(module).state_dict_type
    if getter_asks():
        kind = StateDictType.SHARDED_STATE_DICT
        # torch's setters insert the model's own parameters for names that the given state lacks.
        state_dict = {name: value for name, value in state_dict.items() if not hasattr(value, "shard_meta")}
    root = sharded_roots(module)[0]
    copies, missing, unexpected = together(mesh_of(root), lambda: _plan(module, state_dict, kind, strict=strict))
    with torch.no_grad():
        for target, source in copies:
            target.copy_(source)
    for name, owner in _extra_states(module).items():
        if name in state_dict:
            owner.set_extra_state(state_dict[name])
    return incompatible_keys(missing, unexpected)


def _plan(
    module: nn.Module, state: Mapping[str, Any], kind: StateDictType, *, strict: bool
) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], list[str], list[str]]:
    """Return (target, source) pairs to copy, the missing names and the unexpected ones."""
    part = _local_part if kind is StateDictType.LOCAL_STATE_DICT else _rows
    names: dict[int, list[str]] = {}
    entries = state_entries(module)
    for entry in entries:
        names.setdefault(id(entry.tensor), []).append(entry.name)
    copies, problems = [], []
    missing = [name for name in _extra_states(module) if name not in state]
    for entry in {id(entry.tensor): entry for entry in reversed(entries)}.values():
        given = [name for name in names[id(entry.tensor)] if name in state]
        missing += [] if given else [entry.name]
        for name in given[:1]:
            try:
                copies.append((entry.tensor.detach(), part(entry, name, state[name])))
            except ShardingError as error:
                problems.append(str(error).removesuffix("."))
    known = {entry.name for entry in entries} | set(_extra_states(module))
    unexpected = [name for name in state if name not in known]
    if strict and missing:
        problems.append(f"missing: {', '.join(missing)}")
    if strict and unexpected:
        problems.append(f"unexpected: {', '.join(unexpected)}")
    if problems:
        raise ShardingError(f"This state dict does not fit {type(module).__name__}: {'; '.join(problems)}.")
    return copies, missing, unexpected


def _rows(entry: StateEntry, name: str, value: torch.Tensor) -> torch.Tensor:
    """Return the elements of a full or sharded value that belong to what is registered on the module."""
    if tuple(value.shape) != entry.shape:
        raise ShardingError(f"{name} has shape {tuple(value.shape)} where the model has {entry.shape}")
    if entry.meta is None:
        return value
    start, stop = entry.meta.element_range
    if isinstance(value, ShardTensor):
        comm: Comm | None = getattr(entry.tensor, "shard_comm", None)
        return value.elements(name, (start, stop), comm, entry.meta.block).view(entry.tensor.shape)
    # Not by value's methods: a lazily read value of Lightning supports functions only.
    rows = run_of(value, entry.meta.block, start, stop).view(entry.tensor.shape)
    return rows if isinstance(value, torch.Tensor) else rows.clone()  # or all tensors would be in memory until copied


def _place_of(entry: StateEntry) -> tuple[int, ...]:
    """Return this rank, the number of ranks, and this rank's elements, which a pickled local state dict records."""
    comm = everyone_of(cast("nn.Parameter", entry.tensor))
    assert entry.meta is not None
    return (comm.rank, comm.size, *entry.meta.element_range)


def _local_part(entry: StateEntry, name: str, value: torch.Tensor) -> torch.Tensor:
    rule = "a local state dict can only be loaded with the ranks and units it was saved with"
    saved: tuple[int, ...] | None = getattr(value, _PLACE, None)
    if entry.meta is not None and saved is not None and saved != (here := _place_of(entry)):
        theirs, ours = (f"elements {p[2]} to {p[3]} (rank {p[0]} of {p[1]})" for p in (saved, here))
        raise ShardingError(f"{name} has {theirs}, but this rank holds {ours}: {rule}")
    if value.shape != entry.tensor.shape:
        raise ShardingError(
            f"{name} has shape {tuple(value.shape)} but this rank's rows have shape {tuple(entry.tensor.shape)}: {rule}"
        )
    return value
