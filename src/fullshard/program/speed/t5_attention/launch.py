"""Starts the kernels on real tensors: buffers, buckets of distances, and sizes of blocks by card."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fullshard.core.transformers_private import t5_bucket

SUMMED_QUERIES = 64
"""Queries whose gradients by bucket are one row of sums, on every card: a plan counts the rows without one."""

_LEAST_WIDTH = 16
"""Elements of a head for a GPU's products; shorter heads are filled up with zeros."""

_OLDEST = 8
"""Major version of the compute capability from which on Triton compiles."""


class Attention(NamedTuple):
    """What attention is computed from. B rows, H heads, Q queries, K keys, heads of D; any strides.

    Attributes:
        query: (B, H, Q, D), float32, bfloat16 or float16.
        key: (B, H, K, D).
        value: (B, H, K, D).
        table: float32, (H, buckets): the trained bias of each bucket of distances; None for none.
        segments: int32, (B, 1, 1, K) or (B, 1, 1, Q + K): numbers from 0 on of the keys, or first of the queries and
            then of the keys. A query sees the keys of its own number; where it has none, the keys of number 1.
        seed: int64, (1,), which together with row, head, query and key says what dropout drops; None without dropout.
        causal: Whether a query sees only keys up to its own place.
        bidirectional: Whether the keys behind a query have buckets of their own.
        most: The distance from which on, at the latest, all are in one bucket.
        scale: What scores are multiplied by before the bias.
        dropout: The share of weights that is dropped, below 1.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    table: Tensor | None
    segments: Tensor | None
    seed: Tensor | None
    causal: bool
    bidirectional: bool
    most: int
    scale: float
    dropout: float


class Blocks(NamedTuple):
    """Queries and keys that a program has at once, its warps, and the loads that it has under way."""

    queries: int
    keys: int
    warps: int
    stages: int


class _Buckets(NamedTuple):
    of_distance: Tensor  # int32, (2 reach + 1,)
    reach: int  # a distance at least this large, either way, is in the last bucket of its side


def unavailable(device: torch.device) -> str | None:
    """Return why the kernels cannot run on a device, with the remedy; None if they can. Any process."""
    if importlib.util.find_spec("triton") is None:
        return "its kernel needs triton, which torch for CUDA brings along and is not installed (pip install triton)"
    if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= _OLDEST:
        return None
    if importlib.import_module("triton").knobs.runtime.interpret:
        return None
    if device.type != "cuda":
        return f"its kernel runs on CUDA devices, and this run computes on {device.type}"
    name, found = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    return f"Triton compiles for compute capability {_OLDEST}.0 or newer, and {name} has {found[0]}.{found[1]}"


@functools.cache
def _buckets(count: int, most: int, device: torch.device, *, bidirectional: bool) -> _Buckets:
    """Return the buckets of distances from -reach to reach, computed on the device, as the model would.

    Waits for the device, the first time in a process.
    """
    distances = torch.arange(-most, most + 1, device=device)
    found = t5_bucket()(distances, bidirectional=bidirectional, num_buckets=count, max_distance=most).int()
    before, behind = found[: most + 1].flip(0).tolist(), found[most:].tolist()
    reach = max(1, *(next((d for d in range(most, 0, -1) if one[d - 1] != one[most]), 1) for one in (before, behind)))
    return _Buckets(found[most - reach : most + reach + 1].contiguous(), reach)


def forward(given: Attention) -> tuple[Tensor, Tensor]:
    """Return the output, (B, H, Q, D) in the memory of (B, Q, H, D), and the scores' log-sum-exp, base 2: (B, H, Q)."""
    query = given.query
    rows, heads, queries, width = query.shape
    out = query.new_empty(rows, queries, heads, width)
    lse = query.new_empty((rows, heads, queries), dtype=torch.float32)
    blocks = blocks_of(query, "forward")
    _start("forward", rows * heads * -(-queries // blocks.queries), blocks, given, OUT=out, LSE=lse)
    return out.transpose(1, 2), lse


def backward(
    given: Attention, grad: Tensor, out: Tensor, lse: Tensor, *, summed: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value, in the memory of (B, T, H, D), and the sums by bucket.

    Sums are float32, :func:`sums_shape`; empty unless ``summed``.
    """
    rows, heads, queries, _ = given.query.shape
    keys, grad = given.key.shape[2], _with_rows(grad)
    dq, dk, dv = (one.new_empty(one.transpose(1, 2).shape) for one in (given.query, given.key, given.value))
    delta, sums = torch.empty_like(lse), lse.new_empty(sums_shape(given.query, given.table if summed else None))
    shared: dict[str, Any] = {"LSE": lse, "DO": grad, "DELTA": delta, **_strides("do", grad)}
    of_q, of_k = blocks_of(given.query, "backward_q"), blocks_of(given.query, "backward_k")
    extra = {"OUT": out.transpose(1, 2), "DQ": dq, "SUMS": sums, "BUCKETS": max(sums.shape[-1], 1), "SUMMED": summed}
    _start("backward_q", rows * heads * -(-queries // of_q.queries), of_q, given, **extra, **shared)
    _start("backward_k", rows * heads * -(-keys // of_k.keys), of_k, given, DK=dk, DV=dv, **shared)
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2), sums


def sums_shape(query: Tensor, table: Tensor | None) -> tuple[int, int, int, int]:
    """Return (B, H, blocks of 64 queries, buckets rounded up to a power of two), the shape of the sums by bucket."""
    rows, heads, queries, _ = query.shape
    return rows, heads, -(-queries // SUMMED_QUERIES), 0 if table is None else _power_of_two(table.shape[1])


def _start(name: str, programs: int, blocks: Blocks, given: Attention, **more: Any) -> None:
    query, key, value = (_with_rows(one) for one in (given.query, given.key, given.value))
    _, heads, queries, width = query.shape
    keys, segments, table = key.shape[2], given.segments, given.table
    if not programs:
        return
    bias, buckets = query, _Buckets(query, 0)  # pointers that are not read
    if table is not None:
        buckets = _buckets(table.shape[1], given.most, query.device, bidirectional=given.bidirectional)
        bias = table.index_select(1, buckets.of_distance)
    of_queries = segments is not None and segments.shape[-1] != keys
    numbers = query if segments is None else segments
    more |= _strides("q", query) | _strides("k", key) | _strides("v", value)
    if name == "backward_q":
        more["BUCKET"] = buckets.of_distance
    kernel = getattr(importlib.import_module("fullshard.program.speed.t5_attention.kernels"), name)
    with torch.cuda.device_of(query):
        kernel[(programs,)](
            Q=query,
            K=key,
            V=value,
            BIAS=bias,
            SEGMENTS_Q=numbers,
            SEGMENTS_K=numbers[..., queries:] if of_queries else numbers,
            SEED=query if given.seed is None else given.seed,
            heads=heads,
            queries=queries,
            keys=keys,
            scale=given.scale,
            reach=buckets.reach,
            drop=round(given.dropout * (1 << 24)),
            grow=1 / (1 - given.dropout),
            seg_q_row=numbers.stride(0),
            seg_k_row=numbers.stride(0),
            D=width,
            BD=max(_power_of_two(width), _LEAST_WIDTH),
            BM=blocks.queries,
            BN=blocks.keys,
            HAS_BIAS=table is not None,
            HAS_SEG_Q=of_queries,
            HAS_SEG=segments is not None,
            CAUSAL=given.causal,
            DROP=given.dropout > 0,
            PRECISION=_precision(query),
            num_warps=blocks.warps,
            num_stages=blocks.stages,
            **more,
        )


def _with_rows(tensor: Tensor) -> Tensor:
    """Return a tensor whose last axis is contiguous."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _strides(name: str, tensor: Tensor) -> dict[str, int]:
    return dict(zip((f"{name}_row", f"{name}_head", f"{name}_place"), tensor.stride()[:3], strict=True))


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _precision(query: Tensor) -> str:
    """Return how float32 is multiplied: as torch's own products are set to."""
    if not query.is_cuda:
        return "wide"
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"


_LARGE = {
    "forward": {1: Blocks(128, 64, 4, 3), 2: Blocks(128, 64, 8, 2), 4: Blocks(64, 32, 4, 2)},
    "backward_q": {1: Blocks(64, 64, 4, 2), 2: Blocks(64, 64, 8, 2), 4: Blocks(64, 32, 8, 1)},
    "backward_k": {1: Blocks(64, 64, 4, 2), 2: Blocks(64, 64, 8, 2), 4: Blocks(32, 64, 8, 1)},
}
_SMALL = {
    "forward": {1: Blocks(64, 64, 4, 2), 2: Blocks(64, 32, 4, 2), 4: Blocks(32, 32, 4, 1)},
    "backward_q": {1: Blocks(64, 32, 4, 2), 2: Blocks(64, 32, 8, 1), 4: Blocks(64, 16, 8, 1)},
    "backward_k": {1: Blocks(32, 64, 4, 2), 2: Blocks(32, 64, 8, 1), 4: Blocks(16, 32, 8, 1)},
}
CARDS = {160 << 10: _LARGE, 0: _SMALL}
"""Blocks by the least shared memory of a program, by kernel, and by the bytes of a head over 128, at most.

H100 and H200 have 227 KiB, A100 163, and L4, A10G and L40S 99. Compiled for each without a card; not yet timed on one.
"""


def blocks_of(query: Tensor, kernel: str) -> Blocks:
    """Return the blocks of a kernel for these queries."""
    shared = 0
    if query.is_cuda:
        shared = torch.cuda.get_device_properties(query.device).shared_memory_per_block_optin
    by_kernel = next(found for least, found in CARDS.items() if shared >= least)
    width = max(_power_of_two(query.shape[-1]), _LEAST_WIDTH) * query.itemsize
    sizes = by_kernel[kernel]
    return next((found for times, found in sizes.items() if width <= 128 * times), sizes[max(sizes)])
