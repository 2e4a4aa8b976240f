"""Accelerate's object over fullshard's engine: ``Accelerator`` and ``FullyShardedDataParallelPlugin``.

A script changes ``from accelerate import Accelerator`` to ``from fullshard.compat.accelerate import Accelerator``.
Loaders, gathering, trackers, printing and the rest come from the accelerate library; sharding, clipping, scaling and
saving are fullshard's, and nothing of ``torch.distributed.fsdp`` is used.
"""

from fullshard.compat.accelerate.accelerator import Accelerator
from fullshard.compat.accelerate.plugin import FullyShardedDataParallelPlugin

__all__ = ["Accelerator", "FullyShardedDataParallelPlugin"]
