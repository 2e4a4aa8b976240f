"""Every private torch name the engine uses, in one place, with the reason for each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import Variable


def in_backward() -> bool:
    """Return whether this thread is inside ``backward()``: a forward that runs there is a recomputation."""
    return torch._C._current_graph_task_id() >= 0


def call_after_backward(callback: Callable[[], None]) -> None:
    """Have autograd call ``callback`` at the end of the running ``backward()``, in this thread."""
    Variable._execution_engine.queue_callback(callback)  # type: ignore[attr-defined]


def _backward_to_full_parameters(*args: Any, **kwargs: Any) -> None:
    """Run ``torch.autograd.backward``; of a shard among ``inputs``, the full parameter is what the graph knows."""
    inputs = kwargs.get("inputs")
    if inputs is not None:
        given = [inputs] if isinstance(inputs, torch.Tensor) else inputs
        kwargs["inputs"] = [_in_graph(one) for one in given]
    _backward(*args, **kwargs)


def _in_graph(tensor: torch.Tensor) -> torch.Tensor:
    full = vars(tensor).get("full_parameter")
    if full is None:
        return tensor
    full().__class__ = torch.nn.Parameter  # not refused as freed: its unit is gathered before it is read
    return full()


_backward = torch.autograd.backward
torch.autograd.backward = _backward_to_full_parameters


def will_execute(node: Any) -> bool:
    """Return True if the running backward executes ``node``; False if it was asked for other inputs only."""
    return torch._C._will_engine_execute_node(node)


def can_take_data(tensor: torch.Tensor, data: torch.Tensor) -> bool:
    """Return True if ``tensor.data = data`` is possible: between CPU and CUDA, but not from or to the meta device."""
    return torch._has_compatible_shallow_copy_type(tensor, data)  # pyright: ignore[reportPrivateImportUsage]
