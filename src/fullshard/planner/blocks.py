"""Activations by block: which module's forward made what is alive."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import nn

OUTSIDE = "other_forward"
"""What forward makes outside of the model's modules, such as the loss, or in the model's own code."""

REST = "backward_and_temporaries"
"""What backward makes, recomputed activations too, and what operators hold until they return."""

_PEFTS = "base_model.model."
"""What peft's models put before every name."""


class Blocks:
    """Tells which block's forward runs: a module whose name ends with a number, or one that is not inside of such.

    Blocks that differ in numbers are one: ``encoder.block.0`` and ``encoder.block.1`` are ``encoder.block.*``.
    """

    def __init__(self, model: nn.Module, is_forward: Callable[[], bool]) -> None:
        """Watch ``model``; ``is_forward`` returns whether a step is in forward."""
        self._is_forward = is_forward
        self._running: list[str] = []
        names = {module: name for name, module in reversed([*_outer(model, "")])}  # a shared one has its first name
        for module, name in names.items():
            label = re.sub(r"(?<![^.])\d+(?![^.])", "*", name.removeprefix(_PEFTS))
            module.register_forward_pre_hook(partial(self._begin, label))
            module.register_forward_hook(self._end, always_call=True)

    def _begin(self, label: str, _module: nn.Module, _args: Any) -> None:
        self._running.append(label)

    def _end(self, *_args: Any) -> None:
        self._running.pop()

    def owner(self) -> str | None:
        """Return the block that makes a storage now; None: backward or the optimizer does."""
        if not self._is_forward():
            return None
        return self._running[-1] if self._running else OUTSIDE


def _outer(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield blocks and the modules around them, with their names."""
    for name, child in module.named_children():
        yield prefix + name, child
        if not name.isdigit():
            yield from _outer(child, f"{prefix}{name}.")
