"""Weight gradients computed straight into the lane, for the two modules that hold most parameters.

Autograd allocates a weight's gradient, sums the uses of a tied weight in further tensors (three at once for T5's shared
table), and only then passes it on. Here, the backward of ``nn.Linear`` multiplies straight into the lane
(``mm(out=)``, then ``addmm_``) and that of ``nn.Embedding`` adds only the rows that were looked up. No gradient-sized
temporary exists and nothing is copied; on t5-small's shapes the step's peak fell from 513 to 349 MB above the static
part. Values are those of autograd, up to the order of additions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fullshard.core.comm import add_rows
from fullshard.core.engine.step.hooks import UnitHooks
from fullshard.core.engine.step.param import CREATE_GRAPH_REFUSED, ShardedParam
from fullshard.core.torch_private import in_backward, in_functorch, plain_functions, will_execute
from fullshard.errors import ShardingError


class _Site:
    """A module whose weight is a sharded parameter, with the function that replaces its class's ``forward``."""

    def __init__(self, hooks: UnitHooks, param: ShardedParam, module: nn.Module) -> None:
        self.hooks = hooks
        self.unit = hooks.unit
        self.param = param
        self.module = module
        self.plain = type(module).forward

    def applies(self) -> bool:
        """Return True if this call can bypass autograd: recording, with the full weight in its slot."""
        device = self.param.lane.full.tensor.device.type
        return (
            torch.is_grad_enabled()
            and self.param.trainable
            and self.module._parameters["weight"] is self.param.full
            and not in_functorch()
            and not torch.is_autocast_enabled(device)
        )

    def receive(self, write: Callable[[], None]) -> None:
        """Let ``write`` put the weight's gradient into the lane, if this backward computes it.

        ``torch.autograd.grad(loss, x)`` and ``backward(inputs=[x])`` do not.

        Raises:
            ShardingError: Inside ``backward(create_graph=True)``.
        """
        if torch.is_grad_enabled():
            raise ShardingError(CREATE_GRAPH_REFUSED)
        if will_execute(self.param.accumulate):
            self.hooks.runtime.receive(self.unit, self.param, write)


class LinearSite(_Site):
    """Call of an ``nn.Linear``."""

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        """Return the module's output."""
        dtypes = self.param.lane.dtypes
        if not self.applies() or input.dtype != dtypes.reduce or dtypes.compute != dtypes.reduce:
            return self.plain(self.module, input)
        # Backward reads the weight only for the input's gradient; a recomputation repeats a use counted before.
        reads = input.requires_grad and not in_backward()
        self.param.reads += reads
        with plain_functions():
            return _Linear.apply(input, self.param.full, self.module.bias, self, reads)  # type: ignore[return-value]

    def input_gradient(self, out_gradient: torch.Tensor, *, was_counted: bool) -> torch.Tensor:
        """Return ``out_gradient @ weight``, and free the weight early if this was its last read."""
        runtime, param = self.hooks.runtime, self.param
        runtime.need(self.unit, param)
        with plain_functions():
            result = out_gradient @ param.full
        if was_counted:
            param.reads -= 1
            runtime.read_for_the_last_time(self.unit, param)
        return result

    def write(self, out_gradient: torch.Tensor, x: torch.Tensor) -> None:
        """Add ``out_gradient.T @ x``, (out, in), to the lane."""
        view, empty = self.param.lane.gradient_of(self.param.place)
        if empty:
            torch.mm(out_gradient.t(), x, out=view)
        else:
            view.addmm_(out_gradient.t(), x)


class EmbeddingSite(_Site):
    """Call of a plain ``nn.Embedding``."""

    @property
    def padding_index(self) -> int | None:
        """Index of the row without gradient, or None."""
        return self.module.padding_idx  # type: ignore[return-value]

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        """Return the module's output."""
        if not self.applies():
            return self.plain(self.module, input)
        with plain_functions():
            return _Embedding.apply(input, self.param.full, self)  # type: ignore[return-value]

    def write(self, out_gradient: torch.Tensor, indices: torch.Tensor) -> None:
        """Add the rows of ``out_gradient``, (lookups, width), to the rows of the lane that were looked up."""
        view, empty = self.param.lane.gradient_of(self.param.place)
        if empty:
            view.zero_()
        rows = out_gradient.to(view.dtype)
        if self.padding_index is not None:
            rows = rows.masked_fill(torch.eq(indices, self.padding_index).unsqueeze(1), 0)
        add_rows(view, indices, rows)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        site: LinearSite,
        reads: bool,  # noqa: FBT001 (autograd passes by position)
    ) -> torch.Tensor:
        ctx.site, ctx.reads = site, reads
        ctx.save_for_backward(x)
        if x.dim() <= 2:
            return F.linear(x, weight, bias)
        # Not F.linear: with a bias it returns a view, and in-place changes of a view made here are refused.
        rows = F.linear(x.reshape(-1, x.shape[-1]), weight, bias)
        return torch.ops.aten._unsafe_view(rows, [*x.shape[:-1], weight.shape[0]])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        (x,) = ctx.saved_tensors
        site: LinearSite = ctx.site
        rows = gradient.reshape(-1, gradient.shape[-1])
        # The input's gradient first: the weight's may complete the unit, which then releases its parameters.
        x_gradient = site.input_gradient(gradient, was_counted=ctx.reads) if ctx.needs_input_grad[0] else None
        bias_gradient = rows.sum(0) if ctx.needs_input_grad[2] else None
        site.receive(lambda: site.write(rows, x.reshape(-1, x.shape[-1])))
        return x_gradient, None, bias_gradient, None, None


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, indices: torch.Tensor, weight: torch.Tensor, site: EmbeddingSite) -> torch.Tensor:
        ctx.site = site
        ctx.save_for_backward(indices)
        return F.embedding(indices, weight)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        (indices,) = ctx.saved_tensors
        site: EmbeddingSite = ctx.site
        rows = gradient.reshape(-1, gradient.shape[-1])
        site.receive(lambda: site.write(rows, indices.reshape(-1)))
        return None, None, None
