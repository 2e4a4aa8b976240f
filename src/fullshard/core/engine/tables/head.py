"""The loss of a head whose rows may stay home, for user-written training steps."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn

from fullshard.core.shards import table_of
from fullshard.errors import ConfigError

IGNORED = -100
"""Label of positions without a target, as in torch's ``cross_entropy``."""


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
    flat, rows = labels.flatten(), hidden.flatten(0, -2)
    counted = (flat != IGNORED).nonzero().squeeze(1)
    share = 1.0 if reduction == "sum" else 1 / max(1, len(counted))
    table = table_of(head.weight) if head.bias is None else None
    if table is not None and table.is_home and table.pays(len(counted)):
        return share * table.loss(rows.index_select(0, counted), flat[counted], label_smoothing, z_loss, share)
    return share * _loss_of_logits(head(rows.index_select(0, counted)), flat[counted], label_smoothing, z_loss)


# ``models.summed_loss`` cannot be used here: it imports transformers, which the library does not require.
def _loss_of_logits(logits: torch.Tensor, labels: torch.Tensor, label_smoothing: float, z_loss: float) -> torch.Tensor:
    """Return the loss of (T, V) logits summed over targets, in at least float32."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    loss = F.cross_entropy(logits, labels, reduction="sum", label_smoothing=label_smoothing)
    return loss + z_loss * logits.logsumexp(-1).square().sum() if z_loss else loss
