"""``state_dict()`` and ``load_state_dict()`` of a sharded model, full, sharded or local."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from fullshard.comm import Comm, together
from fullshard.compat.torch_fsdp.api import FullStateDictConfig, StateDictType
from fullshard.compat.torch_fsdp.state_dict_type import get_state_dict_type
from fullshard.compat.torch_fsdp.torch_getters import asking_getter, keeps_on_rank0_only, nothing_of
from fullshard.engine import StateEntry, gathered, mesh_of, plain_name, sharded_roots, state_entries
from fullshard.errors import ShardingError
from fullshard.saving.shard_tensor import ShardTensor, WholeTensor, part_or_whole

_EXTRA = "_extra_state"


def model_state_dict(
    module: nn.Module,
    *args: Any,
    destination: dict[str, Any] | None = None,
    prefix: str = "",
    keep_vars: bool = False,
) -> dict[str, Any]:
    """The state dict of a sharded model, or of a part of it, of the kind that ``set_state_dict_type`` chose.

    Every rank calls it; LOCAL and SHARDED need no communication.

    Args:
        module: A wrapper, a sharded model or a module inside.
        args: The next three by position, as torch once had them.
        destination: A dict to add to; None: a new one.
        prefix: Put before every name.
        keep_vars: Without effect: values are never the Parameters.

    Returns:
        The names of the unwrapped module's ``state_dict()``, each tied one too, in its order, with

        - FULL: whole tensors in the shards' dtype, copies, on the model's device or in host memory
          (``offload_to_cpu``: at most one unit is whole on the device at once); nothing on other ranks than 0 with
          ``rank0_only``;
        - SHARDED: copies of this rank's rows as :class:`ShardTensor`, for ``torch.distributed.checkpoint``;
        - LOCAL: this rank's rows themselves.

        What is not sharded (ignored parameters, buffers) is whole in all of them.

    Raises:
        ShardingError: The module is no part of a sharded model, or only rank 0 has the full parameters.
    """
    destination, prefix = _positional(args, destination, prefix)
    kind, config = _wanted(module)
    entries = state_entries(module)
    if kind is StateDictType.FULL_STATE_DICT:
        values = _full(module, entries, config)
    elif kind is StateDictType.SHARDED_STATE_DICT:
        values = [_sharded(entry) for entry in entries]
    else:
        values = [_shown(entry).detach() for entry in entries]
    found = OrderedDict() if destination is None else destination
    if values is None and asking_getter() is None:
        return found
    if values is None:
        values = [nothing_of(entry.tensor) for entry in entries]  # torch goes by the names before it drops them
    named: list[tuple[str, Any]] = [
        (entry.name, _to_host(value) if config.offload_to_cpu else value)
        for entry, value in zip(entries, values, strict=True)
    ]
    named += [(name, owner.get_extra_state()) for name, owner in _extra_states(module).items()]
    order = {plain_name(path): place for place, (path, _) in enumerate(module.named_modules(remove_duplicate=False))}
    for name, value in sorted(named, key=lambda one: order[one[0].rpartition(".")[0]]):
        found[prefix + name] = value
    return found


def _wanted(module: nn.Module) -> tuple[StateDictType, Any]:
    """The kind of state dict and its settings: as torch's getter says, where one asks, else as was chosen."""
    getter = asking_getter()
    if getter is not None and getter.full_state_dict:
        rank0_only = keeps_on_rank0_only(getter)
        return StateDictType.FULL_STATE_DICT, FullStateDictConfig(getter.cpu_offload, rank0_only)
    settings = get_state_dict_type(module)
    return settings.state_dict_type, settings.state_dict_config


def _positional(
    args: tuple[Any, ...], destination: dict[str, Any] | None, prefix: str
) -> tuple[dict[str, Any] | None, str]:
    if args and destination is None:
        destination = args[0]
    if len(args) > 1 and not prefix:
        prefix = args[1]
    return destination, prefix


def _full(module: nn.Module, entries: Sequence[StateEntry], config: Any) -> list[torch.Tensor] | None:
    """The whole tensors; None where another rank has them."""
    root = sharded_roots(module)[0]
    rank0_only = isinstance(config, FullStateDictConfig) and config.rank0_only
    held = {entry.meta.name: entry.tensor for entry in entries if entry.meta is not None}
    wanted = {name: shard.dtype for name, shard in held.items()}
    whole: dict[str, torch.Tensor] = {}
    for lane in gathered(root, held, wanted, rank0_only=rank0_only):
        for name, tensor in lane.items():
            whole[name] = tensor.to("cpu", copy=True) if config.offload_to_cpu else tensor.clone()
    if rank0_only and mesh_of(root).rank > 0:
        return None
    return [entry.tensor.detach().clone() if entry.meta is None else whole[entry.meta.name] for entry in entries]


