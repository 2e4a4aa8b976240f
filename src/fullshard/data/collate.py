"""Rows of ids to one batch of tensors, padded to the longest row of the batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fullshard.data.tokenize import TokenizedSet

IGNORED_LABEL = -100
"""Label of positions that are not targets; torch's and Hugging Face's cross-entropy leave it out."""


@dataclass(frozen=True)
class RowRef:
    """One row of a micro-batch.

    Attributes:
        index: Its index in the tokenized set.
        filler: Whether it only makes the ranks' steps equal: it counts in no loss and no metric.
    """

    index: int
    filler: bool = False


@dataclass(frozen=True)
class CollateSpec:
    """How rows are joined and padded.

    Attributes:
        pad_token_id: Id put where there is no token; the attention mask is zero there.
        causal: Whether source and target are one sequence (decoder-only) rather than two (encoder-decoder).
    """

    pad_token_id: int
    causal: bool = False


@dataclass(frozen=True)
class Batch:
    """One micro-batch of one rank. Sizes: B rows, S source (causal: joined) tokens, T label tokens, P prompt tokens.

    Attributes:
        input_ids_BS: int64. Encoder-decoder: sources; causal: source and target joined; padded on the right.
        attention_mask_BS: int64, 1 on tokens, 0 on padding.
        labels_BT: int64 targets, -100 on padding, on fillers and, when causal (T = S), on the prompt.
        prompt_ids_BP: int64, what generation starts from. Encoder-decoder: ``input_ids_BS`` itself; causal: the
            prompts alone, padded on the left.
        prompt_mask_BP: int64 mask of ``prompt_ids_BP``.
        target_tokens: Number of tokens that count in the loss: of all labels but -100, as the model shifts them.
        indices: Index of each row in the tokenized set.
        fillers: For each row, whether it counts in no loss and no metric.
    """

    input_ids_BS: Tensor
    attention_mask_BS: Tensor
    labels_BT: Tensor
    prompt_ids_BP: Tensor
    prompt_mask_BP: Tensor
    target_tokens: int
    indices: tuple[int, ...]
    fillers: tuple[bool, ...]

    def to(self, device: torch.device | str) -> Batch:
        """The same batch with its tensors on a device; shared tensors stay shared."""
        names = ("input_ids_BS", "attention_mask_BS", "labels_BT", "prompt_ids_BP", "prompt_mask_BP")
        moved = {id(tensor): tensor.to(device) for tensor in (getattr(self, name) for name in names)}
        return replace(self, **{name: moved[id(getattr(self, name))] for name in names})


def collate(rows: Sequence[RowRef], tokenized: TokenizedSet, spec: CollateSpec) -> Batch:
    """Make a batch on the CPU. Called by each rank for its own rows.

    Args:
        rows: At least one row.
        tokenized: The set the rows are of.
        spec: Padding and the kind of model.

    Returns:
        The batch, every axis as long as its longest row.
    """
    sources = [tokenized.source_ids[row.index] for row in rows]
    targets = [tokenized.target_ids[row.index] for row in rows]
    # A filler has shape and attention like any row, so that no softmax is over nothing, but no label.
    labels = [
        [IGNORED_LABEL] * len(target) if row.filler else target for row, target in zip(rows, targets, strict=True)
    ]
    if spec.causal:
        joined = [source + target for source, target in zip(sources, targets, strict=True)]
        labels = [[IGNORED_LABEL] * len(source) + label for source, label in zip(sources, labels, strict=True)]
        input_ids, attention_mask = _pad(joined, spec.pad_token_id)
        prompt_ids, prompt_mask = _pad(sources, spec.pad_token_id, left=True)
    else:
        input_ids, attention_mask = _pad(sources, spec.pad_token_id)
        prompt_ids, prompt_mask = input_ids, attention_mask
    labels_BT, _ = _pad(labels, IGNORED_LABEL)
    return Batch(
        input_ids_BS=input_ids,
        attention_mask_BS=attention_mask,
        labels_BT=labels_BT,
        prompt_ids_BP=prompt_ids,
        prompt_mask_BP=prompt_mask,
        target_tokens=_count_targets(labels_BT, causal=spec.causal),
        indices=tuple(row.index for row in rows),
        fillers=tuple(row.filler for row in rows),
    )


def _count_targets(labels_BT: Tensor, *, causal: bool) -> int:
    """Labels that enter the loss. A causal model predicts position t + 1 at t: the first label is never predicted."""
    counted = labels_BT[:, 1:] if causal else labels_BT
    return int((counted != IGNORED_LABEL).sum())


def _pad(rows: Sequence[Sequence[int]], value: int, *, left: bool = False) -> tuple[Tensor, Tensor]:
    """Rows as one int64 tensor (rows, longest row) and its mask of the same shape."""
    longest = max(len(row) for row in rows)
    padded = torch.full((len(rows), longest), value, dtype=torch.int64)
    mask = torch.zeros((len(rows), longest), dtype=torch.int64)
    for position, row in enumerate(rows):
        span = slice(longest - len(row), longest) if left else slice(0, len(row))
        padded[position, span] = torch.tensor(row, dtype=torch.int64)
        mask[position, span] = 1
    return padded, mask
