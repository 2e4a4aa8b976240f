"""The cross-entropy: of logits, of a linear layer without holding all its logits, and of a table whose rows stay home.

For a token with logits z over V rows and its target y, in natural logarithms::

    loss        lse(z) - (1 - e) z[y] - e mean(z) + w lse(z)^2    e: label smoothing, as in torch's cross_entropy
    gradient    softmax(z) (1 + 2 w lse(z)) - e / V, and -(1 - e) at y    w: weight of the z-loss, as in PaLM and T5X

Of a table, rank r owns some rows and computes the logits of all ranks' tokens for them::

    lse(z) = m + log(sum over r of s[r] exp(m[r] - m))    m[r]: its largest logit here, s[r]: the sum of exp(z - m[r])

Hidden states of all ranks are gathered here; three or four numbers of each
token are exchanged; gradients of hidden states go back by a reduce-scatter, and the table's gradient stays here.
With N ranks, at most T tokens each, and width d, a rank sends (N-1) T d numbers twice, 12 (N-1) N T bytes of statistics
(with label smoothing 16), and 12 (N-1) T bytes of labels and weights; statistics and weights in float32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

from fullshard.core.comm import logits_at_once
from fullshard.core.engine.tables.table_lane import TableRows
from fullshard.core.shards import table_of
from fullshard.core.torch_private import plain_functions
from fullshard.errors import ConfigError, MismatchError

IGNORED = -100
"""Label of positions without a target, as in torch's ``cross_entropy``."""

_UNEQUAL = (
    "Ranks scaled a loss over a table that stays home by different factors before backward, {low:g} to {high:g}. The "
    'table\'s gradient would be wrong. Scale it alike on every rank, or shard with tables="gather".'
)


@dataclass(frozen=True)
class Objective:
    """Terms of the loss in addition to the plain cross-entropy."""

    label_smoothing: float = 0.0  # share of each target's probability that is spread over the vocabulary
    z_loss: float = 0.0  # weight of the squared log-partition function of the softmax

    def losses(self, lse: torch.Tensor, target: torch.Tensor, mean: torch.Tensor | float) -> torch.Tensor:
        """Return each token's loss, (T,), from its log-sum-exp, its target's logit and the mean of its logits."""
        share = self.label_smoothing
        return lse - (1 - share) * target - share * mean + self.z_loss * lse.square()

    def slopes(
        self,
        softmax: torch.Tensor,
        lse: torch.Tensor,
        targets: torch.Tensor,
        vocabulary: int,
        here: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Turn the softmax of some of the logits, (T, R), in place into the gradient of the losses by them.

        Args:
            softmax: Probabilities, of R of the ``vocabulary`` rows.
            lse: Log-sum-exp over all rows, (T,).
            targets: Each token's target among the R rows, (T, 1).
            vocabulary: Number of all rows.
            here: True where the target is among the R rows, (T,); None: everywhere.
        """
        if self.z_loss:
            softmax.mul_(1 + 2 * self.z_loss * lse[:, None])
        if self.label_smoothing:
            softmax.sub_(self.label_smoothing / vocabulary)
        if softmax.shape[1]:
            less = self.label_smoothing - 1
            if here is None:
                change = softmax.new_full((1, 1), less).expand(len(targets), 1)
            else:
                change = less * here.to(softmax.dtype)[:, None]
            softmax.scatter_add_(1, targets, change)
        return softmax


PLAIN = Objective()


@dataclass(frozen=True)
class Terms:
    """What decides the loss of given hidden states and targets.

    Attributes:
        objective: Label smoothing and z-loss.
        factor: Factor of this rank's loss before backward, if known; 0-d if a tensor.
        weights: Factor of each token's loss, (T,), on every rank or on none; None means 1.
    """

    objective: Objective = PLAIN
    factor: float | torch.Tensor = 1.0
    weights: torch.Tensor | None = None


def summed_loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    objective: Objective = PLAIN,
    weights: torch.Tensor | None = None,
    *,
    all_count: bool = False,
) -> torch.Tensor:
    """Return the loss of logits, summed over targets.

    Args:
        logits: (..., V), of any floating dtype; the loss is computed in at least float32.
        labels: int64, (...), -100 where there is no target.
        objective: Label smoothing and z-loss.
        weights: float32, (...), factor on the loss of each target; None: 1.
        all_count: True if no label is -100; then the z-loss does not wait for the device to select rows.

    Returns:
        0-d, float32 or wider; zero if there is no target.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, -2)
    labels = labels.flatten()
    weights = None if weights is None else weights.flatten().to(logits.dtype)
    loss = F.cross_entropy(
        logits,
        labels,
        ignore_index=IGNORED,
        reduction="sum" if weights is None else "none",
        label_smoothing=objective.label_smoothing,
    )
    loss = loss if weights is None else torch.dot(loss, weights)
    if objective.z_loss:
        if not all_count:
            counted = labels != IGNORED
            logits, weights = logits[counted], None if weights is None else weights[counted]
        squares = logits.logsumexp(-1).square()
        loss = loss + objective.z_loss * (squares.sum() if weights is None else torch.dot(squares, weights))
    return loss


