"""Collectives and devices: the public name of ``fullshard.core.comm``."""

from fullshard.core.comm import *  # noqa: F403
