"""Validation of values read from untrusted files: each function returns the value or raises a ValueError."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from math import isfinite, isnan
from typing import Any

from fullshard.file_names import stays_inside

MOST = (1 << 63) - 1
"""The largest accepted count: no file has more bytes, no tensor more elements."""

_NAME_LENGTH = 4096

_short = reprlib.Repr()
_short.maxstring = _short.maxother = _short.maxlong = 80


def shown(value: object) -> str:
    """Return a value as text of bounded length: a forged one may be huge or deeply nested."""
    return _short.repr(value)


def count(value: Any, what: str, least: int = 0, most: int = MOST) -> int:
    """Require a whole number."""
    if (
        not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most
    ):  # JSON's true is an int in Python
        raise ValueError(f"{what} is {shown(value)}; it must be a whole number of at least {least}")
    return value


def counts(values: Any, what: str, most: int = MOST) -> tuple[int, ...]:
    """Require a list of whole numbers of at least 0."""
    if type(values) is not list or not set(map(type, values)) <= {int}:
        raise ValueError(f"{what} is {shown(values)}; it must be a list of whole numbers")
    if values and (min(values) < 0 or max(values) > most):
        raise ValueError(f"{what} is {shown(values)}; its numbers must be from 0 to {most}")
    return tuple(values)


def metric(value: Any) -> float | None:
    """Require a number that can be compared, or None."""
    known = value is None or (type(value) is int and abs(value) <= MOST) or (type(value) is float and not isnan(value))
    if not known:
        raise ValueError(f"metric is {shown(value)}; it must be a number or null")
    return value


def flag(value: Any, what: str) -> bool | None:
    """Require true, false or None."""
    if value is not None and type(value) is not bool:
        raise ValueError(f"{what} is {shown(value)}; it must be true, false or null")
    return value


def name(value: Any, what: str) -> str:
    """Require a name: a text of bounded length without NUL."""
    if not isinstance(value, str) or not 0 < len(value) <= _NAME_LENGTH or "\0" in value:
        raise ValueError(f"{what} is {shown(value)}; it must be a text of 1 to {_NAME_LENGTH:,} characters without NUL")
    return value


def names(values: Any, what: str) -> list[str]:
    """Require a list of names."""
    if not isinstance(values, (list, tuple)):
        raise ValueError(f"{what} is {shown(values)}; it must be a list of names")
    return [name(value, f"a name in {what}") for value in values]


def file_name(value: Any, what: str) -> str:
    """Require the name of a file inside the checkpoint: a relative path that does not lead out of it."""
    if not stays_inside(name(value, what)):
        raise ValueError(f"{what} is {shown(value)}, which is not a file of the checkpoint")
    return value


def mapping(value: Any, what: str) -> Mapping[str, Any]:
    """Require an object."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{what} is {shown(value)}; it must be an object")
    return value


def options(group: Any, what: str) -> Mapping[str, Any]:
    """Require the options of an optimizer's group: names of its parameters, plain values, no number that is nan."""
    for key, value in mapping(group, what).items():
        values: Sequence[Any] = value if isinstance(value, (list, tuple)) else (value,)
        if key == "params":
            names(value, f"params of {what}")
        elif not all(one is None or isinstance(one, (bool, int, float, str)) for one in values):
            raise ValueError(f"{key} of {what} is {shown(value)}; it must be a plain value")
        elif any(isinstance(one, float) and (isnan(one) or (key == "lr" and not isfinite(one))) for one in values):
            raise ValueError(f"{key} of {what} is {shown(value)}, which no optimizer can step with")
    if "params" not in group:
        raise ValueError(f"{what} has no params")
    return group
