"""Building and loading models: the public name of ``fullshard.program.models``."""

from fullshard.program.models import *  # noqa: F403
