"""Arguments of ``FullyShardedDataParallel``: the names, fields and defaults of ``torch.distributed.fsdp.api``.

Plain values, as in torch. ``arguments`` turns them into the engine's policies, and ``state_dict_type`` into settings of
``state_dict()``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

__all__ = [
    "BackwardPrefetch",
    "CPUOffload",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MixedPrecision",
    "OptimStateDictConfig",
    "OptimStateKeyType",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
]


class ShardingStrategy(Enum):
    """Sharding strategy: what is sharded, and over which ranks.

    FULL_SHARD: parameters, gradients and optimizer state; gathered unit by unit for forward and again for backward.
    SHARD_GRAD_OP: the same, but gathered parameters are kept between forward and backward.
    NO_SHARD: nothing; gradients are all-reduced.
    HYBRID_SHARD: FULL_SHARD inside a machine (or a given group), replicated across machines.
    _HYBRID_SHARD_ZERO2: SHARD_GRAD_OP inside a machine, replicated across machines.
    """

    FULL_SHARD = auto()
    SHARD_GRAD_OP = auto()
    NO_SHARD = auto()
    HYBRID_SHARD = auto()
    _HYBRID_SHARD_ZERO2 = auto()


class BackwardPrefetch(Enum):
    """When backward gathers the next unit: before the current unit's backward, or after its gradients are sent.

    The wrapper also takes None: when the unit is needed. Results are the same in all cases.
    """

    BACKWARD_PRE = auto()
    BACKWARD_POST = auto()


@dataclass
class MixedPrecision:
    """Dtypes of a step.

    Attributes:
        param_dtype: Dtype of gathered parameters and of compute; shards keep their own. None: the parameters' own.
        reduce_dtype: Dtype that gradients are reduced in. None: ``param_dtype``.
        buffer_dtype: Dtype that floating buffers are cast to. None: their own.
        keep_low_precision_grads: Keep the shards' gradients in ``reduce_dtype``; False: cast to the shards' dtype.
        cast_forward_inputs: Cast floating inputs of units other than the root to ``param_dtype``.
        cast_root_forward_inputs: Cast floating inputs of the root; takes precedence over ``cast_forward_inputs``.
        _module_classes_to_ignore: With ``auto_wrap_policy``, modules of these classes compute in float32.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    keep_low_precision_grads: bool = False
    cast_forward_inputs: bool = False
    cast_root_forward_inputs: bool = True
    _module_classes_to_ignore: Sequence[type[nn.Module]] = (_BatchNorm,)


@dataclass
class CPUOffload:
    """Placement of shards.

    Attributes:
        offload_params: Keep shards, their gradients and thus the optimizer's state in host memory.
    """

    offload_params: bool = False


class TrainingState(Enum):
    """What a wrapper does: torch's private enum of this name, for code that compares names."""

    IDLE = auto()
    FORWARD_BACKWARD = auto()
    SUMMON_FULL_PARAMS = auto()


class StateDictType(Enum):
    """Kind of state dict that a wrapped model's ``state_dict()`` returns and ``load_state_dict()`` takes.

    FULL_STATE_DICT: unsharded tensors under the unwrapped model's names.
    LOCAL_STATE_DICT: this rank's shards.
    SHARDED_STATE_DICT: this rank's part of each tensor and its place, so that any number of ranks can load it.
    """

    FULL_STATE_DICT = auto()
    LOCAL_STATE_DICT = auto()
    SHARDED_STATE_DICT = auto()


@dataclass
class StateDictConfig:
    """Base class of the settings of a state-dict type.

    Attributes:
        offload_to_cpu: Put the values in host memory.
    """

    offload_to_cpu: bool = False


@dataclass
class FullStateDictConfig(StateDictConfig):
    """Settings of ``FULL_STATE_DICT``.

    Attributes:
        rank0_only: Return an empty dict on all ranks except 0.
    """

    rank0_only: bool = False


@dataclass
class LocalStateDictConfig(StateDictConfig):
    """Settings of ``LOCAL_STATE_DICT``."""


@dataclass
class ShardedStateDictConfig(StateDictConfig):
    """Settings of ``SHARDED_STATE_DICT``.

    Attributes:
        _use_dtensor: No effect: values are never DTensors.
    """

    _use_dtensor: bool = False


@dataclass
class OptimStateDictConfig:
    """Base class of the settings of an optimizer's state dict.

    Attributes:
        offload_to_cpu: Put the values in host memory.
    """

    offload_to_cpu: bool = True


@dataclass
class FullOptimStateDictConfig(OptimStateDictConfig):
    """Settings of the optimizer's state under ``FULL_STATE_DICT``.

    Attributes:
        rank0_only: Return an empty dict on all ranks except 0.
    """

    rank0_only: bool = False


@dataclass
class LocalOptimStateDictConfig(OptimStateDictConfig):
    """Settings of the optimizer's state under ``LOCAL_STATE_DICT``."""

    offload_to_cpu: bool = False


@dataclass
class ShardedOptimStateDictConfig(OptimStateDictConfig):
    """Settings of the optimizer's state under ``SHARDED_STATE_DICT``.

    Attributes:
        _use_dtensor: No effect: values are never DTensors.
    """

    _use_dtensor: bool = False


@dataclass
class StateDictSettings:
    """A state-dict type with its settings for the model and the optimizer."""

    state_dict_type: StateDictType
    state_dict_config: StateDictConfig
    optim_state_dict_config: OptimStateDictConfig


class OptimStateKeyType(Enum):
    """Keys of an optimizer's state dict: parameter names or numbers."""

    PARAM_NAME = auto()
    PARAM_ID = auto()
