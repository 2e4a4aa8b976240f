"""This rank's rows of a table, and the collectives of the ranks that share it."""

from __future__ import annotations

from typing import Any, cast

import torch

from fullshard.core.comm import Comm, Work, settle
from fullshard.core.engine.step.lane import LaneState
from fullshard.core.engine.step.param import CREATE_GRAPH_REFUSED, ShardedParam
from fullshard.core.engine.step.unit import Unit
from fullshard.core.engine.tables.table_lane import TableLane
from fullshard.core.shards import on_rows
from fullshard.core.torch_private import will_execute
from fullshard.errors import ShardingError


class TableRows(ShardedParam):
    """A table of V rows of width d; each rank of the shard group owns a range of them.

    Attributes:
        bounds: Rank r of the shard group owns rows ``bounds[r]`` to ``bounds[r + 1]``; (N + 1,), int64.
    """

    lane: TableLane

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """See :class:`ShardedParam`."""
        super().__init__(*args, **kwargs)
        layout, width = self.meta.layout, self.meta.placement.row_numel
        stops = [layout.local_range(self.meta.placement, rank)[1] // width for rank in range(layout.world_size)]
        ends = torch.tensor([0, *stops]).cummax(0).values  # a rank without rows has the empty range at the previous end
        self.bounds = ends.to(self.lane.mesh.shard_group.device)

    @property
    def unit(self) -> Unit:
        """The unit that the table belongs to."""
        return cast("Unit", self.sharded.shard_unit())  # type: ignore[attr-defined]

    @property
    def comm(self) -> Comm:
        """The ranks that share the table."""
        return self.lane.mesh.shard_group

    def wait(self, work: Work) -> None:
        """Wait for an exchange of tokens until its send buffer may be freed; the wait is recorded in the timeline."""
        self.unit.recorder.wait(self.unit.name, "exchange", [work], _finish)

    @property
    def is_home(self) -> bool:
        """True if tokens travel to the table now."""
        self.lane.go_home()
        return self.lane.state is LaneState.HOME

    @property
    @on_rows
    def rows(self) -> torch.Tensor:
        """This rank's rows, (R, d), in the compute dtype, on the device that the unit computes on."""
        own = self.local_view(self.lane.shard).detach()
        return own.to(self.lane.device.device, self.lane.dtypes.compute)

    def announce(self, collective: str) -> None:
        """Announce an exchange of tokens, and compare it over ranks in the first pass."""
        self.unit.runtime.agreement.before(collective, self.unit.index)

    def receive(self, add: Any) -> None:
        """Call ``add`` with the buffer of this rank's rows of the gradient, (R, d), if this backward computes it.

        Raises:
            ShardingError: Called inside ``backward(create_graph=True)``.
        """
        if torch.is_grad_enabled():
            raise ShardingError(CREATE_GRAPH_REFUSED)
        if will_execute(self.accumulate):
            unit = self.unit
            unit.runtime.receive(unit, self, lambda: add(self.local_view(self.lane.add_rows_gradient())))


def _finish(work: Work) -> None:
    work.wait()
    settle(work)
