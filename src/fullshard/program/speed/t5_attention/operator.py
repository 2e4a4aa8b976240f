"""T5's attention as an operator of torch: compiled blocks call it as it is, and plans count what it returns.

The kernels are imported when it first computes. Shapes need neither them nor triton.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula, sdpa_backward_flop_count, sdpa_flop_count

from fullshard.errors import InvariantError
from fullshard.program.speed.t5_attention import launch
from fullshard.program.speed.t5_attention.launch import Attention

_GIVEN = (
    "Tensor query, Tensor key, Tensor value, Tensor? table, Tensor? segments, Tensor? seed, bool causal, "
    "bool bidirectional, int most, float scale, float dropout"
)
"""The fields of :class:`Attention`."""


@torch.library.custom_op("fullshard::t5_attention", mutates_args=(), schema=f"({_GIVEN}) -> (Tensor, Tensor)")
def _forward(*given: Any) -> tuple[Tensor, Tensor]:
    return launch.forward(Attention(*given))


@_forward.register_fake
def _(query: Tensor, key: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    rows, heads, queries, width = query.shape
    lse = query.new_empty((rows, heads, queries), dtype=torch.float32)
    return query.new_empty(rows, queries, heads, width).transpose(1, 2), lse


_MORE = "Tensor gradient, Tensor output, Tensor log_sum_exp, bool summed"


@torch.library.custom_op(
    "fullshard::t5_attention_backward",
    mutates_args=(),
    schema=f"({_GIVEN}, {_MORE}) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _backward(*given: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *attention, gradient, output, log_sum_exp, summed = given
    return launch.backward(Attention(*attention), gradient, output, log_sum_exp, summed=summed)


@_backward.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, table: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    gradients = (one.new_empty(one.transpose(1, 2).shape).transpose(1, 2) for one in (query, key, value))
    sums = launch.sums_shape(query, table if rest[-1] else None)
    return *gradients, query.new_empty(sums, dtype=torch.float32)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    given = Attention(*inputs)
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*given[:6], *output)
    ctx.options = given[6:]


def _gradients(ctx: Any, gradient: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    *tensors, output, log_sum_exp = ctx.saved_tensors
    summed = ctx.needs_input_grad[3]
    *gradients, sums = _backward(*tensors, *ctx.options, gradient, output, log_sum_exp, summed)
    # In an order of torch's own, which is the same in each run: no program adds to another's sums.
    of_table = sums.sum((0, 2))[:, : tensors[3].shape[1]] if summed else None
    return *gradients, of_table, *[None] * (len(Attention._fields) - 4)


_forward.register_autograd(_gradients, setup_context=_keep)


def t5_attention(given: Attention) -> Tensor:
    """Attend as T5 does, without a tensor of all pairs of a query and a key; any rank.

    Differentiable by ``query``, ``key``, ``value`` and ``table``, once. All but ``table`` have one dtype.

    Returns:
        (B, H, Q, D) in the memory of (B, Q, H, D), in the queries' dtype; 0 where a query sees no key.
    """
    keys, segments = given.key.shape[2], given.segments
    if segments is not None and (
        segments.dtype != torch.int32 or segments.shape[1:] not in ((1, 1, keys), (1, 1, given.query.shape[2] + keys))
    ):
        raise InvariantError(
            f"segments are int32, (B, 1, 1, {keys}) or (B, 1, 1, {given.query.shape[2] + keys}); got {segments.dtype}, "
            f"{tuple(segments.shape)}"
        )
    return _forward(*given)[0]


@register_flop_formula(torch.ops.fullshard.t5_attention)
def _(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return sdpa_flop_count(query, key, value)


@register_flop_formula(torch.ops.fullshard.t5_attention_backward)
def _(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return sdpa_backward_flop_count(query, query, key, value)
