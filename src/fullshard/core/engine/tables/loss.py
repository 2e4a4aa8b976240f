"""The cross-entropy of a table whose rows stay home: each rank computes the logits of all ranks' tokens for its rows.

For a token with logits z over V rows, of which rank r owns some, and its target y, in natural logarithms::

    lse(z) = m + log(sum over r of s[r] exp(m[r] - m))    m[r]: its largest logit here, s[r]: the sum of exp(z - m[r])
    loss   = lse(z) - (1 - e) z[y] - e mean(z) + w lse(z)^2    e: label smoothing, w: weight of the z-loss

(the same terms as ``models/loss.py``). Hidden states of all ranks are gathered here; three or four numbers of each
token are exchanged; gradients of hidden states go back by a reduce-scatter, and the table's gradient stays here.
With N ranks, at most T tokens each, and width d, a rank sends (N-1) T d numbers twice, 12 (N-1) N T bytes of statistics
(with label smoothing 16), and 12 (N-1) T bytes of labels and weights; statistics and weights in float32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from fullshard.core.comm import logits_at_once
from fullshard.core.engine.tables.rows import TableRows
from fullshard.core.torch_private import plain_functions
from fullshard.errors import MismatchError

_UNEQUAL = (
    "Ranks scaled a loss over a table that stays home by different factors before backward, {low:g} to {high:g}. The "
    'table\'s gradient would be wrong. Scale it alike on every rank, or shard with tables="gather".'
)


@dataclass(frozen=True)
class Terms:
    """The terms of each token's loss.

    Attributes:
        label_smoothing: Share of each target's probability that is spread over all rows.
        z_loss: Weight of the squared log-sum-exp.
        factor: Factor of this rank's loss before backward, if known; 0-d if a tensor.
        weights: Factor of each token's loss, (T,), on every rank or on none; None means 1.
    """

    label_smoothing: float = 0.0
    z_loss: float = 0.0
    factor: float | torch.Tensor = 1.0
    weights: torch.Tensor | None = None


def home_loss(table: TableRows, hidden: torch.Tensor, labels: torch.Tensor, terms: Terms) -> torch.Tensor:
    """Return this rank's loss summed over its tokens. Every rank calls it, also without tokens.

    Args:
        table: The table of V rows of width d, whose rows are home.
        hidden: Hidden states of this rank's T tokens with a target, (T, d); cast to the table's compute dtype.
        labels: Their targets, (T,), int64.
        terms: The terms of the loss.

    Returns:
        0-d, float32 or wider.
    """
    table.announce("loss")
    counts = _counts(table, labels)
    hidden = hidden.to(table.lane.dtypes.compute)
    records = torch.is_grad_enabled() and (hidden.requires_grad or table.trainable)
    tokens = _Tokens(table, counts, records=records)
    with plain_functions():
        return _HomeLoss.apply(hidden, table.full, table, labels, terms, tokens)  # type: ignore[return-value]


def _counts(table: TableRows, labels: torch.Tensor) -> list[int]:
    """Exchange how many tokens each rank has.

    Raises:
        IndexError: A label of some rank is not a row of the table; raised on every rank.
    """
    rows = table.meta.global_shape[0]
    low, high = (labels.amin(), labels.amax()) if len(labels) else labels.new_tensor([0, 0])
    mine = torch.stack([torch.full_like(low, len(labels)), low, high])
    by_rank = _all_gather(table, mine).tolist()
    for rank, (_, first, last) in enumerate(by_rank):
        if first < 0 or last >= rows:
            raise IndexError(f"{table.meta.name} has {rows} rows; labels of rank {rank} are from {first} to {last}.")
    return [count for count, _, _ in by_rank]


@dataclass(frozen=True)
class _Tokens:
    """The tokens of all ranks that one loss is computed for.

    Attributes:
        table: The table.
        counts: How many tokens each rank has.
        records: True if gradients are needed.
    """

    table: TableRows
    counts: list[int]
    records: bool

    @property
    def most(self) -> int:
        """The most tokens on any rank; the other ranks are padded to it."""
        return max(self.counts)

    def gather(self, mine: torch.Tensor) -> torch.Tensor:
        """Return (N * most, ...): each rank's (T, ...), padded with zeros."""
        padded = mine.new_zeros(self.most, *mine.shape[1:])
        padded[: len(mine)] = mine
        return _all_gather(self.table, padded).flatten(0, 1)


