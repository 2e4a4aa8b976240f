"""Collation of token ids into a batch of tensors: padded to the longest row, or packed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from fullshard.core.comm import Device, device_of
from fullshard.program.data.batching.shapes import Shape, fit, share_sequences
from fullshard.program.data.tokenizing.tokenize import TokenizedSet

IGNORED_LABEL = -100
"""Label of positions that are not targets, ignored by torch's and Hugging Face's cross-entropy."""


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
    # whether batches with few rows get fillers up to a fixed shape's; the routers' own loss would count them
    fills: bool = True
    # shapes that batches are padded to, each to the first that holds its rows: of ``choose_shapes``. Empty: every batch
    # has its own
    shapes: tuple[Shape, ...] = ()
    shortest: int = 1  # least tokens of a side: each rank that shares the rows needs one


@dataclass(frozen=True)
class Packing:
    """The row of each position of a packed batch. Sizes: B sequences, S and T tokens as in :class:`Batch`."""

    segments_BS: Tensor  # int64, n for the tokens of the n-th row of the batch, from 1; 0 on padding
    target_segments_BT: Tensor  # the same for the labels; for a causal model ``segments_BS`` itself
    positions_BS: Tensor  # int64, from 0 in each row
    # int32, where each row of the sources starts among all B x S tokens, and their number; with fixed shapes empty rows
    # follow, so that their number depends on the shape alone
    starts: Tensor
    longest: int  # most tokens of these rows, padding at a sequence's end being one; with fixed shapes at least that


@dataclass(frozen=True)
class Pairs:
    """What a batch of P preferences has besides its rows: chosen, rejected, chosen, ..., or one each with labels."""

    counts_P: Tensor  # float32, 1 for each preference that counts, 0 for fillers
    reference_B: Tensor  # float32, log-probability of each row's target under the reference; 0 without one
    desirable_P: Tensor | None = None  # bool, whether each row's completion is; None: rows are pairs
    unrelated: Batch | None = None  # with labels: the same prompts with completions of other ones


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
    targets_T: tuple[int, ...]  # of these, the number at each place, when causal at that which predicts them
    tokens: int  # number of source and target tokens of all rows except fillers
    indices: tuple[int, ...]  # index of each row in the tokenized set
    fillers: tuple[bool, ...]  # for each row, whether it is a filler, which does not count in loss and metrics
    # int64, the input of generation. Encoder-decoder: ``input_ids_BS`` itself; causal: the prompts, padded on the left.
    # None if it was not asked for, or if rows are packed
    prompt_ids_BP: Tensor | None = None
    prompt_mask_BP: Tensor | None = None  # int64 mask of ``prompt_ids_BP``
    packing: Packing | None = None  # the row of each position; None if each row is a separate sequence
    weights_BT: Tensor | None = None  # float32, the weight of each label's row; None: all are 1
    # sum of the weights of the tokens that count; ``target_tokens`` without weights; of pairs, their number
    target_weight: float = 0.0
    pairs: Pairs | None = None  # None: each row counts by itself

    def to(self, device: torch.device | str) -> Batch:
        """Return the batch with its tensors on a device, this one if they are there; shared tensors stay shared."""
        here, there = self.input_ids_BS.device, torch.device(device)
        if here.type == there.type and there.index in (None, here.index):
            return self
        on_device, mine = device_of(there), _tensors_of(self)
        return _with(self, {key: on_device.from_host(tensor) for key, tensor in mine.items()})

    def sent(self, device: Device) -> Callable[[], Batch]:
        """Start copying the tensors to a device; see :meth:`fullshard.core.comm.Device.send`."""
        mine = _tensors_of(self)
        arrived = device.send(list(mine.values()))
        return lambda: _with(self, dict(zip(mine, arrived(), strict=True)))


def _tensors_of(holder: Batch | Packing | Pairs) -> dict[int, Tensor]:
    """Return the tensors of a batch by their ids: those of several fields once."""
    found: dict[int, Tensor] = {}
    for value in (getattr(holder, one.name) for one in fields(holder)):
        if isinstance(value, Tensor):
            found[id(value)] = value
        elif isinstance(value, Packing | Pairs | Batch):
            found |= _tensors_of(value)
    return found


def _with(holder: Any, moved: dict[int, Tensor]) -> Any:
    """Return a batch, or a part of one, with other tensors, by the ids of its own."""
    changed: dict[str, Any] = {}
    for name, value in ((one.name, getattr(holder, one.name)) for one in fields(holder)):
        if isinstance(value, Tensor):
            changed[name] = moved[id(value)]
        elif isinstance(value, Packing | Pairs | Batch):
            changed[name] = _with(value, moved)
    return replace(holder, **changed)


def collate(rows: Sequence[RowRef], tokenized: TokenizedSet, spec: CollateSpec) -> Batch:
    """Make a batch on the CPU. Each rank calls it for its own rows.

    Args:
        rows: At least one row.
        tokenized: The set that the rows index.
        spec: Padding or packing, and the kind of model.

    Returns:
        The batch; each axis has the length of its longest row, or of its longest sequence if rows are packed. If shapes
        are fixed it has one of them: the first row is repeated as a filler, or with packed rows empty sequences follow.
    """
    if tokenized.desirable is not None:
        return _labelled(rows, tokenized, tokenized.desirable, spec)
    size: Shape | None = None
    sequences: list[list[int]] = []
    if spec.shapes:
        size, sequences = fit(spec.shapes, _lengths(rows, tokenized, causal=spec.causal), packed=spec.packed)
        if not spec.packed:
            size = size if spec.fills else (len(rows), *size[1:])
            rows = [*rows, *[RowRef(rows[0].index, filler=True)] * (size[0] - len(rows))]
    elif spec.packed:
        sequences = share_sequences(_lengths(rows, tokenized, causal=spec.causal))
    if spec.shortest > 1 and size is None:
        size = _lengthened(_lengths(rows, tokenized, causal=spec.causal), sequences, spec.shortest)
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
    if spec.packed:
        fields = _packed(inputs, labels, weights, spec, sequences, size)
    else:
        fields = _padded(inputs, labels, weights, sources, spec, size)
    counted = _counted(fields["labels_BT"], causal=spec.causal)
    target_tokens = int(counted.sum())
    by_position = fields["weights_BT"]
    target_weight = (
        target_tokens if by_position is None else by_position[:, -counted.shape[1] :][counted].double().sum()
    )
    pairs = None if tokenized.together == 1 else _pairs(rows, tokenized)
    real = [len(s) + len(t) for row, s, t in zip(rows, sources, targets, strict=True) if not row.filler]
    return Batch(
        **fields,
        target_tokens=target_tokens,
        targets_T=tuple(counted.sum(0).tolist()),
        target_weight=float(target_weight if pairs is None else pairs.counts_P.sum()),
        pairs=pairs,
        tokens=sum(real),
        indices=tuple(row.index for row in rows),
        fillers=tuple(row.filler for row in rows),
    )


def _labelled(
    rows: Sequence[RowRef], tokenized: TokenizedSet, desirable: NDArray[np.bool_], spec: CollateSpec
) -> Batch:
    """Return a batch of prompts with their own completions, and in it one of the same with unrelated ones."""
    plain = replace(tokenized, desirable=None, together=1)
    own, other = (collate(side, plain, spec) for side in tokenized.forwards(rows))
    pairs, others = (
        _pairs([RowRef(*one) for one in zip(side.indices, side.fillers, strict=True)], plain) for side in (own, other)
    )
    labels = torch.from_numpy(desirable[[index // 2 for index in own.indices]])
    pairs = replace(pairs, desirable_P=labels, unrelated=replace(other, pairs=others))
    return replace(own, pairs=pairs, target_weight=float(pairs.counts_P.sum()))


def _pairs(rows: Sequence[RowRef], tokenized: TokenizedSet) -> Pairs:
    counts = torch.tensor([float(not row.filler) for row in rows[:: tokenized.together]])
    if tokenized.reference is None:
        return Pairs(counts, torch.zeros(len(rows)))
    reference = tokenized.reference[[row.index for row in rows]]
    return Pairs(counts, torch.from_numpy(reference).float())


T = TypeVar("T", bound=np.generic)
Rows = Sequence[NDArray[np.integer]]
WeightRows = Sequence[NDArray[np.float64]]


def _lengths(rows: Sequence[RowRef], tokenized: TokenizedSet, *, causal: bool) -> list[tuple[int, ...]]:
    """Return the tokens of each row on each side, which are joined for a causal model."""
    pairs = [(len(tokenized.source_ids[row.index]), len(tokenized.target_ids[row.index])) for row in rows]
    return [(source + target,) for source, target in pairs] if causal else list(pairs)


def _lengthened(lengths: Sequence[Sequence[int]], sequences: Sequence[Sequence[int]], shortest: int) -> Shape:
    """Return the shape of a batch whose sequences, by default its rows, have at least so many tokens on each side."""
    sums = [np.sum([lengths[row] for row in rows], 0) for rows in sequences] or np.array(lengths)
    longest = np.max(sums, 0).clip(shortest)
    return len(sums), int(longest[0]), int(longest[-1])


def _labels(ids: NDArray[np.integer], spans: Sequence[int] | NDArray[np.integer]) -> NDArray[np.integer]:
    """Return the ids within the spans, and the ignored label elsewhere."""
    labels = np.full(len(ids), IGNORED_LABEL)
    for start, end in zip(spans[::2], spans[1::2], strict=True):
        labels[start:end] = ids[start:end]
    return labels


def _padded(
    inputs: Rows, labels: Rows, weights: WeightRows | None, sources: Rows, spec: CollateSpec, size: Shape | None
) -> dict[str, Any]:
    """Return the tensors of a batch in which each row is a sequence."""
    source, target = _sides(size)
    input_ids, attention_mask = _pad(inputs, spec.pad_token_id, size=source)
    batch = {
        "input_ids_BS": input_ids,
        "attention_mask_BS": attention_mask if spec.masked else None,
        "labels_BT": _pad(labels, IGNORED_LABEL, size=target)[0],
        "weights_BT": None if weights is None else _pad(weights, 1, np.float32, size=target)[0],
    }
    if not spec.prompts:
        return batch
    prompts = _pad(sources, spec.pad_token_id, left=True) if spec.causal else (input_ids, attention_mask)
    return {**batch, "prompt_ids_BP": prompts[0], "prompt_mask_BP": prompts[1]}


def _packed(
    inputs: Rows,
    labels: Rows,
    weights: WeightRows | None,
    spec: CollateSpec,
    sequences: list[list[int]],
    size: Shape | None,
) -> dict[str, Any]:
    """Return the tensors of a batch in which a sequence has several rows."""
    source, target = _sides(size)
    if spec.causal:
        for row in labels:
            row[:1] = IGNORED_LABEL
    input_ids, _ = _pad(_concatenated(inputs, sequences), spec.pad_token_id, size=source)
    segments, _ = _pad([_segments(inputs, sequence) for sequence in sequences], 0, size=source)
    places = [np.concatenate([np.arange(len(inputs[row])) for row in rows]) for rows in sequences]
    positions, _ = _pad(places, 0, size=source)
    target_segments = segments
    if not spec.causal:
        target_segments, _ = _pad([_segments(labels, sequence) for sequence in sequences], 0, size=target)
    return {
        "input_ids_BS": input_ids,
        "attention_mask_BS": None,
        "labels_BT": _pad(_concatenated(labels, sequences), IGNORED_LABEL, size=target)[0],
        "packing": Packing(segments, target_segments, positions, *_starts(segments, spec.shapes)),
        "weights_BT": None
        if weights is None
        else _pad(_concatenated(weights, sequences), 1, np.float32, size=target)[0],
    }


def _concatenated(rows: Sequence[NDArray[T]], sequences: Sequence[Sequence[int]]) -> list[NDArray[T]]:
    """Concatenate the rows of each sequence."""
    return [np.concatenate([rows[row] for row in sequence]) for sequence in sequences]


def _segments(rows: Rows, sequence: Sequence[int]) -> NDArray[np.integer]:
    """Return for each token the number of its row within the batch, from 1."""
    return np.repeat(np.array(sequence) + 1, [len(rows[row]) for row in sequence])


def _starts(segments_BS: Tensor, shapes: Sequence[Shape]) -> tuple[Tensor, int]:
    """Return where rows, and the padding behind them, start among all tokens, with their number, and the longest.

    With fixed ``shapes``, one of which has a sequence for each row of any micro-batch, both depend on the shape alone,
    as compiled blocks need it: empty rows follow, and the longest may be as long as a sequence.
    """
    begins = torch.ones_like(segments_BS, dtype=torch.bool)
    begins[:, 1:] = segments_BS[:, 1:] != segments_BS[:, :-1]
    starts = torch.cat([begins.flatten().nonzero()[:, 0], torch.tensor([begins.numel()])])
    if not shapes:
        return starts.int(), int(starts.diff().max())
    most = max(sequences for sequences, *_ in shapes) + len(segments_BS) + 1  # rows, padding at ends, the end
    assert len(starts) <= most, "no fixed shape has a sequence for each row"
    return functional.pad(starts, (0, most - len(starts)), value=begins.numel()).int(), segments_BS.shape[1]


def _counted(labels_BT: Tensor, *, causal: bool) -> Tensor:
    """Return which labels count, bool. A causal model predicts position t + 1 at t, so the first label never does."""
    return (labels_BT[:, 1:] if causal else labels_BT) != IGNORED_LABEL


def _sides(size: Shape | None) -> tuple[tuple[int, int] | None, tuple[int, int] | None]:
    """Return sequences and tokens of a fixed shape's source and target side."""
    return (None, None) if size is None else (size[:2], (size[0], size[2]))


def _pad(
    rows: Rows | WeightRows,
    value: int,
    dtype: type = np.int64,
    *,
    left: bool = False,
    size: tuple[int, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return rows as one tensor of ``size``, int64 or float32, and its int64 mask of the same shape.

    ``size`` is (rows, longest row) or larger; None: just that.
    """
    size = size or (len(rows), max(map(len, rows)))
    longest = size[1]
    padded, mask = np.full(size, value, dtype), np.zeros(size, np.int64)
    for position, row in enumerate(rows):
        span = slice(longest - len(row), longest) if left else slice(0, len(row))
        padded[position, span], mask[position, span] = row, 1
    return torch.from_numpy(padded), torch.from_numpy(mask)
