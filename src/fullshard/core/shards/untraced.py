"""Exclusion of a function from torch.compile."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from fullshard.core.torch_private import set_eval_frame

Untraced = TypeVar("Untraced", bound=Callable[..., Any])


def untraced(function: Untraced) -> Untraced:
    """Make torch.compile break its graph at ``function`` and trace nothing that it calls.

    Like ``torch.compiler.disable``, which would import the compiler and add a second to every start.
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