def _sharded(entry: StateEntry) -> torch.Tensor:
    tensor = _shown(entry)
    if entry.meta is None:
        return tensor.detach().clone()
    start, _ = entry.meta.element_range
    comm: Comm = tensor.shard_comm  # type: ignore[attr-defined]
    return part_or_whole(entry.shape, start, tensor.detach().reshape(-1).clone(), comm=comm)


def _shown(entry: StateEntry) -> torch.Tensor:
    """This rank's part.

    Raises:
        ShardingError: Full parameters are on show.
    """
    if entry.on_show:
        raise ShardingError(
            "SHARDED_STATE_DICT and LOCAL_STATE_DICT are of shards, and full parameters are on show: ask for the state "
            "dict outside of summon_full_params, or for FULL_STATE_DICT."
        )
    return entry.tensor


def _to_host(value: torch.Tensor) -> torch.Tensor:
    if isinstance(value, ShardTensor):
        return ShardTensor.of(value.shape, value.start, value.flat.cpu(), comm=value.comm)
    if isinstance(value, WholeTensor):
        return part_or_whole(value.shape, 0, value.cpu().reshape(-1), comm=value.comm)
    return value.cpu()


def _extra_states(module: nn.Module) -> dict[str, nn.Module]:
    """Modules that have state beside tensors, by its name."""
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
) -> _IncompatibleKeys:
    """Take over a state dict of the kind that ``set_state_dict_type`` chose; every rank calls it.

    Args:
        module: A wrapper, a sharded model or a module inside.
        state_dict: As :func:`model_state_dict` gives it, for the same module. FULL: of any model with these names, the
            same on every rank; each copies its rows. SHARDED and LOCAL: of a model that is sharded alike (a sharded one
            of other ranks comes through ``torch.distributed.checkpoint.load``). A tied parameter counts under any of
            its names.
        strict: Whether names must fit exactly.
        assign: Refused: it would replace the shards.

    Returns:
        ``missing_keys`` and ``unexpected_keys``.

    Raises:
        ShardingError: Names do not fit (if strict), or a shape; on every rank, and nothing has changed.
    """
    if assign:
        raise ShardingError(
            "load_state_dict(assign=True) would replace the shards by full tensors. Leave out assign: each rank copies "
            "its rows."
        )
    kind = get_state_dict_type(module).state_dict_type
    root = sharded_roots(module)[0]
    copies, missing, unexpected = together(mesh_of(root), lambda: _plan(module, state_dict, kind, strict=strict))
    with torch.no_grad():
        for target, source in copies:
            target.copy_(source)
    for name, owner in _extra_states(module).items():
        if name in state_dict:
            owner.set_extra_state(state_dict[name])
    return _IncompatibleKeys(missing, unexpected)


def _plan(
    module: nn.Module, state: Mapping[str, Any], kind: StateDictType, *, strict: bool
) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], list[str], list[str]]:
    """What is copied from where; names that lack, and names that are not the module's."""
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
        problems.append(f"it lacks {', '.join(missing)}")
    if strict and unexpected:
        problems.append(f"the model has no {', '.join(unexpected)}")
    if problems:
        raise ShardingError(f"This state dict does not fit {type(module).__name__}: {'; '.join(problems)}.")
    return copies, missing, unexpected


def _rows(entry: StateEntry, name: str, value: torch.Tensor) -> torch.Tensor:
    """What of a full or sharded value goes to what the module shows now."""
    if tuple(value.shape) != entry.shape:
        raise ShardingError(f"{name} has shape {tuple(value.shape)} where the model has {entry.shape}")
    if entry.meta is None:
        return value
    start, stop = entry.meta.element_range
    if isinstance(value, ShardTensor):
        return value.elements(name, (start, stop)).view(entry.tensor.shape)
    return value.reshape(-1)[start:stop].view(entry.tensor.shape)


def _local_part(entry: StateEntry, name: str, value: torch.Tensor) -> torch.Tensor:
    if value.shape != entry.tensor.shape:
        raise ShardingError(
            f"{name} has shape {tuple(value.shape)} here where this rank's rows have {tuple(entry.tensor.shape)}: a "
            "local state dict fits the ranks and units that it was made with"
        )
    return value
