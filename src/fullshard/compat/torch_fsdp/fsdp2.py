"""FSDP2's ``fully_shard`` on fullshard's engine."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, DataParallelMeshDims, MixedPrecisionPolicy, OffloadPolicy

from fullshard.compat.torch_fsdp.api import StateDictType, set_state_dict_type
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
from fullshard.compat.torch_fsdp.optimizer_hooks import describe_state_of
from fullshard.compat.torch_fsdp.tensor import RaggedShard, Replicate, Shard
from fullshard.core import engine
from fullshard.core.comm import as_mesh, device_mesh_of
from fullshard.core.engine import Unit
from fullshard.core.engine.registry import runtime_of
from fullshard.core.engine.step.param import ShardedParam
from fullshard.core.policy import CPUOffload, MixedPrecision, ShardingStrategy
from fullshard.core.torch_private import is_traceable_wrapper
from fullshard.errors import ConfigError, ShardingError, WrapError

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
    """Shard the parameters of ``module`` that no earlier call took, as one unit; every rank calls it.

    Call it bottom up: on the blocks first, then on the root. ``module`` becomes an :class:`FSDPModule` in place. Its
    parameters and gradients are :class:`fullshard.Shard` (in torch: DTensors); parameters have ``device_mesh`` and
    ``placements``, of :class:`~fullshard.compat.torch_fsdp.tensor.RaggedShard`. Where ranks hold different values
    all take rank 0's, and rank 0 warns once for each group of ranks.

    Args:
        module: A module, or a list of modules that form one unit.
        mesh: A DeviceMesh with 1 axis (shard) or 2 (replicate, shard), or anything else that ``fullshard.fully_shard``
            takes; None: all ranks.
        reshard_after_forward: Whether to free parameters between forward and backward; None: all but the root's.
            An int must divide the number of ranks that shard: 1 is False, others are taken for True, with a warning.
        shard_placement_fn: Called with each parameter; must return None or ``Shard(dim)``. Parameters are cut by rows
            all the same; another dimension than 0 gives a warning.
        mp_policy: A :class:`MixedPrecisionPolicy`, or torch's.
        offload_policy: :class:`OffloadPolicy` or :class:`CPUOffloadPolicy`, or torch's.
        ignored_params: Parameters left unsharded, here and by later calls on enclosing modules.
        dp_mesh_dims: Must be None.

    Returns:
        ``module``.

    Raises:
        ConfigError: An argument has an unsupported value.
        WrapError: A module has no forward of its own, or a parameter is tied to one in a module sharded earlier.
        ShardingError: The module is sharded already.
        ProcessGroupError: There is no process group, or the mesh does not fit.
        MismatchError: Ranks hold different models; raised on every rank.
    """
    members = [module] if isinstance(module, nn.Module) else list(module)
    _check_modules(members)
    parts = (part for member in members for part in member.modules() if isinstance(part, FSDPModule))
    inside = frozenset(param for part in parts for param in state_of(part).ignored)  # of earlier calls
    ignored = frozenset(ignored_params or ()) | inside
    params = list(dict.fromkeys(p for member in members for p in member.parameters() if p not in ignored))
    _check_parameters(members, params, shard_placement_fn)
    if dp_mesh_dims is not None:
        raise ConfigError("dp_mesh_dims is not supported: pass only the data parallel axes, mesh=mesh[names].")
    device = torch.device("cpu") if getattr(mesh, "device_type", None) == "cpu" else None
    reshard = _reshard(reshard_after_forward, mesh, device)
    options = {
        "strategy": _strategy(mesh, keep=reshard is False),
        "mp_policy": _precision(mp_policy),
        "offload_policy": _offload(offload_policy),
        "ignored_params": ignored,
        "device": device,
    }
    unit = _shard(module, members, mesh, options, has_parameters=bool(params))
    for member in members:
        set_state(member, ModuleState(unit, ignored))
    if unit is not None:
        _present_as_fsdp2(members, unit.params, mesh)
        if reshard is True:  # an explicit True also applies to a root, which otherwise keeps its parameters
            unit.runtime.configure(unit, reshard_after_forward=True)
    return module


def _shard(
    module: Any, members: Sequence[nn.Module], mesh: Any, options: Mapping[str, Any], *, has_parameters: bool
) -> Unit | None:
    """Give ``members`` their new classes, and make one unit of their parameters; None if there are none."""
    with _fsdp_classes(members):
        if not has_parameters:
            return None
        first = engine.FirstValues(from_rank0_if_different=True, rest_later=True)
        engine.fully_shard(module, mesh, wrap=None, first_values=first, **options)
    return runtime_of(members[0]).root


@contextmanager
def _fsdp_classes(members: Sequence[nn.Module]) -> Iterator[None]:
    """Give ``members`` their :class:`FSDPModule` classes; restore their own if the block raises."""
    plain = [type(member) for member in members]
    for member, cls in zip(members, plain, strict=True):
        member.__class__ = fsdp_class(cls)
    try:
        yield
    except BaseException:
        for member, cls in zip(members, plain, strict=True):
            member.__class__ = cls
        raise


def _present_as_fsdp2(members: Sequence[nn.Module], params: Sequence[ShardedParam], mesh: Any) -> None:
    """Add to a new unit what users of torch's FSDP2 expect: its state dicts, and the placement of each shard."""
    for member in members:
        engine.on_state_dict(member, model_state_dict, load_model_state_dict)
    set_state_dict_type(members[0], StateDictType.SHARDED_STATE_DICT)
    device_mesh = device_mesh_of(mesh, params[0].sharded.device) if params else None
    replicas = (Replicate(),) if _strategy(mesh, keep=False).needs_two_axes else ()
    for param in params:
        placements = (*replicas, RaggedShard(param.lane.mesh, param.meta.element_range))
        vars(param.sharded).update(device_mesh=device_mesh, placements=placements)
        describe_state_of(param.sharded)


