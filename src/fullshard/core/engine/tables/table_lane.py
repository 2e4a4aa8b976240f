"""The lane of a table, which is gathered only when something needs the full table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from fullshard.core.comm import Work
from fullshard.core.engine.step.lane import Lane, LaneState, predivisor
from fullshard.core.engine.step.unit import Unit
from fullshard.core.torch_private import in_backward
from fullshard.errors import ShardingError


@dataclass(eq=False)
class TableLane(Lane):
    """The lane of one table, split by complete rows, to which tokens travel where that sends fewer bytes.

    While ``travels`` is set, the lane is HOME where another one would be SHARDED, and the unit's gather leaves it out.
    If something other than a lookup or the loss needs the table, :meth:`bring` has it gathered; backward then gives an
    unsharded gradient, which is reduced as usual. Both kinds of gradient may occur in one backward.

    Attributes:
        forced: True if tokens travel at any cost, as long as nothing else reads the table.
        travels: True if tokens travel in this pass; the same on every rank.
        came: True if the table was gathered for a backward that may still come; the same on every rank.
        over: True once a gradient was reduced: the next recorded forward starts at home again. Not earlier, because
            autograd may still run the graph of another forward, or the same graph twice.
        asked: True if the next gather must include the table.
        rows_gradient: Gradient of this rank's rows brought by tokens, summed over the shard group;
            (shard_numel,), in the dtype of sums; None if there is none.
        arriving: Functions that each wait for gradients of rows and add them to ``rows_gradient``.
    """

    forced: bool = False
    travels: bool = True
    came: bool = False
    over: bool = False
    asked: bool = False
    rows_gradient: torch.Tensor | None = None
    arriving: list[Callable[[], None]] = field(default_factory=list)

    def choose(self, *, travels: bool) -> None:
        """Set whether tokens travel. Called between passes by every rank, with the same value."""
        self.travels = travels
        if self.state in (LaneState.HOME, LaneState.SHARDED):
            self.state = LaneState.HOME if self.travels and not self.came else LaneState.SHARDED

    def bring(self) -> None:
        """Make the unit's next gather include the table."""
        if self.state in (LaneState.HOME, LaneState.SHARDED):
            self.state, self.asked = LaneState.SHARDED, True

    def go_home(self) -> None:
        """Return to HOME when a forward begins and all earlier gradients are reduced."""
        if self.over and self.travels and self.state is LaneState.SHARDED and not self.asked and not in_backward():
            self.state = LaneState.HOME
            if torch.is_grad_enabled():
                self.came = self.over = False

    def issue_gather(self) -> None:
        """See :meth:`Lane.issue_gather`."""
        self.go_home()
        if self.state is LaneState.HOME:
            return
        self.asked = False
        super().issue_gather()
        self.note_use()

    def note_use(self) -> None:
        """Record that the gathered table is read now, or that autograd may record what is computed with it."""
        if torch.is_grad_enabled() or in_backward():
            self.came, self.over = True, False

    def release(self) -> None:
        """See :meth:`Lane.release`."""
        super().release()
        if in_backward() and not self.trainable:
            self.over = True  # without a gradient, no reduce will set it
        if self.travels and not self.came:  # otherwise backward gathers it again
            self.state = LaneState.HOME

    @property
    def holds_gradient(self) -> bool:
        """See :meth:`Lane.holds_gradient`."""
        return super().holds_gradient or self.rows_gradient is not None

    def add_rows_gradient(self) -> torch.Tensor:
        """Return the buffer for gradients of this rank's rows, (shard_numel,), zero at first."""
        if self.rows_gradient is None:
            self.rows_gradient = self.device.empty(self.layout.shard_numel, self.dtypes.reduce_sum).zero_()
            self.account.add("gradients", self.rows_gradient.nbytes)
        return self.rows_gradient

    def add_arriving(self) -> None:
        """Wait for the gradients of rows that are still being exchanged, and add them."""
        arriving, self.arriving = self.arriving, []
        for add in arriving:
            add()

    def start_sum(self) -> tuple[torch.Tensor, Work | None]:
        """See :meth:`Lane.start_sum`; gradients brought by tokens are summed already."""
        self.add_arriving()
        rows = self.add_rows_gradient() if not self.came else self.rows_gradient
        self._drop_rows()
        if self.came:
            self.over = True
            self._add_own(rows)
            return super().start_sum()
        assert rows is not None
        return rows.div_(predivisor(self.mesh, self.dtypes.reduce)), None

    def gradient_of(self, place: int) -> tuple[torch.Tensor, bool]:
        """See :meth:`Lane.gradient_of`.

        Raises:
            ShardingError: The gradient arrives when no reduce expects it, and would be lost.
        """
        if not self.came:
            raise ShardingError(
                f"The gradient of a table of shape {self.shapes[place]} belongs to an earlier forward, or the table "
                "was gathered under torch.no_grad() and then trained. Run each backward before the next forward, and "
                'gather outside of no_grad; or shard with tables="gather".'
            )
        return super().gradient_of(place)

    def _add_own(self, rows: torch.Tensor | None) -> None:
        """Add the gradient that tokens brought, (shard_numel,), to this rank's slice of the unsharded gradient."""
        full = self.complete_gradient()
        self.written.update(range(len(self.layout.placements)))  # a complete gradient need not be cleared again
        if rows is not None:
            low, high = self.layout.shard_bounds(self.mesh.shard_group.rank)
            full[low:high].add_(rows)

    def _drop_rows(self) -> None:
        if self.rows_gradient is not None:
            self.account.add("gradients", -self.rows_gradient.nbytes)
        self.rows_gradient = None

    def drop_gradient(self) -> None:
        """See :meth:`Lane.drop_gradient`."""
        self.add_arriving()
        super().drop_gradient()
        self._drop_rows()


def bring_tables(unit: Unit) -> None:
    """Make the unit's next gather include its tables that are home, because all parameters will be read."""
    for lane in unit.lanes:
        if isinstance(lane, TableLane):
            lane.bring()
