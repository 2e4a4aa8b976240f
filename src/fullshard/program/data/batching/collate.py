"""Collation of token ids into a batch of tensors: padded to the longest row, or packed."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fullshard.core.comm import Device, device_of
from fullshard.program.data.tokenizing.tokenize import TokenizedSet

IGNORED_LABEL = -100
"""Label of positions that are not targets, ignored by torch's and Hugging Face's cross-entropy."""

MOST_PADDING = 0.02
"""Maximum share of padding in a packed batch. Fewer, longer sequences have less padding, but cost more attention,
since its masked part is computed too."""


@dataclass(frozen=True)
class RowRef:
    """One row of a micro-batch."""

    index: int  # its index in the tokenized set
    # True if it only makes the ranks' steps equal and does not count in loss and metrics
    filler: bool = False


@dataclass(frozen=True)
class CollateSpec:
    """How rows are joined and padded."""

    pad_token_id: int  # id of padding, where the attention mask is zero
    causal: bool = False  # whether source and target are one sequence (decoder-only) rather than two (encoder-decoder)
    packed: bool = False  # whether rows are concatenated into few sequences, instead of padded to the longest
    # whether the inputs of generation are made too, and the attention mask; what nothing will read need not be made
    prompts: bool = True
    masked: bool = True


@dataclass(frozen=True)
class Packing:
    """The row of each position of a packed batch. Sizes: B sequences, S and T tokens as in :class:`Batch`."""

    segments_BS: Tensor  # int64, n for the tokens of the n-th row of a sequence, from 1; 0 on padding
    target_segments_BT: Tensor  # the same for the labels; for a causal model ``segments_BS`` itself
    positions_BS: Tensor  # int64, from 0 in each row


@dataclass(frozen=True)
class Batch:
    """One micro-batch of one rank. Sizes: B rows, S source tokens, T label tokens, P prompt tokens.

    The source of a causal model is source and target joined. In a packed batch B counts sequences, each with the tokens
    of several rows.
    """

    input_ids_BS: Tensor  # int64. Encoder-decoder: sources; causal: source and target joined; padded on the right
    attention_mask_BS: Tensor | None  # int64, 1 on tokens, 0 on padding; None if it was not asked for, or packed
    # int64 targets, -100 on padding, on fillers and, when causal (T = S), on the prompt. Packed and causal, also on the
    # first token of each row, which the preceding row must not predict
    labels_BT: Tensor
    target_tokens: int  # number of tokens that count in the loss: all labels except -100, after the model's shift
    tokens: int  # number of source and target tokens of all rows except fillers
    indices: tuple[int, ...]  # index of each row in the tokenized set
    fillers: tuple[bool, ...]  # for each row, whether it is a filler, which does not count in loss and metrics
    # int64, the input of generation. Encoder-decoder: ``input_ids_BS`` itself; causal: the prompts, padded on the left.
    # None if it was not asked for, or if rows are packed
    prompt_ids_BP: Tensor | None = None
    prompt_mask_BP: Tensor | None = None  # int64 mask of ``prompt_ids_BP``
    packing: Packing | None = None  # the row of each position; None if each row is a separate sequence
    weights_BT: Tensor | None = None  # float32, the weight of each label's row; None: all are 1
    target_weight: float = 0.0  # sum of the weights of the tokens that count; ``target_tokens`` without weights

    def to(self, device: torch.device | str) -> Batch:
        """Return the batch with its tensors on a device, this one if they are there; shared tensors stay shared."""
        if self.input_ids_BS.device == torch.device(device):
            return self
        on_device, mine = device_of(torch.device(device)), _tensors_of(self)
        return _with(self, {key: on_device.from_host(tensor) for key, tensor in mine.items()})

    def sent(self, device: Device) -> Callable[[], Batch]:
        """Start copying the tensors to a device; see :meth:`fullshard.core.comm.Device.send`."""
        mine = _tensors_of(self)
        arrived = device.send(list(mine.values()))
        return lambda: _with(self, dict(zip(mine, arrived(), strict=True)))


def _tensors_of(holder: Batch | Packing) -> dict[int, Tensor]:
    """Return the tensors of a batch by their ids: those of several fields once."""
    found: dict[int, Tensor] = {}
    for value in (getattr(holder, one.name) for one in fields(holder)):
        if isinstance(value, Tensor):
            found[id(value)] = value
        elif isinstance(value, Packing):
            found |= _tensors_of(value)
    return found


H = TypeVar("H", Batch, Packing)


def _with(holder: H, moved: dict[int, Tensor]) -> H:
    """Return a batch with other tensors, by the ids of its own."""
    values = {one.name: getattr(holder, one.name) for one in fields(holder)}
    changed: dict[str, Any] = {name: moved[id(value)] for name, value in values.items() if isinstance(value, Tensor)}
    changed |= {name: _with(value, moved) for name, value in values.items() if isinstance(value, Packing)}
    return replace(holder, **changed)


def collate(rows: Sequence[RowRef], tokenized: TokenizedSet, spec: CollateSpec) -> Batch:
    """Make a batch on the CPU. Each rank calls it for its own rows.

    Args:
        rows: At least one row.
        tokenized: The set that the rows index.
        spec: Padding or packing, and the kind of model.

    Returns:
        The batch; each axis has the length of its longest row, or of its longest sequence if rows are packed.
    """
    sources = [tokenized.source_ids[row.index] for row in rows]
    targets = [tokenized.target_ids[row.index] for row in rows]
    # A filler has attention like any row, since a softmax over nothing is nan, but no labels.
    labels = [
        np.full(len(target), IGNORED_LABEL) if row.filler else target for row, target in zip(rows, targets, strict=True)
    ]
    if spec.causal:
        inputs = [np.concatenate(pair) for pair in zip(sources, targets, strict=True)]
        labels = [
            np.concatenate([np.full(len(source), IGNORED_LABEL), label])
            for source, label in zip(sources, labels, strict=True)
        ]
        if tokenized.spans is not None:
            spans = [() if row.filler else tokenized.spans[row.index] for row in rows]
            labels = [_labels(row, learned) for row, learned in zip(inputs, spans, strict=True)]
    else:
        inputs = sources
    weights = None
    if tokenized.weights is not None:
        weights = [np.full(len(label), tokenized.weights[row.index]) for row, label in zip(rows, labels, strict=True)]
    fields = _packed(inputs, labels, weights, spec) if spec.packed else _padded(inputs, labels, weights, sources, spec)
    counted = _counted(fields["labels_BT"], causal=spec.causal)
    target_tokens = int(counted.sum())
    by_position = fields["weights_BT"]
    target_weight = (
        target_tokens if by_position is None else by_position[:, -counted.shape[1] :][counted].double().sum()
    )
    real = [len(s) + len(t) for row, s, t in zip(rows, sources, targets, strict=True) if not row.filler]
    return Batch(
        **fields,
        target_tokens=target_tokens,
        target_weight=float(target_weight),
        tokens=sum(real),
        indices=tuple(row.index for row in rows),
        fillers=tuple(row.filler for row in rows),
    )


T = TypeVar("T", bound=np.generic)
Rows = Sequence[NDArray[np.integer]]
WeightRows = Sequence[NDArray[np.float64]]


def _labels(ids: NDArray[np.integer], spans: Sequence[int] | NDArray[np.integer]) -> NDArray[np.integer]:
    """Return the ids within the spans, and the ignored label elsewhere."""
    labels = np.full(len(ids), IGNORED_LABEL)
    for start, end in zip(spans[::2], spans[1::2], strict=True):
        labels[start:end] = ids[start:end]
    return labels


def _padded(inputs: Rows, labels: Rows, weights: WeightRows | None, sources: Rows, spec: CollateSpec) -> dict[str, Any]:
    """Return the tensors of a batch in which each row is a sequence."""
    input_ids, attention_mask = _pad(inputs, spec.pad_token_id)
    batch = {
        "input_ids_BS": input_ids,
        "attention_mask_BS": attention_mask if spec.masked else None,
        "labels_BT": _pad(labels, IGNORED_LABEL)[0],
        "weights_BT": None if weights is None else _pad(weights, 1, np.float32)[0],
    }
    if not spec.prompts:
        return batch
    prompts = _pad(sources, spec.pad_token_id, left=True) if spec.causal else (input_ids, attention_mask)
    return {**batch, "prompt_ids_BP": prompts[0], "prompt_mask_BP": prompts[1]}


def _packed(inputs: Rows, labels: Rows, weights: WeightRows | None, spec: CollateSpec) -> dict[str, Any]:
    """Return the tensors of a batch in which a sequence has several rows."""
    if spec.causal:
        for row in labels:
            row[:1] = IGNORED_LABEL
        sequences = share_sequences([[len(row)] for row in inputs])
    else:
        sequences = share_sequences([[len(row), len(label)] for row, label in zip(inputs, labels, strict=True)])
    input_ids, _ = _pad(_concatenated(inputs, sequences), spec.pad_token_id)
    segments, _ = _pad([_segments(inputs, sequence) for sequence in sequences], 0)
    positions, _ = _pad([np.concatenate([np.arange(len(inputs[row])) for row in rows]) for rows in sequences], 0)
    target_segments = segments
    if not spec.causal:
        target_segments, _ = _pad([_segments(labels, sequence) for sequence in sequences], 0)
    return {
        "input_ids_BS": input_ids,
        "attention_mask_BS": None,
        "labels_BT": _pad(_concatenated(labels, sequences), IGNORED_LABEL)[0],
        "packing": Packing(segments, target_segments, positions),
        "weights_BT": None if weights is None else _pad(_concatenated(weights, sequences), 1, np.float32)[0],
    }


def _concatenated(rows: Sequence[NDArray[T]], sequences: Sequence[Sequence[int]]) -> list[NDArray[T]]:
    """Concatenate the rows of each sequence."""
    return [np.concatenate([rows[row] for row in sequence]) for sequence in sequences]


def _segments(rows: Rows, sequence: Sequence[int]) -> NDArray[np.integer]:
    """Return for each token the number of its row within the sequence, from 1."""
    return np.repeat(np.arange(1, len(sequence) + 1), [len(rows[row]) for row in sequence])


def _counted(labels_BT: Tensor, *, causal: bool) -> Tensor:
    """Return which labels count, bool. A causal model predicts position t + 1 at t, so the first label never does."""
    return (labels_BT[:, 1:] if causal else labels_BT) != IGNORED_LABEL


def _pad(rows: Rows | WeightRows, value: int, dtype: type = np.int64, *, left: bool = False) -> tuple[Tensor, Tensor]:
    """Return rows as one tensor (rows, longest row), int64 or float32, and its int64 mask of the same shape."""
    longest = max(map(len, rows))
    padded, mask = np.full((len(rows), longest), value, dtype), np.zeros((len(rows), longest), np.int64)
    for position, row in enumerate(rows):
        span = slice(longest - len(row), longest) if left else slice(0, len(row))
        padded[position, span], mask[position, span] = row, 1
    return torch.from_numpy(padded), torch.from_numpy(mask)


def share_sequences(lengths: Sequence[Sequence[int]]) -> list[list[int]]:
    """Distribute rows over as many sequences as possible with hardly any padding; the same on every rank.

    The number of sequences is halved until padding is at most :data:`MOST_PADDING` of all positions; one sequence has
    none. Rows are assigned longest first, each to the shortest sequence so far.

    ``lengths`` are the tokens of each row on each side: source and target, or both joined for a causal model. Returns
    the row numbers of each sequence, in order; no sequence is empty.
    """
    tokens, sides, count = sum(map(sum, lengths)), range(len(lengths[0])), len(lengths)
    while True:
        sequences = _deal(lengths, count)
        longest = [max(sum(lengths[row][side] for row in rows) for rows in sequences) for side in sides]
        if count == 1 or 1 - tokens / (len(sequences) * sum(longest)) <= MOST_PADDING:
            return sequences
        count = (count + 1) // 2


def _deal(lengths: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    sequences: list[list[int]] = [[] for _ in range(count)]
    shortest = [(0, number) for number in range(count)]
    for row in sorted(range(len(lengths)), key=lambda row: -sum(lengths[row])):
        tokens, number = heapq.heappop(shortest)
        sequences[number].append(row)
        heapq.heappush(shortest, (tokens + sum(lengths[row]), number))
    return [sorted(rows) for rows in sequences if rows]
