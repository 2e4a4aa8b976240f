"""A limit on how long a plan may take."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from fullshard.errors import ConfigError

_DEADLINE_S: ContextVar[float] = ContextVar("deadline", default=float("inf"))
"""Value of the monotonic clock after which plans of this thread are given up."""


class TookTooLongError(ConfigError):
    """A plan was given up at its limit."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Context whose plans are given up ``seconds`` after it was entered, with a :class:`TookTooLongError`."""
    token = _DEADLINE_S.set(time.monotonic() + seconds)
    try:
        yield
    finally:
        _DEADLINE_S.reset(token)


def check_time() -> None:
    """Raise if the time is up. A plan calls it wherever it may spend long, such as in each operator.

    Raises:
        TookTooLongError: It is.
    """
    if time.monotonic() > _DEADLINE_S.get():
        raise TookTooLongError("A plan took longer than it may, and was given up.")