def vocab_parallel_loss(
    hidden: torch.Tensor,
    head: nn.Linear,
    labels: torch.Tensor,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: Literal["mean", "sum"] = "mean",
) -> torch.Tensor:
    """Return the cross-entropy of ``head(hidden)``, without logits where that sends fewer bytes than the head's weight.

    With ``fully_shard(model, tables="auto")`` or ``"home"`` each rank multiplies the hidden states of all ranks by
    its own rows of the weight. Otherwise, also on an unsharded model, the loss is computed from logits. Every rank
    calls it in every step, also without targets, inside the model's forward or after it.

    Args:
        hidden: Input of the head, (..., d), already scaled if the model scales it.
        head: The model's output layer.
        labels: int64, (...), -100 where there is no target.
        label_smoothing: Share of each target's probability that is spread over the vocabulary.
        z_loss: Weight of the squared log-partition function of the softmax.
        reduction: ``"mean"`` over this rank's targets, or ``"sum"``. Every rank must scale the result by the same
            factor before backward, such as that of a gradient scaler.

    Returns:
        0-d, float32 or wider.

    Raises:
        ConfigError: ``reduction`` is neither.
    """
    if reduction not in ("mean", "sum"):
        raise ConfigError(f"reduction must be mean or sum; got {reduction!r}.")
    objective = Objective(label_smoothing, z_loss)
    flat, rows = labels.flatten(), hidden.flatten(0, -2)
    counted = (flat != IGNORED).nonzero().squeeze(1)
    share = 1.0 if reduction == "sum" else 1 / max(1, len(counted))
    rows, targets = rows.index_select(0, counted), flat[counted]
    table = table_of(head.weight) if head.bias is None else None
    if table is not None and table.is_home and table.pays(len(counted)):
        return share * table.loss(rows, targets, Terms(objective, share))
    return share * summed_loss(head(rows), targets, objective, all_count=True)


