"""The optimizers: the public name of ``fullshard.core.optim``."""

from fullshard.core.optim import *  # noqa: F403
from fullshard.core.optim import __all__ as __all__
