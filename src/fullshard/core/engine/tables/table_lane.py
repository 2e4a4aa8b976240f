"""A table's lane, gathered only when something needs the full table, and this rank's rows, which ranks exchange.

In a lookup ids go to the ranks that own their rows, and rows and gradients back. A rank sends, for N ranks, L distinct
rows that it looks up, width d, and b bytes an element: 8 (N-1) for the counts, 8 L (N-1)/N for the ids, and
L d b (N-1)/N for the rows, on average; backward sends as much for their gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, cast

import torch

from fullshard.core.comm import Comm, Work, settle
from fullshard.core.engine.step.lane import Lane, LaneState, predivisor
from fullshard.core.engine.step.param import CREATE_GRAPH_REFUSED, ShardedParam
from fullshard.core.engine.step.unit import Unit
from fullshard.core.shards import on_rows
from fullshard.core.torch_private import in_backward, will_execute
from fullshard.errors import ShardingError


class LookupState(Enum):
    """How recorded passes read a table; the same on every rank."""

    EXCHANGED = "exchanged"
    """Rows were exchanged: no backward that may still come reads the gathered table."""
    GATHERED = "gathered"
    """The table was gathered, for a backward that may still come."""
    REDUCED = "reduced"
    """As GATHERED, and a gradient was reduced since: the next recorded forward exchanges rows again. Not earlier,
    because autograd may still run the graph of another forward, or the same graph twice."""


@dataclass(eq=False)
class TableLane(Lane):
    """The lane of one table, split by complete rows, which are exchanged where that sends fewer bytes.

    While ``exchanges`` is set, the lane is HOME where another one would be SHARDED: the unit's gather leaves it out.
    If something other than a lookup or the loss needs the table, :meth:`request_gather` has it gathered; backward then
    gives an unsharded gradient, which is reduced as usual. Both kinds of gradient may occur in one backward.

    Attributes:
        forced: True if rows are exchanged at any cost, as long as nothing else reads the table.
        exchanges: True if rows are exchanged in this pass; the same on every rank.
        lookup: How recorded passes read the table.
        requested: True if the next gather must include the table.
        rows_gradient: Gradient of this rank's rows brought by exchanges, summed over the shard group;
            (shard_numel,), in the dtype of sums; None if there is none.
        arriving: Functions that each wait for gradients of rows and add them to ``rows_gradient``.
    """

    forced: bool = False
    exchanges: bool = True
    lookup: LookupState = LookupState.EXCHANGED
    requested: bool = False
    rows_gradient: torch.Tensor | None = None
    arriving: list[Callable[[], None]] = field(default_factory=list)

    def choose(self, *, exchanges: bool) -> None:
        """Set whether rows are exchanged. Called between passes by every rank, with the same value."""
        self.exchanges = exchanges
        if self.state in (LaneState.HOME, LaneState.SHARDED):
            self.state = LaneState.HOME if exchanges and self.lookup is LookupState.EXCHANGED else LaneState.SHARDED

    def request_gather(self) -> None:
        """Make the unit's next gather include the table."""
        if self.state in (LaneState.HOME, LaneState.SHARDED):
            self.state, self.requested = LaneState.SHARDED, True

    def resume_exchange(self) -> None:
        """Return to HOME when a forward begins and all earlier gradients are reduced."""
        may = self.exchanges and self.state is LaneState.SHARDED and not self.requested
        if self.lookup is LookupState.REDUCED and may and not in_backward():
            self.state = LaneState.HOME
            if torch.is_grad_enabled():
                self.lookup = LookupState.EXCHANGED

    def issue_gather(self) -> None:
        """See :meth:`Lane.issue_gather`."""
        self.resume_exchange()
        if self.state is LaneState.HOME:
            return
        self.requested = False
        super().issue_gather()
        self.note_use()

    def note_use(self) -> None:
        """Record that the gathered table is read now, or that autograd may record what is computed with it."""
        if torch.is_grad_enabled() or in_backward():
            self.lookup = LookupState.GATHERED

    def release(self) -> None:
        """See :meth:`Lane.release`."""
        super().release()
        exchanged = self.lookup is LookupState.EXCHANGED
        if in_backward() and not self.trainable and not exchanged:
            self.lookup = LookupState.REDUCED  # without a gradient, no reduce will set it
        if self.exchanges and exchanged:  # otherwise backward gathers it again
            self.state = LaneState.HOME

    @property
    def holds_gradient(self) -> bool:
        """See :meth:`Lane.holds_gradient`."""
        return super().holds_gradient or self.rows_gradient is not None

    def add_rows_gradient(self) -> torch.Tensor:
        """Return the buffer for gradients of this rank's rows, (shard_numel,), zero at first."""
        if self.rows_gradient is None:
            self.rows_gradient = self.device.empty(self.layout.shard_numel, self.dtypes.reduce_sum).zero_()
            self.tracker.add("gradients", self.rows_gradient.nbytes)
        return self.rows_gradient

    def add_arriving(self) -> None:
        """Wait for the gradients of rows that are still being exchanged, and add them."""
        arriving, self.arriving = self.arriving, []
        for add in arriving:
            add()

    def start_sum(self) -> tuple[torch.Tensor, Work | None]:
        """See :meth:`Lane.start_sum`; gradients brought by exchanges are summed already."""
        self.add_arriving()
        exchanged = self.lookup is LookupState.EXCHANGED
        rows = self.add_rows_gradient() if exchanged else self.rows_gradient
        self._drop_rows()
        if not exchanged:
            self.lookup = LookupState.REDUCED
            self._add_own(rows)
            return super().start_sum()
        assert rows is not None
        return rows.div_(predivisor(self.mesh, self.dtypes.reduce)), None

    def gradient_of(self, place: int) -> tuple[torch.Tensor, bool]:
        """See :meth:`Lane.gradient_of`.

        Raises:
            ShardingError: The gradient arrives when no reduce expects it, and would be lost.
        """
        if self.lookup is LookupState.EXCHANGED:
            raise ShardingError(
                f"The gradient of a table of shape {self.shapes[place]} belongs to an earlier forward, or the table "
                "was gathered under torch.no_grad() and then trained. Run each backward before the next forward, and "
                'gather outside of no_grad; or shard with tables="gather".'
            )
        return super().gradient_of(place)

    def _add_own(self, rows: torch.Tensor | None) -> None:
        """Add the gradient that exchanges brought, (shard_numel,), to this rank's slice of the unsharded gradient."""
        full = self.complete_gradient()
        self.written.update(range(len(self.layout.placements)))  # a complete gradient need not be cleared again
        if rows is not None:
            low, high = self.layout.shard_bounds(self.mesh.shard_group.rank)
            full[low:high].add_(rows)

    def _drop_rows(self) -> None:
        if self.rows_gradient is not None:
            self.tracker.add("gradients", -self.rows_gradient.nbytes)
        self.rows_gradient = None

    def drop_gradient(self) -> None:
        """See :meth:`Lane.drop_gradient`."""
        self.add_arriving()
        super().drop_gradient()
        self._drop_rows()


def request_tables(unit: Unit) -> None:
    """Make the unit's next gather include its tables that are home, because all parameters will be read."""
    for lane in unit.lanes:
        if isinstance(lane, TableLane):
            lane.request_gather()


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
