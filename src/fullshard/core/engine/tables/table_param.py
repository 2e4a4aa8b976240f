"""A table: the parameter of an embedding or a head whose rows stay home."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F

from fullshard.core.comm import add_rows
from fullshard.core.engine.step.hooks import EmbeddingSite, LinearSite
from fullshard.core.engine.step.lane import LaneState
from fullshard.core.engine.step.precision import tensors_in
from fullshard.core.engine.tables.loss import Terms, home_loss
from fullshard.core.engine.tables.table_lane import Lookup, TableRows
from fullshard.core.shards import WatchedParameter, reads_metadata
from fullshard.core.torch_private import call_after_backward, in_functorch, plain_functions


class HomeParameter(WatchedParameter):
    """A full parameter whose rows are home: lookups exchange rows, any other use gathers the table first."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Look up rows if they can be exchanged; otherwise gather the table and compute with it."""
        kwargs = kwargs or {}
        if reads_metadata(func):
            with plain_functions():
                return func(*args, **kwargs)
        homes = [one for one in tensors_in((args, kwargs)) if isinstance(one, HomeParameter)]
        if func is F.embedding and _is_plain_lookup(args, kwargs) and homes[0] is args[1]:
            return homes[0].watcher().look_up(args[0], args[2] if len(args) > 2 else kwargs.get("padding_idx"))
        for one in homes:
            one.watcher().gather()
        return WatchedParameter.__torch_function__(func, types, args, kwargs)


def _is_plain_lookup(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return True if ``F.embedding`` was called with ids, a table and at most a padding index."""
    names = ("padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
    options = dict(zip(names, args[2:], strict=False)) | kwargs
    plain = options.get("max_norm") is None and not options.get("scale_grad_by_freq") and not options.get("sparse")
    return len(args) >= 2 and plain and not in_functorch()


class TableParam(TableRows):
    """A table as modules see it: lookups and losses on the ranks that own the rows, or the gathered table."""

    def to_unsharded(self) -> None:
        """See :meth:`ShardedParam.to_unsharded`; while the rows are home, a lookup goes to them."""
        super().to_unsharded()
        if self.is_home:
            self.full.__class__ = HomeParameter
        elif self.lane.state is LaneState.GATHERED:  # kept since a pass without gradients, perhaps
            self.lane.note_use()

    def gather(self) -> None:
        """Gather the table if it is home: the caller needs all of it. Every rank calls it."""
        if self.is_home:
            self.lane.request_gather()
            self.unit.runtime.gather(self.unit)

    def look_up(self, ids: torch.Tensor, padding_index: int | None = None) -> torch.Tensor:
        """Return the rows of ``ids``, (ids.shape, d), in the compute dtype. Every rank calls it.

        Raises:
            IndexError: An id is negative, or not below the number of rows.
        """
        if ids.numel():
            low, high = (int(one) for one in ids.aminmax())
            if low < 0 or high >= self.meta.global_shape[0]:
                raise IndexError(
                    f"{self.meta.name} has {self.meta.global_shape[0]} rows; ids from {low} to {high} were looked up."
                )
        if padding_index is not None and padding_index < 0:  # negative counts from the end, as in F.embedding
            padding_index += self.meta.global_shape[0]
        with plain_functions():
            return _Lookup.apply(ids, self.full, self, padding_index)  # type: ignore[return-value]

    def pays(self, tokens: int) -> bool:
        """Return True if rows should be exchanged; every rank calls it and gets the same answer.

        They should if N times the most tokens on a rank are fewer than the table's rows: then fewer bytes are sent.
        It depends on these numbers only, so that a resumed run decides as the first one did.

        Args:
            tokens: Number of tokens that this rank multiplies by the table, as a head.
        """
        mesh, comm = self.lane.mesh, self.comm
        most = torch.tensor([tokens], dtype=torch.int64, device=mesh.device)
        mesh.announce(f"tokens of {self.meta.name}")
        mesh.all_reduce(most, "max").wait()  # over replicas too: all ranks must decide alike
        fewer = comm.size > 1 and comm.size * int(most) < self.meta.global_shape[0]
        return fewer or self.lane.forced

    def choose(self, tokens: int) -> None:
        """Exchange rows in the next pass if :meth:`pays` says so; called before the pass begins."""
        self.lane.choose(exchanges=self.pays(tokens))

    def loss(self, hidden: torch.Tensor, labels: torch.Tensor, terms: Terms) -> torch.Tensor:
        """Return the loss of the table as a head, while its rows are home; see :func:`home_loss`."""
        return home_loss(self, hidden, labels, terms)


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, ids: torch.Tensor, _full: torch.Tensor, table: TableParam, padding_index: int | None
    ) -> torch.Tensor:
        table.announce("lookup")
        lookup = table.send_ids(ids)
        rows = table.fetch_rows(lookup)
        ctx.table, ctx.lookup = table, lookup
        ctx.padding = None if padding_index is None else ids == padding_index
        return F.embedding(lookup.places, rows)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, ...]:
        table: TableParam = ctx.table
        lookup: Lookup = ctx.lookup
        dtypes = table.lane.dtypes
        sums = gradient.new_zeros(sum(lookup.requested), gradient.shape[-1], dtype=dtypes.reduce)
        rows = gradient.to(dtypes.reduce)
        if ctx.padding is not None:
            rows = rows.masked_fill(ctx.padding.unsqueeze(-1), 0)
        add_rows(sums, lookup.places.reshape(-1), rows.reshape(-1, rows.shape[-1]))

        def add(total: torch.Tensor) -> None:
            table.announce("lookup's gradient")
            arrived = table.return_gradients(lookup, sums)
            table.lane.arriving.append(lambda: add_rows(total, lookup.served_rows, arrived().to(total.dtype)))

        table.receive(add)
        # Gradients are sent behind reduces under way. They are waited for when the unit is reduced, which is last for a
        # tied table, or at the end of a backward that reduces nothing.
        call_after_backward(table.lane.add_arriving)
        return None, None, None, None


class TableEmbeddingSite(EmbeddingSite):
    """Call of a plain ``nn.Embedding`` whose weight is a table."""

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        """Return the module's output."""
        table = cast("TableParam", self.param)
        if table.is_home and self.module._parameters["weight"] is table.full:
            if not in_functorch():
                return table.look_up(input, self.padding_index)
            table.gather()  # inside vmap the ids' values are not available, so rows cannot be exchanged
        return super().__call__(input)


class TableLinearSite(LinearSite):
    """Call of an ``nn.Linear`` whose weight is a table."""

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        """Return the module's output, computed with the gathered table."""
        table = cast("TableParam", self.param)
        if self.module._parameters["weight"] is table.full:
            table.gather()
        return super().__call__(input)

    def input_gradient(self, out_gradient: torch.Tensor, *, was_counted: bool) -> torch.Tensor:
        """See :meth:`LinearSite.input_gradient`; gathers the table again if a later forward exchanged rows."""
        cast("TableParam", self.param).gather()
        return super().input_gradient(out_gradient, was_counted=was_counted)