def _all_gather(table: TableRows, mine: torch.Tensor) -> torch.Tensor:
    """Return (N, ...): every rank's tensor."""
    comm = table.comm
    full = mine.new_empty(comm.size * mine.numel())
    if not mine.numel():  # then it is empty on every rank
        return full.view(comm.size, *mine.shape)
    table.wait(comm.all_gather(full, mine.reshape(-1)))
    return full.view(comm.size, *mine.shape)


class _HomeLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        _full: torch.Tensor,
        table: TableRows,
        labels: torch.Tensor,
        terms: Terms,
        tokens: _Tokens,
    ) -> torch.Tensor:
        parts = _Parts(table, hidden, labels, terms, tokens)
        total = parts.run(wants_hidden=tokens.records and ctx.needs_input_grad[0])
        ctx.table, ctx.factor, ctx.tokens = table, terms.factor, tokens
        ctx.gradients, ctx.unit = (parts.hidden_gradient, parts.rows_gradient), parts.unit
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        table: TableRows = ctx.table
        (hidden, rows), ctx.gradients = ctx.gradients, (None, None)
        if hidden is None and rows is None:
            raise RuntimeError("Backward through a fused loss runs once: its gradients are not kept.")
        left = (gradient / ctx.factor).reshape(1)  # 1-d: torch rounds a 0-d factor to the gradient's dtype
        if rows is not None:
            _require_equal(table, left)

            def add(total: torch.Tensor) -> None:
                total.addcmul_(rows.to(total.dtype), (left * ctx.unit).to(total.dtype))

            table.receive(add)
        return (None if hidden is None else hidden.mul_(left * ctx.unit), None, None, None, None, None)


def _require_equal(table: TableRows, left: torch.Tensor) -> None:
    """Refuse factors that differ between ranks: the gradients of a rank's rows come from every rank's tokens.

    Raises:
        MismatchError: They differ by more than rounding; raised on every rank.
    """
    table.announce("loss")
    extremes = torch.cat([left, -left]).double()
    table.wait(table.comm.all_reduce(extremes, "max"))
    high, low = extremes[0].item(), -extremes[1].item()
    if high - low > 1e-5 * max(abs(high), abs(low)):
        raise MismatchError(_UNEQUAL.format(low=low, high=high))


def _power_of_two(weights: torch.Tensor) -> torch.Tensor:
    """Return the power of two below the largest of ``weights``, (1,), or 1 if there are none; the same on all ranks."""
    most = weights.abs().amax().reshape(1) if len(weights) else weights.new_ones(1)
    power = torch.ldexp(torch.ones_like(most), torch.frexp(most).exponent - 1)
    return power.where(most.isfinite() & (most > 0), 1.0)


