"""Arguments of ``FullyShardedDataParallel``: the names, fields and defaults of ``torch.distributed.fsdp.api``.

Plain values, as there. How each is turned into the engine's policies stands in ``fully_sharded_data_parallel`` (what is
sharded, dtypes, offload, prefetch) and in ``state_dict_type`` (what ``state_dict()`` returns).
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
    """What is sharded, and over which ranks.

    FULL_SHARD: parameters, gradients and optimizer state; gathered unit by unit for forward and again for backward.
    SHARD_GRAD_OP: the same at rest; what forward gathered stays until backward.
    NO_SHARD: nothing; gradients are all-reduced.
    HYBRID_SHARD: FULL_SHARD inside a machine (or a given group), copies across machines.
    _HYBRID_SHARD_ZERO2: SHARD_GRAD_OP inside a machine, copies across machines.
    """

    FULL_SHARD = auto()
    SHARD_GRAD_OP = auto()
    NO_SHARD = auto()
    HYBRID_SHARD = auto()
    _HYBRID_SHARD_ZERO2 = auto()


class BackwardPrefetch(Enum):
    """When backward gathers the next unit: before this unit's backward computes, or after its gradients went out.

    The wrapper takes None as well: when the unit is needed. It never changes what is computed.
    """

    BACKWARD_PRE = auto()
    BACKWARD_POST = auto()


@dataclass
class MixedPrecision:
    """Dtypes of a step.

    Attributes:
        param_dtype: Parameters are gathered and computed in it; shards keep their own. None: their own.
        reduce_dtype: Gradients travel in it. None: ``param_dtype``.
        buffer_dtype: Floating buffers are cast to it. None: as they are.
        keep_low_precision_grads: The shards' gradients stay in ``reduce_dtype``; False: in the shards' dtype.
        cast_forward_inputs: Floating inputs of units that are not the root are cast to ``param_dtype``.
        cast_root_forward_inputs: The same of the root; takes precedence there.
        _module_classes_to_ignore: With ``auto_wrap_policy``: modules of these classes compute in float32.
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
    """Where shards live.

    Attributes:
        offload_params: Shards, their gradients and so the optimizer's state live in host memory.
    """

    offload_params: bool = False


class StateDictType(Enum):
    """What ``state_dict()`` of a wrapped model returns and ``load_state_dict()`` takes.

    FULL_STATE_DICT: unsharded tensors under the unwrapped model's names.
    LOCAL_STATE_DICT: this rank's shards.
    SHARDED_STATE_DICT: this rank's part of each tensor, described so that another number of ranks can load it.
    """

    FULL_STATE_DICT = auto()
    LOCAL_STATE_DICT = auto()
    SHARDED_STATE_DICT = auto()


@dataclass
class StateDictConfig:
    """Base class of the settings of a state-dict type.

    Attributes:
        offload_to_cpu: Whether the values are in host memory.
    """

    offload_to_cpu: bool = False


@dataclass
class FullStateDictConfig(StateDictConfig):
    """Settings of ``FULL_STATE_DICT``.

    Attributes:
        rank0_only: Other ranks get an empty dict.
    """

    rank0_only: bool = False


@dataclass
class LocalStateDictConfig(StateDictConfig):
    """Settings of ``LOCAL_STATE_DICT``."""


@dataclass
class ShardedStateDictConfig(StateDictConfig):
    """Settings of ``SHARDED_STATE_DICT``.

    Attributes:
        _use_dtensor: Of what class the values are in torch; here they are of one class always.
    """

    _use_dtensor: bool = False


@dataclass
class OptimStateDictConfig:
    """Base class of the settings of an optimizer's state dict.

    Attributes:
        offload_to_cpu: Whether the values are in host memory.
    """

    offload_to_cpu: bool = True


@dataclass
class FullOptimStateDictConfig(OptimStateDictConfig):
    """Settings of the optimizer's state under ``FULL_STATE_DICT``.

    Attributes:
        rank0_only: Other ranks get an empty dict.
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
        _use_dtensor: Of what class the values are in torch; here they are of one class always.
    """

    _use_dtensor: bool = False


@dataclass
class StateDictSettings:
    """A state-dict type with the settings of model and optimizer."""

    state_dict_type: StateDictType
    state_dict_config: StateDictConfig
    optim_state_dict_config: OptimStateDictConfig


class OptimStateKeyType(Enum):
    """What keys of an optimizer's state dict are: names of parameters or their numbers."""

    PARAM_NAME = auto()
    PARAM_ID = auto()
