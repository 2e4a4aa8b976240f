"""Files and object stores: the public name of ``fullshard.state.storage``."""

from fullshard.state.storage import *  # noqa: F403
