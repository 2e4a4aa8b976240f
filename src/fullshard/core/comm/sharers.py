"""Marks on the modules of a model whose ranks share rows, by which other rooms know these ranks."""

from __future__ import annotations

from typing import Any

from torch import nn

from fullshard.core.comm.protocol import Comm

_MARK = "_fullshard_shared_by"


class _Mark:
    """The ranks that share a module's rows; copies of the module keep it."""

    def __init__(self, comm: Comm) -> None:
        """Mark a module of ``comm``."""
        self.comm = comm

    def __deepcopy__(self, memo: dict[int, Any]) -> _Mark:
        return self


def mark_shared(model: nn.Module, comm: Comm) -> None:
    """Note on each module of ``model`` that the ranks of ``comm`` share its rows: any of them may be sharded alone."""
    for module in model.modules():
        setattr(module, _MARK, _Mark(comm))


def marked_sharers(module: Any) -> Comm | None:
    """Return the ranks that share the rows of a module; None if none do."""
    mark = getattr(module, _MARK, None)
    return None if mark is None else mark.comm