def linear_loss(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, labels: torch.Tensor, terms: Terms
) -> torch.Tensor:
    """Return the loss of ``rows @ weight.T + bias``, summed over rows, a few hundred rows at a time.

    The gradients are computed together with the loss, so that logits are neither kept for backward nor computed twice.

    Args:
        rows: Hidden states with a target, (T, d).
        weight: (V, d).
        bias: (V,), or None.
        labels: Their targets, (T,), int64.
        terms: What decides the loss.

    Returns:
        0-d, float32 or wider.
    """
    records = torch.is_grad_enabled()
    with plain_functions():
        return _LinearCrossEntropy.apply(rows, weight, bias, labels, terms, records)  # type: ignore[return-value]


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        terms: Terms,
        records: bool,  # noqa: FBT001 (autograd passes by position)
    ) -> torch.Tensor:
        wide = torch.promote_types(rows.dtype, torch.float32)
        # Gradients are scaled before they are rounded to 16 bits.
        ctx.factor = 1.0 if wide == rows.dtype else terms.factor
        loss = torch.zeros((), dtype=wide, device=rows.device)
        gradients = _Gradients(rows, weight, bias, [records and wanted for wanted in ctx.needs_input_grad[:3]])
        for part in _parts_of(rows, weight):
            weights = None if terms.weights is None else terms.weights[part]
            losses, slopes = _of_complete_logits(
                F.linear(rows[part], weight, bias).to(wide), labels[part], terms.objective, weights
            )  # the logits have no name here, so that they are freed before the products
            loss += losses.sum()
            if slopes.dtype != rows.dtype:
                slopes = torch.mul(slopes, ctx.factor, out=torch.empty_like(slopes, dtype=rows.dtype))
            gradients.add(part, slopes)
        ctx.gradients = gradients.sums()
        return loss

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        gradients, left = _gradients_once(ctx, gradient)
        one = left.device.type == "cpu" and left.item() == 1
        return (*(g if g is None or one else g.mul_(left) for g in gradients), None, None, None)


def linear_losses(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, labels: torch.Tensor
) -> torch.Tensor:
    """Return each row's plain loss, (T,), of which any function may be differentiated; a few hundred rows at a time.

    Arguments are those of :func:`linear_loss`. What backward multiplies the losses by is not known before, so that it
    computes the logits again.
    """
    with plain_functions():
        return _LinearLosses.apply(rows, weight, bias, labels)  # type: ignore[return-value]


class _LinearLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, labels: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(rows, weight, bias, labels)
        wide = torch.promote_types(rows.dtype, torch.float32)
        losses = rows.new_empty(rows.shape[0], dtype=wide)
        for part in _parts_of(rows, weight):
            logits = F.linear(rows[part], weight, bias).to(wide)
            losses[part] = F.cross_entropy(logits, labels[part], reduction="none")
        return losses

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        rows, weight, bias, labels = ctx.saved_tensors
        gradients = _Gradients(rows, weight, bias, ctx.needs_input_grad[:3])
        for part in _parts_of(rows, weight):
            slopes = torch.softmax(F.linear(rows[part], weight, bias).to(gradient.dtype), 1)
            slopes = PLAIN.slopes(slopes, gradient[part], labels[part, None], weight.shape[0])
            gradients.add(part, slopes.mul_(gradient[part, None]).to(rows.dtype))
        return (*gradients.sums(), None)


class _Gradients:
    """Gradients of a linear layer's rows, weight and bias, of the slopes of parts of its logits."""

    def __init__(
        self, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, wanted: Sequence[bool]
    ) -> None:
        self._rows, self._weight, self._wide = rows, weight, torch.promote_types(rows.dtype, torch.float32)
        self._of_rows = torch.empty_like(rows) if wanted[0] else None
        self._of_weight = torch.zeros_like(weight, dtype=self._wide) if wanted[1] else None
        self._of_bias = torch.zeros_like(bias, dtype=self._wide) if bias is not None and wanted[2] else None

    def add(self, part: slice, slopes: torch.Tensor) -> None:
        """Add those of some rows, whose logits have ``slopes``."""
        if self._of_rows is not None:
            torch.mm(slopes, self._weight, out=self._of_rows[part])
        if self._of_weight is not None:
            _add_product(self._of_weight, slopes, self._rows[part])
        if self._of_bias is not None:
            self._of_bias += slopes.sum(0, dtype=self._wide)

    def sums(self) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients in the dtypes of what they are of; None where none is wanted."""
        parts = (self._of_weight, self._of_bias)
        return (self._of_rows, *(None if one is None else one.to(self._weight.dtype) for one in parts))


def _parts_of(rows: torch.Tensor, weight: torch.Tensor) -> list[slice]:
    """Return runs of rows whose logits are computed at once."""
    step = max(64, logits_at_once(weight.device) // weight.shape[0])
    return [slice(start, start + step) for start in range(0, rows.shape[0], step)]


def _of_complete_logits(
    logits: torch.Tensor, labels: torch.Tensor, objective: Objective, weights: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weighted losses of a few tokens, (T,), and the gradient of their logits, (T, V), in their dtype."""
    target = logits.gather(1, labels[:, None]).squeeze(1)
    mean = logits.mean(1) if objective.label_smoothing else 0.0
    softmax, highest = torch.softmax(logits, 1), logits.amax(1)
    # The largest probability is at least 1 / V, so its logarithm is accurate.
    lse = highest - softmax.amax(1).log()
    losses = objective.losses(lse, target, mean)
    slopes = objective.slopes(softmax, lse, labels[:, None], logits.shape[1])
    return (losses, slopes) if weights is None else (losses * weights, slopes.mul_(weights[:, None]))


