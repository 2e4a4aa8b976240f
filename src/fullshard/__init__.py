"""fullshard trains PyTorch models that do not fit on one GPU."""

from fullshard.comm import init_from_env as init
from fullshard.comm import shutdown
from fullshard.engine import UnitTable, full_tensors, fully_shard, memory_summary, no_sync, reset, units, unsharded
from fullshard.optim import clip_grad_norm_
from fullshard.policy import BackwardPrefetch, MinNumel, MixedPrecision, ShardingStrategy, TransformerBlocks
from fullshard.saving import save
from fullshard.version import __version__

__all__ = [
    "BackwardPrefetch",
    "MinNumel",
    "MixedPrecision",
    "ShardingStrategy",
    "TransformerBlocks",
    "UnitTable",
    "__version__",
    "clip_grad_norm_",
    "full_tensors",
    "fully_shard",
    "init",
    "memory_summary",
    "no_sync",
    "reset",
    "save",
    "shutdown",
    "units",
    "unsharded",
]