class _Parts:
    """Computes the loss and its gradients in chunks of tokens."""

    def __init__(
        self, table: TableRows, hidden: torch.Tensor, labels: torch.Tensor, terms: Terms, tokens: _Tokens
    ) -> None:
        self.table, self.terms, self.tokens = table, terms, tokens
        self.rows = table.rows
        self.rank, self.count = table.comm.rank, len(hidden)
        self.wide = torch.promote_types(hidden.dtype, torch.float32)
        self.hidden = tokens.gather(hidden.detach())
        first = table.bounds[self.rank].item()
        targets = tokens.gather(labels) - first
        self.is_here = (targets >= 0) & (targets < len(self.rows))
        self.targets = targets.where(self.is_here, 0)
        ones = torch.ones(len(hidden), dtype=self.wide, device=hidden.device)
        self.own_weights = ones if terms.weights is None else terms.weights.to(self.wide)
        # Tokens are weighted before their gradients are rounded to 16 bits; padding gets 0. The largest is scaled to
        # about 1, and back after the sums: in float16 the slopes of a mean over many tokens would underflow to zero.
        weights = tokens.gather(self.own_weights * terms.factor)
        self.unit = _power_of_two(weights)
        self.weights = weights / self.unit
        self.hidden_gradient: torch.Tensor | None = None
        self.rows_gradient: torch.Tensor | None = None

    def run(self, *, wants_hidden: bool) -> torch.Tensor:
        """Return this rank's loss, 0-d, and set the gradients."""
        dtypes, records = self.table.lane.dtypes, self.tokens.records
        partial = torch.zeros_like(self.hidden, dtype=dtypes.reduce) if wants_hidden else None
        if records and self.table.trainable:
            self.rows_gradient = torch.zeros_like(self.rows, dtype=self.wide)
        most_rows = int(self.table.bounds.diff().max())  # over all ranks, so that each runs the same chunks
        step = max(64, logits_at_once(self.rows.device) // most_rows)
        losses = []
        for start in range(0, len(self.hidden), step):
            part = slice(start, start + step)
            loss, slopes = self._chunk(part)
            losses.append(loss)
            if partial is not None:
                partial[part] = slopes @ self.rows
            if self.rows_gradient is not None:
                self._add_rows(slopes, self.hidden[part])
        if partial is not None:
            self.hidden_gradient = self._own(partial).to(self.hidden.dtype)
        at = self.rank * self.tokens.most
        mine = torch.cat(losses)[at : at + self.count] if losses else self.weights
        return (mine * self.own_weights).sum()

    def _add_rows(self, slopes: torch.Tensor, hidden: torch.Tensor) -> None:
        assert self.rows_gradient is not None
        if slopes.dtype == self.wide:
            self.rows_gradient.addmm_(slopes.t(), hidden)
        else:
            self.rows_gradient += slopes.t() @ hidden

    def _own(self, partial: torch.Tensor) -> torch.Tensor:
        """Return the sum over ranks of what each computed for this rank's tokens, (T, d)."""
        own = partial.new_empty(self.tokens.most, partial.shape[1], dtype=self.table.lane.dtypes.reduce_sum)
        if not self.tokens.most:
            return own
        self.table.wait(self.table.comm.reduce_scatter(own.view(-1), partial.view(-1)))
        return own[: self.count]

    def _chunk(self, part: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the losses of a chunk of tokens of all ranks, (C,), and the gradient of their logits here, (C, R)."""
        share, vocabulary = self.terms.label_smoothing, self.table.meta.global_shape[0]
        logits = (self.hidden[part] @ self.rows.t()).to(self.wide)
        here, targets = self.is_here[part], self.targets[part, None]
        everywhere = _all_gather(self.table, self._statistics(logits, here, targets))
        top = everywhere[:, 0].amax(0)
        lse = top + (everywhere[:, 1] * (everywhere[:, 0] - top).exp()).sum(0).log()
        mean = everywhere[:, 3].sum(0) / vocabulary if share else 0.0
        losses = lse - (1 - share) * everywhere[:, 2].sum(0) - share * mean + self.terms.z_loss * lse.square()
        if not self.tokens.records:
            return losses, logits
        slopes = logits.sub_(lse[:, None]).exp_()
        if self.terms.z_loss:
            slopes.mul_(1 + 2 * self.terms.z_loss * lse[:, None])
        if share:
            slopes.sub_(share / vocabulary)
        if len(self.rows):
            slopes.scatter_add_(1, targets, (share - 1) * here.to(slopes.dtype)[:, None])
        return losses, slopes.mul_(self.weights[part, None]).to(self.hidden.dtype)

    def _statistics(self, logits: torch.Tensor, here: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return for each token the largest logit here, the sum of exp(logit - largest), the target's, and the sum."""
        stats = logits.new_zeros(4 if self.terms.label_smoothing else 3, len(logits))
        if not len(self.rows):
            stats[0] = -math.inf
            return stats
        stats[0] = logits.amax(1)
        stats[1] = (logits - stats[0, :, None]).exp_().sum(1)
        stats[2] = logits.gather(1, targets).squeeze(1) * here
        if self.terms.label_smoothing:
            stats[3] = logits.sum(1)
        return stats
