"""Checkpoints and full saves: the public name of ``fullshard.state.saving``."""

from fullshard.state.saving import *  # noqa: F403
