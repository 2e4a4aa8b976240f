"""Keeping torch.compile out of a function."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from torch._C._dynamo.eval_frame import set_eval_frame

Untraced = TypeVar("Untraced", bound=Callable[..., Any])


def untraced(function: Untraced) -> Untraced:
    """Have torch.compile break its graph at ``function`` and not trace anything it calls.

    The same as ``torch.compiler.disable``, which would import the compiler: one second of every start.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        before = set_eval_frame(None)
        try:
            return function(*args, **kwargs)
        finally:
            set_eval_frame(before)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    return call  # type: ignore[return-value]
