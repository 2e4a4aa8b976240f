"""The names of ``torch.distributed.fsdp``, version 1 and 2, on fullshard's engine, on CPUs and GPUs.

A script only changes its imports: ``torch.distributed.fsdp`` becomes ``fullshard.compat.torch_fsdp``; its modules keep
their names (``.wrap``, ``.api``, ``.fully_sharded_data_parallel``, ``.sharded_grad_scaler``). Names from elsewhere in
torch that such scripts use are here too: ``checkpoint_wrapper``, ``CheckpointImpl``,
``apply_activation_checkpointing``, ``load_sharded_optimizer_state_dict``. The function ``wrap`` is in the module
``wrap``, as in torch.

``FlatParameter`` has no counterpart: parameters are always the original ones. The other differences are listed in
``docs/reference/compat/``.
"""

from fullshard.compat.torch_fsdp import api, fsdp2
from fullshard.compat.torch_fsdp.api import *  # noqa: F403 (the names of its __all__, below too)
from fullshard.compat.torch_fsdp.checkpointing import (
    CheckpointImpl,
    CheckpointWrapper,
    OffloadWrapper,
    apply_activation_checkpointing,
    apply_activation_checkpointing_wrapper,
    checkpoint_wrapper,
    offload_wrapper,
)
from fullshard.compat.torch_fsdp.fsdp2 import *  # noqa: F403
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
    "CheckpointImpl",
    "CheckpointWrapper",
    "CustomPolicy",
    "FullyShardedDataParallel",
    "ModuleWrapPolicy",
    "OffloadWrapper",
    "ShardedGradScaler",
    "always_wrap_policy",
    "apply_activation_checkpointing",
    "apply_activation_checkpointing_wrapper",
    "checkpoint_wrapper",
    "enable_wrap",
    "lambda_auto_wrap_policy",
    "load_sharded_optimizer_state_dict",
    "offload_wrapper",
    "size_based_auto_wrap_policy",
    "transformer_auto_wrap_policy",
]
__all__ += api.__all__
__all__ += fsdp2.__all__
