"""The library: collects ``fullshard``'s public names in one import."""

import warnings

from fullshard.core.comm import init_from_env as init, shutdown
from fullshard.core.engine import (
    UnitTable,
    average_ignored_gradients,
    broadcast_buffers,
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
    vocab_parallel_loss,
)
from fullshard.core.optim import ShardedGradScaler, StepInBackward, clip_grad_norm_, step_in_backward
from fullshard.core.policy import (
    BackwardPrefetch,
    CPUOffload,
    MinNumel,
    MixedPrecision,
    Named,
    Prefetch,
    Quantize,
    ShardingStrategy,
    TransformerBlocks,
)
from fullshard.core.sequence import sequence_parallel
from fullshard.core.shards import Shard
from fullshard.planner import Plan, plan
from fullshard.state.saving import (
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
from fullshard.version import __version__, untested

__all__ = [
    "BackwardPrefetch",
    "CPUOffload",
    "Checkpoints",
    "MinNumel",
    "MixedPrecision",
    "Named",
    "Plan",
    "Prefetch",
    "Pretrained",
    "Quantize",
    "Restored",
    "Shard",
    "ShardedGradScaler",
    "ShardingStrategy",
    "StepInBackward",
    "TransformerBlocks",
    "UnitTable",
    "__version__",
    "average_ignored_gradients",
    "broadcast_buffers",
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
    "plan",
    "register_forward_method",
    "reset",
    "save",
    "sequence_parallel",
    "shutdown",
    "step_in_backward",
    "units",
    "unsharded",
    "vocab_parallel_loss",
    "write_assets",
]

if (_line := untested("torch")) is not None:
    warnings.warn(_line, stacklevel=2)
