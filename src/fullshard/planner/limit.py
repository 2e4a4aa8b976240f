"""A limit on the work of plans, counted in operators: the same plans are made on a busy machine and on an idle one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from fullshard.errors import ConfigError


class _Allowance:
    """The operators that plans may still take."""

    def __init__(self, operators: float) -> None:
        self.left = operators


_ALLOWANCE: ContextVar[_Allowance | None] = ContextVar("allowance", default=None)


class TooMuchWorkError(ConfigError):
    """A plan was abandoned at its limit."""


@contextmanager
def work_limit(operators: int) -> Iterator[None]:
    """End plans inside the context by :class:`TooMuchWorkError` once they have taken so many operators together."""
    token = _ALLOWANCE.set(_Allowance(operators))
    try:
        yield
    finally:
        _ALLOWANCE.reset(token)


def spend(operators: int) -> None:
    """Count work of a plan; called wherever it may be much. What takes as long as an operator counts as one.

    Raises:
        TooMuchWorkError: It is more than the limit.
    """
    allowance = _ALLOWANCE.get()
    if allowance is None:
        return
    allowance.left -= operators
    if allowance.left < 0:
        raise TooMuchWorkError("A plan took more operators than its limit, and was abandoned.")
