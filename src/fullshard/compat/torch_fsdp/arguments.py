"""Conversion of the wrapper's arguments, as torch names them, to the engine's policies."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, TypeVar

import torch
from torch import nn

from fullshard.compat.torch_fsdp.api import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from fullshard.compat.torch_fsdp.wrap import is_wrapper
from fullshard.core import policy
from fullshard.core.comm import machines_of_world, named_ranks
from fullshard.errors import ConfigError, WrapError

Member = TypeVar("Member", bound=Enum)

UNIT_ARGUMENTS = frozenset({"sharding_strategy", "cpu_offload", "mixed_precision", "process_group", "device_mesh"})
"""Arguments that may differ between units of one model; all others are the root's."""

WITHOUT_EFFECT = frozenset({"use_orig_params", "limit_all_gathers"})
"""Arguments that are accepted and ignored."""

_STRATEGIES = {
    ShardingStrategy.FULL_SHARD: policy.ShardingStrategy.FULL_SHARD,
    ShardingStrategy.SHARD_GRAD_OP: policy.ShardingStrategy.SHARD_GRAD_OP,
    ShardingStrategy.NO_SHARD: policy.ShardingStrategy.NO_SHARD,
    ShardingStrategy.HYBRID_SHARD: policy.ShardingStrategy.HYBRID_SHARD,
    ShardingStrategy._HYBRID_SHARD_ZERO2: policy.ShardingStrategy.HYBRID_SHARD_ZERO2,
}


def member_of(kind: type[Member], value: object, argument: str) -> Member:
    """Return ``value`` if it is a member of ``kind``.

    Raises:
        ConfigError: It is not.
    """
    if isinstance(value, kind):
        return value
    raise ConfigError(f"{argument} must be a {kind.__name__}: {', '.join(kind.__members__)}; got {value!r}.")


@dataclass(frozen=True)
class UnitSettings:
    """Settings of one unit.

    Attributes:
        strategy: What is sharded.
        ranks: The ranks to shard over, as the engine's ``mesh`` argument takes them.
        precision: Dtypes.
        offload: Host memory settings of the shards; None: they stay on the device.
        float32_classes: Classes whose modules compute in float32 even if the unit's dtype is narrower.
    """

    strategy: policy.ShardingStrategy
    ranks: Any
    precision: policy.MixedPrecision
    offload: policy.CPUOffload | None
    float32_classes: tuple[type[nn.Module], ...] = ()

    def precision_in(self, root: nn.Module) -> policy.MixedPrecision:
        """Return the precision of units in ``root``, with the names of the classes there that compute in float32."""
        if self.precision.param is None:
            return self.precision
        names = {type(module).__name__ for module in root.modules() if isinstance(module, self.float32_classes)}
        return replace(self.precision, keep_fp32=tuple(names))


def unit_settings(
    kwargs: Mapping[str, Any], float32_classes: tuple[type[nn.Module], ...], known: Any = None
) -> UnitSettings:
    """Convert the wrapper's arguments to settings of a unit; ``known``: its ranks, as the engine takes them, if known.

    Raises:
        ConfigError: An argument has the wrong type, or ranks do not fit the strategy.
        ProcessGroupError: There is no process group, or machines have different numbers of ranks.
    """
    strategy = _strategy(kwargs)
    if known is None:
        device = device_of_id(kwargs["device_id"])
        known = ranks(kwargs["process_group"], kwargs["device_mesh"], strategy, device)
    return UnitSettings(
        strategy, known, _precision(kwargs["mixed_precision"]), _offload(kwargs["cpu_offload"]), float32_classes
    )


def _strategy(kwargs: Mapping[str, Any]) -> policy.ShardingStrategy:
    strategy = kwargs["sharding_strategy"] or ShardingStrategy.FULL_SHARD
    return _STRATEGIES[member_of(ShardingStrategy, strategy, "sharding_strategy")]


def own_settings(
    module: nn.Module, kwargs: Mapping[str, Any], root_kwargs: Mapping[str, Any], root: UnitSettings
) -> UnitSettings:
    """Convert the arguments with which a policy wraps ``module`` to settings of its unit; ``root``: the model's.

    Raises:
        ConfigError: An argument that all units share differs from the root's, or is unknown.
    """
    lacking = object()
    differing = {key for key, value in kwargs.items() if value is not root_kwargs.get(key, lacking)}
    refused = sorted(differing - UNIT_ARGUMENTS - WITHOUT_EFFECT)
    if refused:
        raise ConfigError(
            f"The wrap policy sets {', '.join(refused)} of {type(module).__name__}. A unit may differ from the model "
            f"only in {', '.join(sorted(UNIT_ARGUMENTS))}; pass the rest to the outermost wrapper."
        )
    as_root = differing.isdisjoint({"process_group", "device_mesh"})
    as_root = as_root and _strategy(kwargs).needs_two_axes is root.strategy.needs_two_axes
    return unit_settings(kwargs, root.float32_classes, root.ranks if as_root else None)


