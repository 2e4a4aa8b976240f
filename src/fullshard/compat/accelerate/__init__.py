"""Accelerate's ``Accelerator`` and ``FullyShardedDataParallelPlugin`` on fullshard's engine.

A script changes ``from accelerate import Accelerator`` to ``from fullshard.compat.accelerate import Accelerator``.
Sharding, clipping, loss scaling and saving are fullshard's; everything else (data loaders, gathering of values,
trackers, printing) is the accelerate library's. ``torch.distributed.fsdp`` is not used.
"""

from fullshard.compat.accelerate.accelerator import Accelerator
from fullshard.compat.accelerate.plugin import FullyShardedDataParallelPlugin

__all__ = ["Accelerator", "FullyShardedDataParallelPlugin"]
