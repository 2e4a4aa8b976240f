"""Who holds which elements: the public name of ``fullshard.core.layout``."""

from fullshard.core.layout import *  # noqa: F403
