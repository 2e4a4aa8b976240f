"""Errors of ``fully_shard`` that are also of the class which torch raises: scripts catch that one.

Their messages contain the words by which scripts recognise torch's.
"""

from fullshard.errors import ConfigError, ProcessGroupError, ShardingError, WrapError


class ConfigAssertionError(ConfigError, AssertionError):
    """A ConfigError where torch raises AssertionError."""


class MeshValueError(ProcessGroupError, ValueError):
    """A ProcessGroupError where torch raises ValueError."""


class ShardingAssertionError(ShardingError, AssertionError):
    """A ShardingError where torch raises AssertionError."""


class WrapValueError(WrapError, ValueError):
    """A WrapError where torch raises ValueError."""
