"""Tensors that are this rank's rows: the public name of ``fullshard.core.shards``."""

from fullshard.core.shards import *  # noqa: F403
