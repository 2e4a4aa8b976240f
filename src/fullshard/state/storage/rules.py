"""Types of the fields of files from outside, which pydantic checks when a file is parsed, and how a refusal reads."""

from __future__ import annotations

import importlib
import reprlib
from collections.abc import Callable, Mapping
from functools import cache
from math import isfinite, isnan
from typing import Annotated, Any, TypeVar

from annotated_types import Ge, Le, Len, Predicate

from fullshard.file_names import stays_inside

T = TypeVar("T")

MOST = (1 << 63) - 1
"""The largest accepted count: no file has more bytes, no tensor more elements."""

_MOST_PROBLEMS = 1000
"""Problems of a file from which the first is picked out; a list of more would fill the memory."""

_short = reprlib.Repr()
_short.maxstring = _short.maxother = _short.maxlong = 80


def shown(value: object) -> str:
    """Return a value as text of bounded length: a forged one may be huge or deeply nested."""
    return _short.repr(value)


def rule(text: str, holds: Callable[[Any], object]) -> Predicate:
    """Return a condition for the values of a type, and what it says of one that breaks it."""

    def require(value: Any) -> bool:
        if not holds(value):
            raise ValueError(text)
        return True

    return Predicate(require)


def _is_comparable(value: Any) -> bool:
    if type(value) is int:  # JSON's true is an int in Python
        return abs(value) <= MOST
    return type(value) is float and not isnan(value)


def _is_steppable(group: Mapping[str, Any]) -> bool:
    """Require the options of an optimizer's group: names of its parameters, plain values, no number that is nan."""
    check(Names, group.get("params"), "params")
    for key, value in group.items():
        values = value if isinstance(value, list) else [value]
        if key != "params" and not all(one is None or isinstance(one, (bool, int, float, str)) for one in values):
            raise ValueError(f"{key} must be a plain value")
        if any(isinstance(one, float) and (isnan(one) or (key == "lr" and not isfinite(one))) for one in values):
            raise ValueError(f"no optimizer can step with {key} {shown(value)}")
    return True


Count = Annotated[int, Ge(0), Le(MOST)]
Metric = Annotated[Any, rule("it must be a number or null", _is_comparable)] | None
Name = Annotated[str, Len(1, 4096), rule("it must have no NUL", lambda text: "\0" not in text)]
Names = list[Name]
FileName = Annotated[Name, rule("it is not a file of the checkpoint", stays_inside)]
"""Name of a file inside the checkpoint: a relative path that does not lead out of it."""
Options = Annotated[Mapping[str, Any], Predicate(_is_steppable)]


@cache
def _adapter(kind: Any) -> Any:
    # Imported when a file is read: scripts that only shard a model need no pydantic, which takes a tenth of a second.
    pydantic = importlib.import_module("pydantic")
    return pydantic.TypeAdapter(kind)


def parse(kind: type[T], content: bytes) -> T:
    """Parse a JSON object as a dataclass, by the types of its fields and strictly; unknown names are ignored.

    Raises:
        ValueError: It is not JSON, or a field is missing or not of its type.
    """
    try:
        return _adapter(kind).validate_json(content, strict=True)
    except ValueError as error:
        raise ValueError(_why(error, "")) from None


def check(kind: Any, value: Any, what: str) -> Any:
    """Return a value that is strictly of a type of this module; ``what`` names it in the message.

    Raises:
        ValueError: It is not.
    """
    try:
        return _adapter(kind).validate_python(value, strict=True)
    except ValueError as error:
        raise ValueError(_why(error, what)) from None


def _why(error: Any, what: str) -> str:
    """Return the first problem of a validation as text of bounded length."""
    if error.error_count() > _MOST_PROBLEMS:
        return f"{error.error_count():,} of its values are not of their types"
    first = error.errors(include_url=False)[0]
    where = [part if str(part).isidentifier() else shown(part) for part in first["loc"] if part != "[key]"]
    where = ".".join(map(str, [what, *where] if what else where)) or "it"
    if first["type"] == "missing":
        return f"it has no {where}"
    rule = first["msg"].removeprefix("Value error, ")
    if first["type"] == "json_invalid":
        return rule
    return f"{where} is {shown(first['input'])}: {rule}"
