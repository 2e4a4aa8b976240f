"""The lane of a table that need not be gathered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from fullshard.comm import Work
from fullshard.engine.step.lane import Lane, LaneState, predivisor
from fullshard.engine.step.torch_private import in_backward
from fullshard.engine.step.unit import Unit
from fullshard.errors import ShardingError


@dataclass(eq=False)
class TableLane(Lane):
    """The lane of one table, split by full rows, to which tokens travel where that sends fewer bytes.

    While ``travels`` is set, the lane is HOME where another one is SHARDED: the unit's gather leaves it out. It is
    gathered after :meth:`bring`, where something else than a lookup or the loss needs the table; then backward gives an
    unsharded gradient, which is reduced as always. Both kinds of gradient may come in one backward.

    Attributes:
        forced: Whether tokens travel whatever it costs, as long as nothing else reads the table.
        travels: Whether tokens travel in this pass; the same on every rank.
        came: Whether the table was gathered for a backward that may still come; the same on every rank.
        over: Whether a gradient was reduced since: the next recorded forward starts at home again, and no earlier, as
            autograd may still run the graph of another forward, or the same graph twice.
        asked: Whether the next gather includes the table whatever came before.
        rows_gradient: The gradient of this rank's rows that tokens have brought, summed over the shard group;
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
        """Set whether tokens travel, outside of passes; every rank calls it with the same value."""
        self.travels = travels
        if self.state in (LaneState.HOME, LaneState.SHARDED):
            self.state = LaneState.HOME if self.travels and not self.came else LaneState.SHARDED

    def bring(self) -> None:
        """Have the unit's next gather include the table."""
        if self.state in (LaneState.HOME, LaneState.SHARDED):
            self.state, self.asked = LaneState.SHARDED, True

    def go_home(self) -> None:
        """Be home again, if a forward begins and the gradient of those before is reduced."""
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
        """Note that autograd may record what is computed with the gathered table, or reads it now."""
        if torch.is_grad_enabled() or in_backward():
            self.came, self.over = True, False

    def release(self) -> None:
        """See :meth:`Lane.release`."""
        super().release()
        if in_backward() and not self.trainable:
            self.over = True  # it has no gradient whose reduce would say so
        if self.travels and not self.came:  # else backward gathers it again
            self.state = LaneState.HOME

    @property
    def holds_gradient(self) -> bool:
        """See :meth:`Lane.holds_gradient`."""
        return super().holds_gradient or self.rows_gradient is not None

    def add_rows_gradient(self) -> torch.Tensor:
        """Return where gradients of this rank's rows are added, zero at first; (shard_numel,)."""
        if self.rows_gradient is None:
            self.rows_gradient = self.device.empty(self.layout.shard_numel, self.dtypes.reduce_sum).zero_()
            self.account.add("gradients", self.rows_gradient.nbytes)
        return self.rows_gradient

    def add_arriving(self) -> None:
        """Wait for the gradients of rows that are on their way."""
        arriving, self.arriving = self.arriving, []
        for add in arriving:
            add()

    def start_sum(self) -> tuple[torch.Tensor, Work | None]:
        """See :meth:`Lane.start_sum`: what tokens have brought is summed already."""
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
            ShardingError: No rank expects it: it would be lost.
        """
        if not self.came:
            raise ShardingError(
                f"A gradient of a table of shape {self.shapes[place]} came from another forward than the last one, or "
                "the table was gathered under torch.no_grad() and trained with. Run each backward before the next "
                'forward, and gather outside of no_grad; or shard with tables="gather".'
            )
        return super().gradient_of(place)

    def _add_own(self, rows: torch.Tensor | None) -> None:
        """Add what tokens have brought, (shard_numel,), to this rank's slice of the unsharded gradient."""
        full = self.complete_gradient()
        self.written.update(range(len(self.layout.placements)))  # what is complete need not be cleared again
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
    """Have the unit's next gather include tables that are home: all of its parameters are to be shown."""
    for lane in unit.lanes:
        if isinstance(lane, TableLane):
            lane.bring()