def _add_product(total: torch.Tensor, slopes: torch.Tensor, hidden: torch.Tensor) -> None:
    """Add a chunk's gradient of the weight to ``total``, (V, d), float32 or wider."""
    if slopes.dtype == total.dtype:
        total.addmm_(slopes.t(), hidden)
    else:
        total += slopes.t() @ hidden


def _gradients_once(ctx: Any, gradient: torch.Tensor) -> tuple[tuple[torch.Tensor | None, ...], torch.Tensor]:
    """Return the gradients computed in forward, and the factor, (1,), that is left to multiply them by."""
    gradients, ctx.gradients = ctx.gradients, None
    if gradients is None:
        raise RuntimeError("Backward through a fused loss runs once: its gradients are not kept.")
    # 1-d: a 0-d factor would be rounded to the gradient's 16 bits, and bias all gradients the same way.
    return gradients, (gradient / ctx.factor).reshape(1)


def home_loss(table: TableRows, hidden: torch.Tensor, labels: torch.Tensor, terms: Terms) -> torch.Tensor:
    """Return this rank's loss summed over its tokens. Every rank calls it, also without tokens.

    Args:
        table: The table of V rows of width d, whose rows are home.
        hidden: Hidden states of this rank's T tokens with a target, (T, d); cast to the table's compute dtype.
        labels: Their targets, (T,), int64.
        terms: What decides the loss.

    Returns:
        0-d, float32 or wider.
    """
    table.announce("loss")
    hidden = hidden.to(table.lane.dtypes.compute)
    records = torch.is_grad_enabled() and (hidden.requires_grad or table.trainable)
    with plain_functions():
        parts = _Parts(table, hidden, labels, terms, records=records)
        return _HomeLoss.apply(hidden, table.full, parts)  # type: ignore[return-value]


