"""What a user chooses: the public name of ``fullshard.core.policy``."""

from fullshard.core.policy import *  # noqa: F403
