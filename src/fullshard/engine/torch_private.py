"""Every private torch name the engine uses, in one place, with the reason for each."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.autograd import Variable


def in_backward() -> bool:
    """Whether this thread is inside ``backward()``: a forward that runs there is a recomputation."""
    return torch._C._current_graph_task_id() >= 0


def call_after_backward(callback: Callable[[], None]) -> None:
    """Have autograd call ``callback`` at the end of the running ``backward()``, in this thread."""
    Variable._execution_engine.queue_callback(callback)  # type: ignore[attr-defined]