def _most_tokens(table: TableRows, labels: torch.Tensor) -> int:
    """Exchange how many tokens each rank has, and return the most.

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
    return max(count for count, _, _ in by_rank)


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
    def forward(ctx: Any, hidden: torch.Tensor, _full: torch.Tensor, parts: _Parts) -> torch.Tensor:
        total = parts.run(wants_hidden=parts.records and ctx.needs_input_grad[0])
        ctx.table, ctx.factor = parts.table, parts.terms.factor
        ctx.gradients, ctx.unit = (parts.hidden_gradient, parts.rows_gradient), parts.unit
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        table: TableRows = ctx.table
        (hidden, rows), left = _gradients_once(ctx, gradient)
        if rows is not None:
            _require_equal(table, left)

            def add(total: torch.Tensor) -> None:
                total.addcmul_(rows.to(total.dtype), (left * ctx.unit).to(total.dtype))

            table.receive(add)
        return (None if hidden is None else hidden.mul_(left * ctx.unit), None, None)


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
    """Computes the loss of all ranks' tokens, and its gradients if ``records``, in chunks of tokens."""

    @torch.no_grad()
    def __init__(
        self, table: TableRows, hidden: torch.Tensor, labels: torch.Tensor, terms: Terms, *, records: bool
    ) -> None:
        self.table, self.terms, self.records = table, terms, records
        self.most = _most_tokens(table, labels)  # the other ranks are padded to it
        self.rows = table.rows
        self.rank, self.count = table.comm.rank, len(hidden)
        self.wide = torch.promote_types(hidden.dtype, torch.float32)
        self.hidden = self._gather(hidden.detach())
        first = table.bounds[self.rank].item()
        targets = self._gather(labels) - first
        self.is_here = (targets >= 0) & (targets < len(self.rows))
        self.targets = targets.where(self.is_here, 0)
        ones = torch.ones(len(hidden), dtype=self.wide, device=hidden.device)
        self.own_weights = ones if terms.weights is None else terms.weights.to(self.wide)
        # Tokens are weighted before their gradients are rounded to 16 bits; padding gets 0. The largest is scaled to
        # about 1, and back after the sums: in float16 the slopes of a mean over many tokens would underflow to zero.
        weights = self._gather(self.own_weights * terms.factor)
        self.unit = _power_of_two(weights)
        self.weights = weights / self.unit
        self.hidden_gradient: torch.Tensor | None = None
        self.rows_gradient: torch.Tensor | None = None

    def _gather(self, mine: torch.Tensor) -> torch.Tensor:
        """Return (N * most, ...): each rank's (T, ...), padded with zeros."""
        padded = mine.new_zeros(self.most, *mine.shape[1:])
        padded[: len(mine)] = mine
        return _all_gather(self.table, padded).flatten(0, 1)

    def run(self, *, wants_hidden: bool) -> torch.Tensor:
        """Return this rank's loss, 0-d, and set the gradients."""
        dtypes, records = self.table.lane.dtypes, self.records
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
                _add_product(self.rows_gradient, slopes, self.hidden[part])
        if partial is not None:
            self.hidden_gradient = self._own(partial).to(self.hidden.dtype)
        at = self.rank * self.most
        mine = torch.cat(losses)[at : at + self.count] if losses else self.weights
        return (mine * self.own_weights).sum()

    def _own(self, partial: torch.Tensor) -> torch.Tensor:
        """Return the sum over ranks of what each computed for this rank's tokens, (T, d)."""
        own = partial.new_empty(self.most, partial.shape[1], dtype=self.table.lane.dtypes.reduce_sum)
        if not self.most:
            return own
        self.table.wait(self.table.comm.reduce_scatter(own.view(-1), partial.view(-1)))
        return own[: self.count]

    def _chunk(self, part: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the losses of a chunk of tokens of all ranks, (C,), and the gradient of their logits here, (C, R)."""
        objective, vocabulary = self.terms.objective, self.table.meta.global_shape[0]
        logits = (self.hidden[part] @ self.rows.t()).to(self.wide)
        here, targets = self.is_here[part], self.targets[part, None]
        everywhere = _all_gather(self.table, self._statistics(logits, here, targets))
        top = everywhere[:, 0].amax(0)
        lse = top + (everywhere[:, 1] * (everywhere[:, 0] - top).exp()).sum(0).log()
        mean = everywhere[:, 3].sum(0) / vocabulary if objective.label_smoothing else 0.0
        losses = objective.losses(lse, everywhere[:, 2].sum(0), mean)
        if not self.records:
            return losses, logits
        softmax = logits.sub_(lse[:, None]).exp_()
        slopes = objective.slopes(softmax, lse, targets, vocabulary, here)
        return losses, slopes.mul_(self.weights[part, None]).to(self.hidden.dtype)

    def _statistics(self, logits: torch.Tensor, here: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return for each token the largest logit here, the sum of exp(logit - largest), the target's, and the sum."""
        stats = logits.new_zeros(4 if self.terms.objective.label_smoothing else 3, len(logits))
        if not len(self.rows):
            stats[0] = -math.inf
            return stats
        stats[0] = logits.amax(1)
        stats[1] = (logits - stats[0, :, None]).exp_().sum(1)
        stats[2] = logits.gather(1, targets).squeeze(1) * here
        if self.terms.objective.label_smoothing:
            stats[3] = logits.sum(1)
        return stats
