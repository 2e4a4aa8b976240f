"""FSDP2's ``fully_shard`` over fullshard's engine: bottom-up calls on blocks, then on the root."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from fullshard import engine
from fullshard.comm import as_mesh
from fullshard.compat.torch_fsdp.api import StateDictType
from fullshard.compat.torch_fsdp.fsdp2_optimizer import describe_state_of
from fullshard.compat.torch_fsdp.fsdp2_policies import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    OffloadPolicy,
    offload_of,
    precision_of,
)
from fullshard.compat.torch_fsdp.fsdp_module import (
    FSDPModule,
    ModuleState,
    UnshardHandle,
    fsdp_class,
    require_fsdp_modules,
    set_state,
    state_of,
    unit_of,
)
from fullshard.compat.torch_fsdp.model_state import load_model_state_dict, model_state_dict
from fullshard.compat.torch_fsdp.sharded_gradient import FullTensor, gradient_of
from fullshard.compat.torch_fsdp.state_dict_type import set_state_dict_type
from fullshard.engine.registry import runtime_of
from fullshard.errors import ConfigError, ShardingError, WrapError
from fullshard.policy import ShardingStrategy

__all__ = [
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "UnshardHandle",
    "fully_shard",
    "register_fsdp_forward_method",
    "share_comm_ctx",
]


def fully_shard(  # noqa: PLR0913 (torch's signature)
    module: nn.Module | Sequence[nn.Module],
    *,
    mesh: Any = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: Any = MixedPrecisionPolicy(),  # noqa: B008 (frozen)
    offload_policy: Any = OffloadPolicy(),  # noqa: B008 (without fields)
    ignored_params: Iterable[nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
) -> Any:
    """Make one unit of the parameters of ``module`` that no call on a part of it has taken; every rank calls it.

    Call it bottom up, on blocks and then on the root, which is what may be called then. ``module`` becomes an
    :class:`FSDPModule`. Its parameters are this rank's rows, plain tensors (not DTensors), whose gradients give norms
    over all ranks, so that ``torch.nn.utils.clip_grad_norm_`` is right. Parameters and gradients have a
    ``full_tensor()``, which every rank calls.

    Args:
        module: A module, or a list of modules that make one unit.
        mesh: A DeviceMesh with 1 axis (shard) or 2 (replicate, shard); None: all ranks. Also what
            ``fullshard.fully_shard`` takes.
        reshard_after_forward: Whether parameters are freed between forward and backward; None: except for the root's.
            As an int: 1 is False and the number of ranks that shard is True.
        shard_placement_fn: Called with each parameter; must return None or ``Shard(0)``.
        mp_policy: A :class:`MixedPrecisionPolicy`, or torch's.
        offload_policy: :class:`OffloadPolicy` or :class:`CPUOffloadPolicy`, or torch's.
        ignored_params: Parameters that stay as they are, also in calls on what is around.
        dp_mesh_dims: None.

    Returns:
        ``module``.

    Raises:
        ConfigError: An argument has a value that cannot be followed; the message says which and what to do.
        WrapError: A module has no forward of its own, or a parameter is tied to one of a part that is sharded.
        ShardingError: The module is sharded already.
        ProcessGroupError: There is no process group, or the mesh does not fit.
        MismatchError: Ranks hold different models; on every rank.
    """
    members = [module] if isinstance(module, nn.Module) else list(module)
    _check_modules(members)
    ignored = frozenset(ignored_params or ()) | _ignored_inside(members)
    params = list(dict.fromkeys(p for member in members for p in member.parameters() if p not in ignored))
    _check_parameters(params, shard_placement_fn)
    if dp_mesh_dims is not None:
        raise ConfigError("dp_mesh_dims is not supported: pass the data parallel axes alone, mesh=mesh[names].")
    precision, offload = precision_of(mp_policy), offload_of(offload_policy)
    device = torch.device("cpu") if getattr(mesh, "device_type", None) == "cpu" else None
    reshard = _reshard(reshard_after_forward, mesh, device)
    plain = [type(member) for member in members]
    for member, cls in zip(members, plain, strict=True):
        member.__class__ = fsdp_class(cls)
    if not params:
        for member in members:
            set_state(member, ModuleState(None, ignored))
        return module
    try:
        engine.fully_shard(
            module,
            mesh,
            wrap=None,
            strategy=_strategy(mesh, keep=reshard is False),
            mp_policy=precision,
            offload_policy=offload,
            ignored_params=ignored,
            device=device,
        )
    except BaseException:
        for member, cls in zip(members, plain, strict=True):
            member.__class__ = cls
        raise
    runtime = runtime_of(members[0])
    for member in members:
        set_state(member, ModuleState(runtime.root, ignored))
        engine.on_state_dict(member, model_state_dict, load_model_state_dict)
    set_state_dict_type(members[0], StateDictType.SHARDED_STATE_DICT)
    for param in runtime.root.params:
        param.as_gradient = gradient_of
        param.sharded.full_tensor = FullTensor(param)  # type: ignore[attr-defined]
        describe_state_of(param.sharded)
    if reshard is True:  # said, so it holds for a root too
        runtime.configure(runtime.root, reshard_after_forward=True)
    return module


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let a method other than ``forward`` compute with full parameters; of a module that is not sharded, nothing.

    Raises:
        ShardingError: There is no such method.
    """
    if not isinstance(module, FSDPModule):
        return
    unit = unit_of(module)
    if unit is not None:
        engine.wrap_forward_method(unit.hooks, module, method_name)