def _precision(policy: Any) -> MixedPrecision:
    policy = MixedPrecisionPolicy() if policy is None else policy
    if not isinstance(policy, MixedPrecisionPolicy):
        raise ConfigError(
            f"mp_policy must be a MixedPrecisionPolicy({', '.join(MixedPrecisionPolicy.__dataclass_fields__)}); got "
            f"{type(policy).__name__}. FSDP1's MixedPrecision is for FullyShardedDataParallel, fullshard's own for "
            "fullshard.fully_shard."
        )
    return MixedPrecision(
        param=policy.param_dtype,
        reduce=policy.reduce_dtype or policy.param_dtype,
        output=policy.output_dtype,
        cast_forward_inputs=policy.cast_forward_inputs,
    )


def _offload(policy: Any) -> CPUOffload | None:
    if policy is not None and not isinstance(policy, OffloadPolicy):
        raise ConfigError(
            f"offload_policy must be OffloadPolicy() or CPUOffloadPolicy(pin_memory=…); got {type(policy).__name__}."
        )
    return CPUOffload(pin_memory=policy.pin_memory) if isinstance(policy, CPUOffloadPolicy) else None


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Make a method other than ``forward`` compute with full parameters; no effect on a module that is not sharded.

    Raises:
        ShardingError: There is no such method.
    """
    if not isinstance(module, FSDPModule):
        return
    unit = unit_of(module)
    if unit is not None:
        engine.wrap_forward_method(unit.hooks, module, method_name)


def share_comm_ctx(modules: list[Any]) -> None:
    """Only validate ``modules``: side streams belong to the device, so all models share them already.

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
                f"fully_shard on a {type(member).__name__}: it has no forward before which to gather. Call it on each "
                "of its modules, or once on list(modules) to make them one unit."
            )
        if isinstance(member, FSDPModule):
            raise ShardingError(f"{type(member).__name__} is sharded already; call fully_shard once per module.")


