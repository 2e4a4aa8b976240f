"""fullshard trains PyTorch models that do not fit on one GPU."""

from fullshard.comm import init_from_env as init
from fullshard.comm import shutdown
from fullshard.engine import (
    UnitTable,
    full_state_dict,
    full_tensors,
    fully_shard,
    memory_summary,
    no_all_reduce,
    no_sync,
    register_forward_method,
    reset,
    units,
    unsharded,
)
from fullshard.optim import ShardedGradScaler, StepInBackward, clip_grad_norm_, step_in_backward
from fullshard.policy import (
    BackwardPrefetch,
    CPUOffload,
    MinNumel,
    MixedPrecision,
    Named,
    Prefetch,
    ShardingStrategy,
    TransformerBlocks,
)
from fullshard.saving import (
    Checkpoints,
    Pretrained,
    Restored,
    full_optimizer_state,
    load,
    load_checkpoint,
    load_optimizer_state,
    save,
    write_assets,
)
from fullshard.version import __version__

__all__ = [
    "BackwardPrefetch",
    "CPUOffload",
    "Checkpoints",
    "MinNumel",
    "MixedPrecision",
    "Named",
    "Prefetch",
    "Pretrained",
    "Restored",
    "ShardedGradScaler",
    "ShardingStrategy",
    "StepInBackward",
    "TransformerBlocks",
    "UnitTable",
    "__version__",
    "clip_grad_norm_",
    "full_optimizer_state",
    "full_state_dict",
    "full_tensors",
    "fully_shard",
    "init",
    "load",
    "load_checkpoint",
    "load_optimizer_state",
    "memory_summary",
    "no_all_reduce",
    "no_sync",
    "register_forward_method",
    "reset",
    "save",
    "shutdown",
    "step_in_backward",
    "units",
    "unsharded",
    "write_assets",
]
