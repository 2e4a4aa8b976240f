"""The names of ``torch.distributed.fsdp``, version 1 and 2, on fullshard's engine, on CPUs and GPUs.

A script only changes its imports: ``torch.distributed.fsdp`` becomes ``fullshard.compat.torch_fsdp``; its modules keep
their names (``.wrap``, ``.api``, ``.fully_sharded_data_parallel``, ``.sharded_grad_scaler``). Names from elsewhere in
torch that such scripts use are here too: ``checkpoint_wrapper``, ``CheckpointImpl``,
``apply_activation_checkpointing``, ``load_sharded_optimizer_state_dict``. The function ``wrap`` is in the module
``wrap``, as in torch.

``FlatParameter`` has no counterpart: parameters are always the original ones. The other differences are listed in
``docs/reference/compat/``.
"""

from fullshard.compat.torch_fsdp.api import (
    BackwardPrefetch,
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    MixedPrecision,
    OptimStateDictConfig,
    OptimStateKeyType,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)
from fullshard.compat.torch_fsdp.checkpointing import (
    CheckpointImpl,
    CheckpointWrapper,
    OffloadWrapper,
    apply_activation_checkpointing,
    apply_activation_checkpointing_wrapper,
    checkpoint_wrapper,
    offload_wrapper,
)
from fullshard.compat.torch_fsdp.fsdp2 import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    UnshardHandle,
    fully_shard,
    register_fsdp_forward_method,
    share_comm_ctx,
)
from fullshard.compat.torch_fsdp.fully_sharded_data_parallel import FullyShardedDataParallel
from fullshard.compat.torch_fsdp.optim_state import load_sharded_optimizer_state_dict
from fullshard.compat.torch_fsdp.sharded_grad_scaler import ShardedGradScaler
from fullshard.compat.torch_fsdp.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    always_wrap_policy,
    enable_wrap,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)

__all__ = [
    "BackwardPrefetch",
    "CPUOffload",
    "CPUOffloadPolicy",
    "CheckpointImpl",
    "CheckpointWrapper",
    "CustomPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "FullyShardedDataParallel",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MixedPrecision",
    "MixedPrecisionPolicy",
    "ModuleWrapPolicy",
    "OffloadPolicy",
    "OffloadWrapper",
    "OptimStateDictConfig",
    "OptimStateKeyType",
    "ShardedGradScaler",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
    "UnshardHandle",
    "always_wrap_policy",
    "apply_activation_checkpointing",
    "apply_activation_checkpointing_wrapper",
    "checkpoint_wrapper",
    "enable_wrap",
    "fully_shard",
    "lambda_auto_wrap_policy",
    "load_sharded_optimizer_state_dict",
    "offload_wrapper",
    "register_fsdp_forward_method",
    "share_comm_ctx",
    "size_based_auto_wrap_policy",
    "transformer_auto_wrap_policy",
]
