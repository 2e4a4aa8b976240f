"""From the wrapper's arguments, as torch names them, to the engine's policies.

Enum members and settings of ``torch.distributed.fsdp`` itself, of a script that kept that import, are taken as well:
they are told by their names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from enum import Enum
from typing import Any, TypeVar

import torch
from torch import nn

from fullshard import policy
from fullshard.comm import machines_of_world
from fullshard.compat.torch_fsdp.api import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from fullshard.compat.torch_fsdp.wrap import is_wrapper
from fullshard.errors import ConfigError, WrapError

Member = TypeVar("Member", bound=Enum)

UNIT_ARGUMENTS = frozenset({"sharding_strategy", "cpu_offload", "mixed_precision"})
"""What may differ from unit to unit of one model; the rest is the root's."""

WITHOUT_EFFECT = frozenset({"use_orig_params", "limit_all_gathers"})

_STRATEGIES = {
    ShardingStrategy.FULL_SHARD: policy.ShardingStrategy.FULL_SHARD,
    ShardingStrategy.SHARD_GRAD_OP: policy.ShardingStrategy.SHARD_GRAD_OP,
    ShardingStrategy.NO_SHARD: policy.ShardingStrategy.NO_SHARD,
    ShardingStrategy.HYBRID_SHARD: policy.ShardingStrategy.HYBRID_SHARD,
    ShardingStrategy._HYBRID_SHARD_ZERO2: policy.ShardingStrategy.HYBRID_SHARD_ZERO2,
}


def member_of(kind: type[Member], value: object, argument: str) -> Member:
    """``value`` as a member of ``kind``; another enum's of the same name will do.

    Raises:
        ConfigError: It is none.
    """
    if isinstance(value, kind):
        return value
    if isinstance(value, Enum) and value.name in kind.__members__:
        return kind[value.name]
    raise ConfigError(f"{argument} is one of {kind.__name__}'s {', '.join(kind.__members__)}; got {value!r}.")


@dataclass(frozen=True)
class UnitSettings:
    """What the engine is told about one unit.

    Attributes:
        strategy: What is sharded.
        precision: Dtypes.
        offload: Whether shards live in host memory.
        alone: Classes whose modules compute in float32, if the unit computes in less.
    """

    strategy: policy.ShardingStrategy
    precision: policy.MixedPrecision
    offload: policy.CPUOffload | None
    alone: tuple[type[nn.Module], ...] = ()

    def precision_in(self, root: nn.Module) -> policy.MixedPrecision:
        """The precision of units in ``root``, with the classes that compute in float32 as they are named there."""
        if self.precision.param is None:
            return self.precision
        names = {type(module).__name__ for module in root.modules() if isinstance(module, self.alone)}
        return replace(self.precision, keep_fp32=tuple(names))


def unit_settings(kwargs: Mapping[str, Any], alone: tuple[type[nn.Module], ...]) -> UnitSettings:
    """The settings that the wrapper's arguments ask for.

    Raises:
        ConfigError: One is of the wrong kind.
    """
    strategy = kwargs["sharding_strategy"] or ShardingStrategy.FULL_SHARD
    return UnitSettings(
        _STRATEGIES[member_of(ShardingStrategy, strategy, "sharding_strategy")],
        _precision(kwargs["mixed_precision"]),
        _offload(kwargs["cpu_offload"]),
        alone,
    )


def own_settings(
    module: nn.Module, kwargs: Mapping[str, Any], root_kwargs: Mapping[str, Any], alone: tuple[type[nn.Module], ...]
) -> UnitSettings:
    """The settings of a module that a policy wraps with ``kwargs``.

    Raises:
        ConfigError: They differ from the root's in what is the whole model's, or an argument is unknown.
    """
    lacking = object()
    differing = {key for key, value in kwargs.items() if value is not root_kwargs.get(key, lacking)}
    refused = sorted(differing - UNIT_ARGUMENTS - WITHOUT_EFFECT)
    if refused:
        raise ConfigError(
            f"The wrap policy gives {type(module).__name__} its own {', '.join(refused)}. One unit may differ from the "
            f"model in {', '.join(sorted(UNIT_ARGUMENTS))}; give the rest to the outermost wrapper."
        )
    return unit_settings(kwargs, alone)


def _precision(mixed: MixedPrecision | None) -> policy.MixedPrecision:
    if mixed is None:
        return policy.MixedPrecision()
    lacking = [field.name for field in fields(MixedPrecision) if not hasattr(mixed, field.name)]
    if lacking:
        raise ConfigError(
            f"mixed_precision is a MixedPrecision or None; got {mixed!r}, which has no {', '.join(lacking)}. "
            "(MixedPrecisionPolicy is fully_shard's.)"
        )
    return policy.MixedPrecision(
        param=mixed.param_dtype,
        reduce=mixed.reduce_dtype or mixed.param_dtype,
        buffer=mixed.buffer_dtype,
        cast_forward_inputs=mixed.cast_forward_inputs,
        cast_root_forward_inputs=mixed.cast_root_forward_inputs,
        keep_low_precision_grads=mixed.keep_low_precision_grads,
    )