def share_comm_ctx(modules: list[Any]) -> None:
    """Nothing to do but look at the list: side streams belong to the device, and all models share them.

    Raises:
        ConfigError: ``fully_shard`` was not called on one of ``modules``.
    """
    require_fsdp_modules(modules)


def _check_modules(members: Sequence[nn.Module]) -> None:
    if not members:
        raise ConfigError("fully_shard got an empty list of modules.")
    for member in members:
        if not isinstance(member, nn.Module):
            raise ConfigError(f"fully_shard takes a module or a list of modules; got {type(member).__name__}.")
        if isinstance(member, (nn.ModuleList, nn.ModuleDict)) and type(member).forward is nn.Module.forward:
            raise WrapError(
                f"fully_shard on a {type(member).__name__}: it has no forward to gather for. Call it on each of its "
                "modules, or on the list of them, list(modules), for one unit."
            )
        if isinstance(member, FSDPModule):
            raise ShardingError(f"{type(member).__name__} is sharded already; call fully_shard on a module once.")


def _ignored_inside(members: Sequence[nn.Module]) -> frozenset[nn.Parameter]:
    """What calls on parts of ``members`` have left out."""
    parts = (part for member in members for part in member.modules() if isinstance(part, FSDPModule))
    return frozenset(param for part in parts for param in state_of(part).ignored)


def _check_parameters(params: Sequence[nn.Parameter], placement: Callable[[nn.Parameter], Any] | None) -> None:
    for param in params:
        if hasattr(param, "placements"):
            raise WrapError(
                f"A parameter of shape {tuple(param.shape)} is a DTensor (tensor parallel). fullshard shards plain "
                "parameters; leave out parallelize_module, or use torch's own fully_shard."
            )
        chosen = None if placement is None or hasattr(param, "shard_meta") else placement(param)
        if chosen is not None and getattr(chosen, "dim", None) != 0:
            raise ConfigError(
                f"shard_placement_fn gives {chosen!r} for a parameter of shape {tuple(param.shape)}; parameters are "
                "sharded by rows of their first dimension: return None or Shard(0)."
            )


def _reshard(after_forward: Any, mesh: Any, device: torch.device | None) -> bool | None:
    """What ``reshard_after_forward`` says, where it is an int too."""
    if after_forward is None or isinstance(after_forward, bool):
        return after_forward
    size = as_mesh(mesh, _strategy(mesh, keep=False), device).shard_group.size
    if isinstance(after_forward, int) and after_forward in (1, size):
        return after_forward == size and size > 1
    raise ConfigError(
        f"reshard_after_forward={after_forward!r}: parameters are freed or kept after forward, True or False; "
        f"resharding to a smaller group than the {size} ranks is not supported. To gather inside smaller groups only, "
        "shard inside them: a mesh of 2 axes, (replicate, shard)."
    )


def _strategy(mesh: Any, *, keep: bool) -> ShardingStrategy:
    if isinstance(mesh, tuple) or getattr(mesh, "ndim", 1) == 2:
        return ShardingStrategy.HYBRID_SHARD_ZERO2 if keep else ShardingStrategy.HYBRID_SHARD
    return ShardingStrategy.SHARD_GRAD_OP if keep else ShardingStrategy.FULL_SHARD
