"""Every private torch name the engine uses, in one place, with the reason for each."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch._C._dynamo.eval_frame import set_eval_frame
from torch.autograd import Variable

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


def in_backward() -> bool:
    """Return whether this thread is inside ``backward()``: a forward that runs there is a recomputation."""
    return torch._C._current_graph_task_id() >= 0


def call_after_backward(callback: Callable[[], None]) -> None:
    """Have autograd call ``callback`` at the end of the running ``backward()``, in this thread."""
    Variable._execution_engine.queue_callback(callback)  # type: ignore[attr-defined]


def will_execute(node: Any) -> bool:
    """Return whether the running backward executes ``node``; not if it was asked for other inputs only."""
    return torch._C._will_engine_execute_node(node)


def can_take_data(tensor: torch.Tensor, data: torch.Tensor) -> bool:
    """Return whether ``tensor.data = data`` is possible: between CPU and CUDA, but not from or to the meta device."""
    return torch._has_compatible_shallow_copy_type(tensor, data)  # pyright: ignore[reportPrivateImportUsage]
