"""Tables to batches: the public name of ``fullshard.program.data``."""

from fullshard.program.data import *  # noqa: F403
