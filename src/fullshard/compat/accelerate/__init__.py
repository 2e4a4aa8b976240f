"""The accelerate library with its ``Accelerator`` and ``FullyShardedDataParallelPlugin`` on fullshard's engine.

A script changes ``accelerate`` to ``fullshard.compat.accelerate`` in its imports: ``from fullshard.compat.accelerate
import Accelerator``, ``from fullshard.compat.accelerate.utils import set_seed``. Sharding, clipping, loss scaling and
saving are fullshard's; everything else (data loaders, gathering of values, trackers, printing) is the accelerate
library's. ``torch.distributed.fsdp`` is not used.
"""

import warnings
from typing import Any

import accelerate as _library

from fullshard.compat.accelerate.accelerator import Accelerator
from fullshard.compat.accelerate.plugin import FullyShardedDataParallelPlugin
from fullshard.compat.accelerate.replaced import PartialState, install as _install, name_of as _name_of
from fullshard.version import untested as _untested

__all__ = ["Accelerator", "FullyShardedDataParallelPlugin", "PartialState"]

_install()
if (_line := _untested("accelerate")) is not None:
    warnings.warn(_line, stacklevel=2)


def __getattr__(name: str) -> Any:
    """Return any other public name or module of Accelerate."""
    return _name_of(_library.__name__, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *dir(_library)})
