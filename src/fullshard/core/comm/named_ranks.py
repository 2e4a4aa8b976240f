"""Groups that are only described by a rank's number and the number of ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from fullshard.core.comm.mesh import SoloComm
from fullshard.core.comm.protocol import Comm
from fullshard.errors import ProcessGroupError


def named_ranks(group: Any, device: torch.device | None) -> Any:
    """Return a Comm for an object that only has ``rank()`` and ``size()``, as in tests of wrapping; else ``group``."""
    described = callable(getattr(group, "rank", None)) and callable(getattr(group, "size", None))
    if not described or isinstance(group, (Comm, dist.ProcessGroup)):
        return group
    solo = SoloComm(device or torch.device("cpu"))
    return solo if group.size() == 1 else NamedRanks(group.rank(), group.size(), solo.device)


class NamedRanks:
    """Ranks that cannot be reached: modules can be sharded and inspected for them, as if all held the same values."""

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        """Describe rank ``rank`` of ``size``."""
        self.rank, self.size, self.device = rank, size, device

    def announce(self, what: str) -> None:
        """See :meth:`Comm.announce`: ignored."""

    def all_gather_object(self, value: Any) -> list[Any]:
        """See :meth:`Comm.all_gather_object`: this rank's value for every rank."""
        return [value] * self.size

    def _refuse(self, *_args: Any, **_kwargs: Any) -> Any:
        raise ProcessGroupError(
            f"The process group only has rank() and size(), so its {self.size} ranks cannot communicate: a model can "
            "be wrapped with it, but not run. Pass a group of torch.distributed."
        )

    all_gather = reduce_scatter = all_reduce = broadcast = gather = exchange = barrier = _refuse
