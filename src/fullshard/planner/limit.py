"""A time limit for plans."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from fullshard.errors import ConfigError

_DEADLINE_S: ContextVar[float] = ContextVar("deadline", default=float("inf"))
"""Processor time of this thread after which its plans are abandoned: a busy machine does not change the outcome."""


class TookTooLongError(ConfigError):
    """A plan was abandoned at its time limit."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """End plans inside the context after ``seconds`` of this thread's processor time, by :class:`TookTooLongError`."""
    token = _DEADLINE_S.set(time.thread_time() + seconds)
    try:
        yield
    finally:
        _DEADLINE_S.reset(token)


def check_time() -> None:
    """Raise if the time is up. A plan calls it wherever it may spend long, such as in each operator.

    Raises:
        TookTooLongError: The time is up.
    """
    if time.thread_time() > _DEADLINE_S.get():
        raise TookTooLongError("A plan took longer than its limit, and was abandoned.")
