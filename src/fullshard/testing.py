"""Ranks as threads, for tests: the public name of ``fullshard.core.testing``."""

from fullshard.core.testing import *  # noqa: F403
