"""FSDP2's policies, and their conversion to the engine's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from fullshard.errors import ConfigError
from fullshard.policy import CPUOffload, MixedPrecision


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Dtypes of a unit; see torch's class of the same name.

    Attributes:
        param_dtype: Dtype of gathered parameters, and so of compute; None: the parameters' own.
        reduce_dtype: Dtype that gradients are reduced in; None: ``param_dtype``.
        output_dtype: Dtype that floating outputs of the module are cast to; None: not cast.
        cast_forward_inputs: Whether floating inputs of the module are cast to ``param_dtype``.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True


@dataclass
class OffloadPolicy:
    """No offload: parameters live on the device they are used on."""


@dataclass
class CPUOffloadPolicy(OffloadPolicy):
    """Shards, gradients and optimizer state live in host memory.

    Attributes:
        pin_memory: Whether host memory is page-locked.
    """

    pin_memory: bool = True


@dataclass
class DataParallelMeshDims:
    """Data parallel axes of a mesh. :func:`fully_shard` rejects it; it exists so that importing it works.

    Attributes:
        shard: Names of the axes that parameters are sharded over.
        replicate: Names of the axes that they are replicated over.
    """

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None


def precision_of(policy: Any) -> MixedPrecision:
    """Convert a ``MixedPrecisionPolicy``, ours or torch's, to the engine's policy.

    Raises:
        ConfigError: It is something else.
    """
    fields = ("param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs")
    if policy is None:
        policy = MixedPrecisionPolicy()
    if not all(hasattr(policy, field) for field in fields):
        raise ConfigError(
            f"mp_policy must be a MixedPrecisionPolicy({', '.join(fields)}); got {type(policy).__name__}. FSDP1's "
            "MixedPrecision is for FullyShardedDataParallel, fullshard's own for fullshard.fully_shard."
        )
    return MixedPrecision(
        param=policy.param_dtype,
        reduce=policy.reduce_dtype or policy.param_dtype,
        output=policy.output_dtype,
        cast_forward_inputs=policy.cast_forward_inputs,
    )


def offload_of(policy: Any) -> CPUOffload | None:
    """Convert an ``OffloadPolicy``, ours or torch's, to the engine's policy.

    Raises:
        ConfigError: It is something else.
    """
    kinds = {cls.__name__ for cls in type(policy).__mro__}
    if policy is None:
        return None
    if "OffloadPolicy" not in kinds:
        raise ConfigError(
            f"offload_policy must be OffloadPolicy() or CPUOffloadPolicy(pin_memory=…); got {type(policy).__name__}."
        )
    return CPUOffload(pin_memory=policy.pin_memory) if "CPUOffloadPolicy" in kinds else None
