"""The lane of parameters of which some were divided by tensor parallelism, and such a parameter."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import torch
from torch import nn

from fullshard.core.comm import Comm, GridComm, grid_of
from fullshard.core.engine.parallel.parallel import Parallel
from fullshard.core.engine.step.lane import Lane
from fullshard.core.engine.step.param import ShardedParam
from fullshard.core.shards import FreedParameter, row_split_of
from fullshard.errors import ShardingError


@dataclass(eq=False)
class ParallelLane(Lane):
    """A lane of blocks: gathered and reduced as any other; modules get DTensors around them.

    Attributes:
        parallels: For each placement, how the parameter is divided; None for plain ones. Set before ``allocate``.
    """

    parallels: list[Parallel | None] = field(init=False)

    @property
    def blocks(self) -> Comm:
        """The ranks that divide its parameters."""
        return next(one.comm for one in self.parallels if one is not None)

    def full_view(self, place: int) -> torch.Tensor:
        """See :meth:`Lane.full_view`; of divided parameters, a DTensor of the gathered memory."""
        block, parallel = super().full_view(place), self.parallels[place]
        return block if parallel is None else parallel.around(block)

    def add_gradient(self, place: int, gradient: torch.Tensor) -> None:
        """See :meth:`Lane.add_gradient`; the ranks that divide the parameter add up first what is a sum over them."""
        parallel = self.parallels[place]
        super().add_gradient(place, gradient if parallel is None else parallel.block_of(gradient))


class ParallelParam(ShardedParam):
    """A parameter that modules see as a DTensor, and optimizers as the rows that this rank has of its block."""

    lane: ParallelLane

    def bind(self, *, trainable: bool) -> None:
        """See :meth:`ShardedParam.bind`."""
        kind = type(self.lane.full_view(self.place))
        self.plain_class, self.shown_class, self.freed_class = _writable_class(kind), kind, _freed_class(kind)
        super().bind(trainable=trainable)

    @property
    def parallel(self) -> Parallel:
        """How it is divided."""
        found = self.lane.parallels[self.place]
        assert found is not None
        return found

    @property
    def grid(self) -> GridComm:
        """The ranks that hold parts of the full parameter: those that share its block, times those that have others."""
        return grid_of(self.lane.mesh.shard_group, self.parallel.comm)

    def whole_on_first(self, block: torch.Tensor) -> torch.Tensor | None:
        """Return the full parameter on the first of the ranks that divide it, all of which call it; else None.

        Args:
            block: This rank's block, on the device of collectives.
        """
        comm, own = self.parallel.comm, self.meta.block
        if own is None:
            return block if comm.rank == 0 else None
        blocks = block.new_empty(own.count, *block.shape) if comm.rank == 0 else None
        sent = block.contiguous().view(-1).view(torch.uint8)
        comm.gather(sent, None if blocks is None else blocks.view(-1).view(torch.uint8)).wait()
        return None if blocks is None else torch.cat(blocks.unbind(), own.dim)

    def _mark(self, shard: nn.Parameter) -> None:
        super()._mark(shard)
        if self.meta.block is not None:
            vars(shard).update(shard_everyone=self.grid, row_split=row_split_of(self.meta, self.grid))


@functools.lru_cache
def _writable_class(kind: type) -> type:
    """Return the class of full DTensors while they may be written: torch would lose what is assigned to ``data``."""

    def refuse(_self: object, _value: object) -> None:
        raise ShardingError(
            "The data of a full parameter that is a DTensor (tensor parallel) was assigned, which changes nothing. "
            "Change it in place: param.copy_(values), with a DTensor of the same placements."
        )

    return type(kind.__name__, (kind,), {"data": property(kind.data.__get__, refuse)})  # type: ignore[attr-defined]


@functools.lru_cache
def _freed_class(kind: type) -> type:
    """Return the class of full DTensors while their memory is free: any use is refused."""
    refuse = classmethod(FreedParameter.__torch_function__.__func__)  # type: ignore[attr-defined]
    return type(kind.__name__, (kind,), {"__torch_function__": refuse})
