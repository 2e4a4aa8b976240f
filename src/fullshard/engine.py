"""Sharding a model, its controls and recorder: the public name of ``fullshard.core.engine``."""

from fullshard.core.engine import *  # noqa: F403
