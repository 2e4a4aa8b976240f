"""``backward(inputs=…)`` with shards, which torch's graph does not know: it has the full parameters.

torch has no hook there, so ``torch.autograd.backward`` is replaced for as long as a sharded model lives. Not only in
its passes: a graph may be kept (``retain_graph=True``) and asked for other inputs later, and torch would silently give
none.
"""

from __future__ import annotations

import functools
import threading
import weakref
from typing import Any

import torch

_lock = threading.RLock()  # a model may be freed by a garbage collection in any line here
_living: set[int] = set()
_replaced: list[Any] = []
"""What is replaced, and by what; empty while nothing is."""


def accept_shards_while_alive(model: object) -> None:
    """Let ``backward(inputs=…)`` take shards until ``model`` is freed; in any thread."""
    with _lock:
        _living.add(id(model))
        weakref.finalize(model, _freed, id(model)).atexit = False
        if not _replaced:
            torchs = torch.autograd.backward

            @functools.wraps(torchs)
            def backward(*args: Any, **kwargs: Any) -> None:
                inputs = kwargs.get("inputs")
                if inputs is not None:
                    given = [inputs] if isinstance(inputs, torch.Tensor) else inputs
                    kwargs["inputs"] = [_in_graph(one) for one in given]
                torchs(*args, **kwargs)

            _replaced[:] = torchs, backward
            torch.autograd.backward = backward


def _freed(model: int) -> None:
    with _lock:
        _living.discard(model)
        # If somebody has wrapped ours meanwhile, it stays, and only passes on.
        if not _living and _replaced and torch.autograd.backward is _replaced[1]:
            torch.autograd.backward = _replaced[0]
            _replaced.clear()


def _in_graph(tensor: Any) -> Any:
    """Return the full parameter of a shard, not refused as freed: its unit is gathered before it is read."""
    full = getattr(tensor, "__dict__", {}).get("full_parameter")
    if full is None:
        return tensor
    full().__class__ = torch.nn.Parameter
    return full()
