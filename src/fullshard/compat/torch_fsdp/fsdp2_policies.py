"""FSDP2's policies, and what they are to the engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from fullshard.errors import ConfigError
from fullshard.policy import CPUOffload, MixedPrecision


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Which dtypes a unit computes and reduces in; see torch's class of the same name.

    Attributes:
        param_dtype: Dtype of gathered parameters, and so of compute; None: the parameters' own.
        reduce_dtype: Dtype that gradients travel and are added up in; None: ``param_dtype``.
        output_dtype: Dtype that floating outputs of the module are cast to; None: as they come.
        cast_forward_inputs: Whether floating inputs of the module are cast to ``param_dtype``.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True


@dataclass
class OffloadPolicy:
    """No offload: parameters live where they are computed with."""


@dataclass
class CPUOffloadPolicy(OffloadPolicy):
    """Shards, gradients and optimizer state live in host memory.

    Attributes:
        pin_memory: Whether host memory is page-locked.
    """

    pin_memory: bool = True


@dataclass
class DataParallelMeshDims:
    """Which axes of a mesh are data parallel; named here to be refused by name, see :func:`fully_shard`.

    Attributes:
        shard: Names of the axes that parameters are sharded over.
        replicate: Names of the axes that they are copied over.
    """

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None


def precision_of(policy: Any) -> MixedPrecision:
    """The engine's policy for FSDP2's, ours or torch's.

    Raises:
        ConfigError: It is something else.
    """
    fields = ("param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs")
    if policy is None:
        policy = MixedPrecisionPolicy()
    if not all(hasattr(policy, field) for field in fields):
        raise ConfigError(
            f"mp_policy is a MixedPrecisionPolicy({', '.join(fields)}) here; got {type(policy).__name__}. FSDP1's "
            "MixedPrecision goes to FullyShardedDataParallel, fullshard's own to fullshard.fully_shard."
        )
    return MixedPrecision(
        param=policy.param_dtype,
        reduce=policy.reduce_dtype or policy.param_dtype,
        output=policy.output_dtype,
        cast_forward_inputs=policy.cast_forward_inputs,
    )


def offload_of(policy: Any) -> CPUOffload | None:
    """The engine's policy for FSDP2's, ours or torch's.

    Raises:
        ConfigError: It is something else.
    """
    kinds = {cls.__name__ for cls in type(policy).__mro__}
    if policy is None:
        return None
    if "OffloadPolicy" not in kinds:
        raise ConfigError(
            f"offload_policy is OffloadPolicy() or CPUOffloadPolicy(pin_memory=…) here; got {type(policy).__name__}."
        )
    return CPUOffload(pin_memory=policy.pin_memory) if "CPUOffloadPolicy" in kinds else None