def _offload(offload: CPUOffload | None) -> policy.CPUOffload | None:
    if offload is None:
        return None
    if not hasattr(offload, "offload_params"):
        raise ConfigError(f"cpu_offload is CPUOffload(offload_params=…) or None; got {offload!r}.")
    return policy.CPUOffload() if offload.offload_params else None


def prefetch(backward: BackwardPrefetch | None, *, forward: bool) -> policy.Prefetch:
    """What is gathered ahead."""
    if backward is None:
        return policy.Prefetch(policy.BackwardPrefetch.NONE, forward=forward)
    name = member_of(BackwardPrefetch, backward, "backward_prefetch").name
    return policy.Prefetch(policy.BackwardPrefetch[name], forward=forward)


def device_of_id(device_id: int | torch.device | None) -> torch.device | None:
    """The device that units compute on; None: the accelerator of this rank, else CPU.

    A number is that of an accelerator; on a machine without one it is the CPU.
    """
    if device_id is None or isinstance(device_id, torch.device):
        return device_id
    kind = accelerator_type()
    return torch.device("cpu") if kind is None else torch.device(kind, device_id)


def accelerator_type() -> str | None:
    """The type of this machine's accelerator, such as ``"cuda"``; None where there is none."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return None if accelerator is None else accelerator.type


def ranks(process_group: Any, device_mesh: Any, strategy: policy.ShardingStrategy, device: torch.device | None) -> Any:
    """What the engine calls a mesh; a pair of groups is ``(shard, replicate)`` in torch, the other way round there.

    Raises:
        ConfigError: Both are given, or they do not fit the strategy.
        ProcessGroupError: There is no process group, or machines have different numbers of ranks.
    """
    if process_group is not None and device_mesh is not None:
        raise ConfigError("Both process_group and device_mesh name the ranks to shard over; give one of them.")
    hybrid = strategy.needs_two_axes
    if device_mesh is not None:
        if device_mesh.ndim != (2 if hybrid else 1):
            raise ConfigError(
                f"{strategy.name} takes a device_mesh with {2 if hybrid else 1} axes; this one has {device_mesh.ndim}. "
                "HYBRID_SHARD shards over the second axis and replicates over the first; tensor parallelism beside "
                "sharding is not supported."
            )
        return device_mesh
    if isinstance(process_group, tuple) and hybrid and len(process_group) == 2:
        return process_group[1], process_group[0]
    if isinstance(process_group, tuple) or (hybrid and process_group is not None):
        raise ConfigError(
            f"{strategy.name} takes {'two process groups, (shard, replicate), or none' if hybrid else 'one group'} as "
            f"process_group; got {process_group!r}."
        )
    return machines_of_world(device) if hybrid else process_group


# What is left out


def ignored_parts(
    root: nn.Module, modules: Iterable[nn.Module] | None, states: Iterable[Any] | None
) -> tuple[set[nn.Module], set[nn.Parameter]]:
    """Modules and parameters that are not sharded, those that wrappers inside leave out among them.

    Args:
        root: What is wrapped.
        modules: ``ignored_modules``.
        states: ``ignored_states``: modules, or parameters.

    Raises:
        ConfigError: Both are given, or one holds something else.
        WrapError: A module to ignore is wrapped itself.
    """
    if modules is not None and states is not None:
        raise ConfigError("ignored_states takes modules as well as parameters; leave out ignored_modules.")
    given = list(states if states is not None else modules or ())
    params = {one for one in given if isinstance(one, nn.Parameter)}
    tops = [one for one in given if isinstance(one, nn.Module)]
    if len(params) + len(tops) < len(given) or (params and (tops or modules is not None)):
        raise ConfigError(
            "ignored_modules takes modules, and ignored_states either modules or parameters; got "
            f"{', '.join(sorted({type(one).__name__ for one in given}))}."
        )
    if any(map(is_wrapper, tops)):
        raise WrapError("A module to ignore is wrapped itself. Ignore it before it is wrapped, or not at all.")
    kept = {part for top in tops for module in top.modules() if is_wrapper(module) for part in module.modules()}
    inside = {module for top in tops for module in top.modules()} - kept
    for module in root.modules():
        if is_wrapper(module):
            params |= module._ignored_params  # pyright: ignore[reportOperatorIssue]
    params |= {param for module in inside for param in module._parameters.values() if param is not None}
    return inside, params
