"""Errors of version 1 that are of torch's class too: a script that catches torch's keeps working."""

from fullshard.errors import ConfigError, MismatchError, ShardingError, WrapError


class ArgumentError(ConfigError, ValueError):
    """A wrong argument, for which torch raises a ValueError."""


class UnsupportedError(ConfigError, NotImplementedError):
    """Arguments that do not go together, for which torch raises a NotImplementedError."""


class WrappedError(WrapError, ValueError):
    """A module that is wrapped already, for which torch raises a ValueError."""


class KindError(ConfigError, RuntimeError):
    """Settings of another kind of state dict, for which torch raises a RuntimeError."""


class RootError(ShardingError, RuntimeError, AssertionError):
    """A call on a wrapper inside of another one, for which torch raises a RuntimeError or an AssertionError."""


class StateError(ShardingError, ValueError):
    """A call while full parameters are shown, for which torch raises a ValueError."""


class OrderError(MismatchError, RuntimeError):
    """Ranks that call modules in another order, for which torch raises a RuntimeError."""


class SummonError(ShardingError, AssertionError):
    """Full parameters shown at a time when they cannot be, for which torch raises an AssertionError."""