def _check_parameters(
    members: Sequence[nn.Module], params: Sequence[nn.Parameter], placement: Callable[[nn.Parameter], Any] | None
) -> None:
    inside = {part for member in members for part in member.modules()}
    for param in params:
        unit = vars(param)["shard_unit"]() if "shard_unit" in vars(param) else None
        if unit is not None and inside.isdisjoint(unit.modules):
            raise WrapError(
                f"A parameter of {type(members[0]).__name__} was sharded by an earlier call on another module, "
                f"{type(unit.modules[0]).__name__}: it is tied, and belongs to one unit. Call fully_shard once on the "
                "list of both modules, or only on a module around both."
            )
        if hasattr(param, "placements") and not hasattr(param, "shard_meta"):
            raise WrapError(
                f"A parameter of shape {tuple(param.shape)} is a DTensor (tensor parallel). fullshard shards only "
                "plain parameters: leave out parallelize_module, or use torch's own fully_shard."
            )
        if is_traceable_wrapper(param):
            raise WrapError(
                f"A parameter of shape {tuple(param.shape)} is a {type(param).__name__}, a tensor made of others, "
                "which torch gathers by its fsdp_pre_all_gather. fullshard gathers plain memory only: leave out what "
                "made it (float8 or quantized training), or use torch's own fully_shard."
            )
    if placement is not None:
        _check_placements([param for param in params if not hasattr(param, "shard_meta")], placement)


def _check_placements(params: Sequence[nn.Parameter], placement: Callable[[nn.Parameter], Any]) -> None:
    """Check the requested placements, which are only hints: all parameters are cut by rows, with the same results.

    Raises:
        ConfigError: It is not a ``Shard``, or not of a dimension that the parameter has.
    """
    chosen = [(param, placement(param)) for param in params]
    for param, one in chosen:
        if one is not None and (not isinstance(one, Shard) or not -param.ndim <= one.dim < param.ndim):
            raise ConfigError(
                f"shard_placement_fn returned {one!r} for a parameter of shape {tuple(param.shape)}. It must return "
                "None or Shard(dim) of a dimension that the parameter has; other placements and other meshes for "
                "single parameters are not supported."
            )
    others = [(param, one) for param, one in chosen if one is not None and one.dim % param.ndim != 0]
    if others:
        param, one = others[0]
        warnings.warn(
            f"shard_placement_fn returned {one!r} for a parameter of shape {tuple(param.shape)}, and a dimension other "
            f"than 0 for {len(others) - 1} more: fullshard cuts all parameters by rows. What is computed is the same; "
            "to_local() differs from torch's. Return None or Shard(0) to silence this warning.",
            stacklevel=4,
        )


def _reshard(after_forward: Any, mesh: Any, device: torch.device | None) -> bool | None:
    """Return ``reshard_after_forward`` as a bool or None, also where it is an int.

    Raises:
        ConfigError: It is an int that does not divide the number of ranks that shard.
    """
    if after_forward is None or isinstance(after_forward, bool):
        return after_forward
    size = as_mesh(mesh, _strategy(mesh, keep=False), device).shard_group.size
    if not isinstance(after_forward, int) or after_forward < 1 or size % after_forward:
        raise ConfigError(
            f"reshard_after_forward={after_forward!r}: it must be True, False or a number that divides the {size} "
            "ranks which share the parameters."
        )
    if 1 < after_forward < size:
        warnings.warn(
            f"reshard_after_forward={after_forward} is taken for True: after forward, parameters are freed down to the "
            f"shards of all {size} ranks, not kept in groups of {after_forward}. What is computed is the same; "
            "backward gathers over more ranks, and less memory is held. To gather inside smaller groups only, shard "
            "inside them: a mesh of 2 axes, (replicate, shard).",
            stacklevel=3,
        )
    return after_forward > 1


def _strategy(mesh: Any, *, keep: bool) -> ShardingStrategy:
    if isinstance(mesh, tuple) or getattr(mesh, "ndim", 1) == 2:
        return ShardingStrategy.HYBRID_SHARD_ZERO2 if keep else ShardingStrategy.HYBRID_SHARD
    return ShardingStrategy.SHARD_GRAD_OP if keep else ShardingStrategy.FULL_SHARD
