"""This rank's rows of a table, and their exchange: ids go to the ranks that own their rows, rows and gradients back.

A rank sends, for N ranks, L distinct rows that it looks up, width d, and b bytes an element: 8 (N-1) for the
counts, 8 L (N-1)/N for the ids, and L d b (N-1)/N for the rows, on average; backward sends as much for their gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Lookup:
    """One lookup: the rows this rank requested, and the rows others requested of it.

    Attributes:
        places: For each id, the index of its row among those requested; in the shape of the ids.
        requested: Number of distinct rows that this rank requested of each rank.
        served: Number of rows that each rank requested of this one.
        served_rows: Those rows, counted from this rank's first row, ordered by requesting rank; (sum(served),), int64.
    """

    places: torch.Tensor
    requested: list[int]
    served: list[int]
    served_rows: torch.Tensor


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
        """True if rows are exchanged now."""
        self.lane.resume_exchange()
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

    def send_ids(self, ids: torch.Tensor) -> Lookup:
        """Send ids to the ranks that own their rows. Every rank that shares the table calls it.

        Args:
            ids: Rows to look up, any shape, int32 or int64; each is a row of the table.
        """
        rows, places = torch.unique(ids.long(), return_inverse=True)  # ascending: grouped by owner
        ends = torch.searchsorted(rows, self.bounds[1:])
        counts = torch.diff(ends, prepend=ends.new_zeros(1))
        replies = torch.empty_like(counts)
        self._run(replies.split(1), counts.split(1))
        requested, served = counts.tolist(), replies.tolist()
        served_rows = rows.new_empty(sum(served))
        self._run(served_rows.split(served), rows.split(requested))
        return Lookup(places, requested, served, served_rows - self.bounds[self.comm.rank])

    def fetch_rows(self, lookup: Lookup) -> torch.Tensor:
        """Return the rows that this rank requested, (sum(requested), d), in the compute dtype."""
        own = self.rows
        sent = own.index_select(0, lookup.served_rows.to(own.device)).to(lookup.served_rows.device)
        received = sent.new_empty(sum(lookup.requested), own.shape[1])
        self._run(received.split(lookup.requested), sent.split(lookup.served))
        return received

    def return_gradients(self, lookup: Lookup, gradients: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Start sending gradients of rows, (sum(requested), d), to their owners.

        Returns:
            A function that waits for the gradients of ``lookup.served_rows`` and returns them.
        """
        received = gradients.new_empty(sum(lookup.served), gradients.shape[1])
        work = self.comm.exchange(received.split(lookup.served), gradients.split(lookup.requested))

        def arrived(_sent: torch.Tensor = gradients) -> torch.Tensor:  # keeps it until others have read it
            self.wait(work)
            return received

        return arrived

    def _run(self, received: tuple[torch.Tensor, ...], sent: tuple[torch.Tensor, ...]) -> None:
        self.wait(self.comm.exchange(received, sent))


def _finish(work: Work) -> None:
    work.wait()
    settle(work)