def _precision(mixed: MixedPrecision | None) -> policy.MixedPrecision:
    if mixed is None:
        return policy.MixedPrecision()
    if not isinstance(mixed, MixedPrecision):
        raise ConfigError(
            f"mixed_precision must be a MixedPrecision or None; got {mixed!r}. (MixedPrecisionPolicy is for "
            "fully_shard.)"
        )
    return policy.MixedPrecision(
        param=mixed.param_dtype,
        reduce=mixed.reduce_dtype or mixed.param_dtype,
        buffer=mixed.buffer_dtype,
        cast_forward_inputs=mixed.cast_forward_inputs,
        cast_root_forward_inputs=mixed.cast_root_forward_inputs,
        keep_low_precision_grads=mixed.keep_low_precision_grads,
        full_in_eval=os.environ.get("FSDP_USE_FULL_PREC_IN_EVAL") == "1",
    )


def _offload(offload: CPUOffload | None) -> policy.CPUOffload | None:
    if offload is None:
        return None
    if not isinstance(offload, CPUOffload):
        raise ConfigError(f"cpu_offload must be CPUOffload(offload_params=…) or None; got {offload!r}.")
    return policy.CPUOffload() if offload.offload_params else None


def prefetch(backward: BackwardPrefetch | None, *, forward: bool) -> policy.Prefetch:
    """Convert ``backward_prefetch`` and ``forward_prefetch``."""
    if backward is None:
        return policy.Prefetch(policy.BackwardPrefetch.NONE, forward=forward)
    name = member_of(BackwardPrefetch, backward, "backward_prefetch").name
    return policy.Prefetch(policy.BackwardPrefetch[name], forward=forward)


def device_of_id(device_id: int | torch.device | None) -> torch.device | None:
    """Return the device that units compute on; None: this rank's accelerator, or the CPU if there is none.

    A number is an accelerator's; on a machine without accelerators it means the CPU.
    """
    if device_id is None or isinstance(device_id, torch.device):
        return device_id
    kind = accelerator_type()
    return torch.device("cpu") if kind is None else torch.device(kind, device_id)


def accelerator_type() -> str | None:
    """Return the type of this machine's accelerator, such as ``"cuda"``, or None."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return None if accelerator is None else accelerator.type


def ranks(process_group: Any, device_mesh: Any, strategy: policy.ShardingStrategy, device: torch.device | None) -> Any:
    """Return the ranks to shard over, as the engine's ``mesh`` argument takes them.

    A pair of groups is ``(shard, replicate)`` in torch and ``(replicate, shard)`` in the engine.

    Raises:
        ConfigError: Both are given, or one does not fit the strategy.
        ProcessGroupError: There is no process group, or machines have different numbers of ranks.
    """
    if process_group is not None and device_mesh is not None:
        raise ConfigError("process_group and device_mesh both set the ranks to shard over; pass only one.")
    hybrid = strategy.needs_two_axes
    if device_mesh is not None:
        if device_mesh.ndim != (2 if hybrid else 1):
            raise ConfigError(
                f"{strategy.name} needs a device_mesh with {2 if hybrid else 1} axes; this one has {device_mesh.ndim}. "
                "HYBRID_SHARD shards over the second axis and replicates over the first. Tensor parallelism is not "
                "supported."
            )
        return device_mesh
    if isinstance(process_group, tuple) and hybrid and len(process_group) == 2:
        return process_group[1], process_group[0]
    if isinstance(process_group, tuple) or (hybrid and process_group is not None):
        raise ConfigError(
            f"process_group must be {'a pair of groups (shard, replicate) or None' if hybrid else 'one group'} for "
            f"{strategy.name}; got {process_group!r}."
        )
    return machines_of_world(device) if hybrid else named_ranks(process_group, device)


def ignored_parts(
    root: nn.Module, modules: Iterable[nn.Module] | None, states: Iterable[Any] | None
) -> tuple[set[nn.Module], set[nn.Parameter]]:
    """Return the modules and parameters that are not sharded, including those that wrappers inside ignore.

    Args:
        root: The module to wrap.
        modules: ``ignored_modules``.
        states: ``ignored_states``: modules, or parameters.

    Raises:
        ConfigError: Both are given, or one contains something else.
        WrapError: A module to ignore is wrapped itself.
    """
    if modules is not None and states is not None:
        raise ConfigError("ignored_states also takes modules; leave out ignored_modules.")
    given = list(states if states is not None else modules or ())
    params = {one for one in given if isinstance(one, nn.Parameter)}
    tops = [one for one in given if isinstance(one, nn.Module)]
    if len(params) + len(tops) < len(given) or (params and (tops or modules is not None)):
        raise ConfigError(
            "ignored_modules takes modules, ignored_states takes either modules or parameters; got "
            f"{', '.join(sorted({type(one).__name__ for one in given}))}."
        )
    if any(map(is_wrapper, tops)):
        raise WrapError("A module to ignore is already wrapped. Remove its wrapper, or do not ignore it.")
    kept = {part for top in tops for module in top.modules() if is_wrapper(module) for part in module.modules()}
    inside = {module for top in tops for module in top.modules()} - kept
    for module in root.modules():
        if is_wrapper(module):
            params |= module._ignored_params  # pyright: ignore[reportOperatorIssue]
    params |= {param for module in inside for param in module._parameters.values() if param is not None}
    return inside, params
