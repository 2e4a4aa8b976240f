"""A linear layer whose frozen weight is stored as codes and scales; dequantised for each use and freed after it.

On a CPU the memory for one large dequantised weight is kept from layer to layer.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from itertools import islice
from math import prod
from typing import Any, ClassVar

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from fullshard.core.comm import device_of
from fullshard.core.quantized.formats import Format, Shape
from fullshard.core.torch_private import plain_subclass, tree_leaves, tree_map
from fullshard.errors import ShardingError

RECYCLED_BELOW = 32 << 20
"""Smallest allocation that glibc returns to the system when freed, so that the next one needs new pages; in bytes."""


class _Kept(threading.local):
    """The memory of one thread: another one may run the same model at the same time."""

    memory: torch.Tensor | None = None


class Workspace:
    """Memory that the products of a model's quantised layers dequantise a large weight into, one after the other.

    Each thread that runs the model has its own.

    A new 64 MiB weight takes 16,384 page faults: 40 to 53 ms on two busy cores, into kept memory 7 to 9 ms. glibc
    recycles the memory of smaller ones, and on GPUs torch recycles all.

    Attributes:
        numel: Weights of the largest layer.
        keeps: False while a GPU's step is planned, on a CPU.
        most_parts: Parts of a weight that are dequantised, all if None. A plan of memory needs two: one is held while
            the next is made, and none is larger.
    """

    def __init__(self, numel: int = 0) -> None:
        """Start without memory."""
        self.numel = numel
        self.keeps = True
        self.most_parts: int | None = None
        self._kept = _Kept()

    def __reduce__(self) -> Any:
        """Copy and pickle it without its memory."""
        return Workspace, (self.numel,)

    def weight(
        self,
        format: Format,
        stored: tuple[torch.Tensor, torch.Tensor],
        shape: Shape,
        own: torch.dtype,
        dtype: torch.dtype,
    ) -> torch.Tensor | None:
        """Return a large weight in ``dtype``, valid until the thread's next call; None for a small one or on a GPU.

        Args:
            format: The format.
            stored: Codes and scales.
            shape: That of the weight.
            own: The weight's own dtype, to which its values are rounded first if the format does so.
            dtype: Dtype of the result.
        """
        codes, scales = stored
        numel = prod(shape)
        if not self.keeps or codes.device.type != "cpu" or numel * dtype.itemsize < RECYCLED_BELOW:
            return None
        kept = self._kept.memory
        if kept is None or kept.dtype != dtype or kept.numel() < numel:
            self._kept.memory = None  # freed before new memory is allocated
            with torch.inference_mode(mode=False):  # training after an evaluation writes to it
                self._kept.memory = kept = device_of(codes.device).empty(max(numel, self.numel), dtype)
        start = 0
        for part in islice(format.parts(codes, scales, shape, own, dtype), self.most_parts):
            kept[start : start + part.numel()].copy_(part)
            start += part.numel()
        return kept[:numel].view(shape)


@dataclass(frozen=True)
class Held:
    """What a quantised layer holds in place of its weight."""

    format: Format
    codes: torch.Tensor  # bytes, ``format.codes_shape``, perhaps on the meta device
    scales: torch.Tensor  # bytes, (``format.scales_bytes``,)
    dtype: torch.dtype  # the weight's own
    compute_dtype: torch.dtype | None


class QuantizedLinear(nn.Linear):
    """An ``nn.Linear`` with a quantised, frozen weight: two parameters of bytes instead of ``weight``.

    A model's layers are turned into it in place (:class:`fullshard.quantized.QuantizedLayers`), so that hooks on them
    and references to them stay. The engine shards the two parameters like any frozen ones.

    Attributes:
        format: How codes and scales are read.
        before: The weight before it was quantised, without memory: its shape and dtype.
        compute_dtype: Dtype that inputs are cast to; None: their own.
        workspace: The model's memory for a large dequantised weight.
    """

    format: Format
    before: torch.Tensor
    compute_dtype: torch.dtype | None
    workspace: Workspace

    @classmethod
    def take_over(cls, layer: nn.Linear, held: Held) -> None:
        """Turn a linear layer into a quantised one, in place; its bias is kept."""
        format, bias = held.format, layer._parameters.get("bias")
        layer.__class__ = cls
        layer._parameters = {
            format.codes: nn.Parameter(held.codes, requires_grad=False),
            format.scales: nn.Parameter(held.scales, requires_grad=False),
            "bias": bias,
        }
        # bitsandbytes keeps the full scales there, and after a forward in 8 bits the full codes.
        for kept in ("quant_state", "state"):
            vars(layer).pop(kept, None)
        before = torch.empty(layer.out_features, layer.in_features, dtype=held.dtype, device="meta")
        workspace = Workspace(before.numel())
        vars(layer).update(format=format, before=before, compute_dtype=held.compute_dtype, workspace=workspace)
        if cls._uncompiled is QuantizedLinear._compute:
            # A compiled block leaves its graph here: the compiler does not know that the unit gathers codes and scales.
            cls._uncompiled = torch.compiler.disable(cls._compute)  # created here, because it imports the compiler

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the weight: (out_features, in_features)."""
        return self.out_features, self.in_features

    @property
    def weight_dtype(self) -> torch.dtype:
        """Dtype of the weight before it was quantised, and of ``weight``."""
        return self.before.dtype

    @property
    def stored(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes and scales as they are registered: complete while the layer's unit is gathered."""
        held: dict[str, Any] = self._parameters
        return held[self.format.codes], held[self.format.scales]

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute.

        Raises:
            ShardingError: The attribute is ``weight``.
        """
        if name == "weight":
            raise ShardingError(f"layer.weight = … would replace {_LOST}")
        super().__setattr__(name, value)

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        """The weight as a tensor that is dequantised when its values are read; its shape and dtype are free."""
        return _Weight(self)

    def dequantised(self) -> torch.Tensor:
        """Return the weight, (out_features, in_features), in its own dtype, while the layer's unit is gathered.

        Raises:
            ShardingError: It is not gathered.
        """
        codes, scales = self.stored
        full = self.format.codes_shape(self.shape), (self.format.scales_bytes(self.shape),)
        if (tuple(codes.shape), tuple(scales.shape)) != full:
            raise ShardingError(
                f"A quantised weight {self.shape} is read where this rank has a part of it: codes {tuple(codes.shape)} "
                f"of {full[0]} bytes, scales {tuple(scales.shape)} of {full[1]}. Read it inside "
                "`with fullshard.unsharded(model):`."
            )
        return self.format.dequantise(codes.detach(), scales.detach(), self.shape, self.weight_dtype)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return ``input @ weight.T + bias`` in the input's dtype; (..., in_features) to (..., out_features)."""
        return self._uncompiled(input) if torch.compiler.is_compiling() else self._compute(input)

    def _compute(self, input: torch.Tensor) -> torch.Tensor:
        x = input if self.compute_dtype is None else input.to(self.compute_dtype)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return _Linear.apply(x, *self.stored, bias, self).to(input.dtype)  # type: ignore[union-attr]

    _uncompiled: ClassVar[Any] = _compute

    def extra_repr(self) -> str:
        """Describe the layer in ``repr(model)``."""
        return f"in_features={self.in_features}, out_features={self.out_features}, format={self.format.type}"


class _Linear(torch.autograd.Function):
    """Dequantises in forward and again in backward: between them codes and scales are kept, which the unit owns."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        codes: torch.Tensor,
        scales: torch.Tensor,
        bias: torch.Tensor | None,
        layer: QuantizedLinear,
    ) -> torch.Tensor:
        ctx.save_for_backward(codes, scales)
        ctx.layer, ctx.dtype = layer, x.dtype
        weight = layer.workspace.weight(layer.format, (codes, scales), layer.shape, x.dtype, x.dtype)
        if weight is not None:
            return torch.nn.functional.linear(x, weight, bias)
        return layer.format.linear(x, codes, scales, layer.shape, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        codes, scales = ctx.saved_tensors
        layer: QuantizedLinear = ctx.layer
        x_gradient = bias_gradient = None
        if ctx.needs_input_grad[0]:
            stored, dtypes = (codes, scales), (layer.weight_dtype, gradient.dtype)
            weight = layer.workspace.weight(layer.format, stored, layer.shape, *dtypes)
            if weight is None:
                weight = layer.format.weight_in_backward(*stored, layer.shape, *dtypes)
            x_gradient = torch.matmul(gradient, weight).to(ctx.dtype)
        if ctx.needs_input_grad[3]:
            bias_gradient = gradient.reshape(-1, gradient.shape[-1]).sum(0)
        return x_gradient, None, None, bias_gradient, None


_LOST = (
    "a quantised weight, which is frozen: what is written would be lost. Change a copy (weight.clone()). To merge an "
    "adapter, run `fullshard export RUN --merge`, or merge the saved adapter into the unquantised base with peft."
)


class _Frozen(torch.Tensor):
    """A quantised layer's read-only view of its weight: operations read the values, and writes are refused."""

    __torch_function__ = plain_subclass  # type: ignore[assignment]

    def values(self) -> torch.Tensor:
        """Return the values as a plain tensor."""
        raise NotImplementedError

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func`` on the values.

        Raises:
            ShardingError: It would write to them, or the layer's unit is not gathered.
        """
        kwargs = kwargs or {}
        for number, given in enumerate(func._schema.arguments):
            value = args[number] if number < len(args) else kwargs.get(given.name)
            written = given.alias_info is not None and given.alias_info.is_write
            if written and any(isinstance(one, _Frozen) for one in tree_leaves(value)):
                raise ShardingError(f"{func} would write to {_LOST}")
        result = func(*tree_map(_read, args), **tree_map(_read, kwargs))
        # A view, such as weight.data: writing through it would change values that are never read again.
        views = any(given.alias_info is not None and not given.alias_info.is_write for given in func._schema.returns)
        return tree_map(_View, result) if views else result

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        """The values, which cannot be written to."""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        raise ShardingError(f"weight.data = … would write to {_LOST}")

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        """False: it is frozen."""
        return False

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> torch.Tensor:  # noqa: FBT001, FBT002 (torch's)
        """Return the weight, if it stays frozen.

        Raises:
            ShardingError: It would require gradients.
        """
        if requires_grad:
            raise ShardingError(
                "A quantised weight is frozen and cannot require gradients. Train an adapter, or do not quantise the "
                "layer (Quantize(skip=…), model.quantization.skip)."
            )
        return self

    def numpy(self, *, force: bool = False) -> Any:
        """Return the values as an array, which cannot be written to."""
        array = self.values().numpy(force=force)
        array.flags.writeable = False
        return array

    def tolist(self) -> Any:
        """Return the values as numbers."""
        return self.values().tolist()

    def __getattr__(self, name: str) -> Any:
        """Raise for attributes that only bitsandbytes' weights have, which peft's merge asks for.

        Raises:
            AttributeError: Always.
        """
        raise AttributeError(f"A tensor has no attribute {name!r}; it is {_LOST}")

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """Return a copy of the values."""
        return self.values().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the values, as a plain tensor."""
        return self.values().clone().__reduce_ex__(protocol)


class _Weight(_Frozen):
    """The weight of a quantised layer: a tensor of known shape and dtype that dequantises for each operation.

    For code that asks for a weight's dtype, as T5 does in each feed-forward layer, or reads it, as DoRA does.
    """

    layer: QuantizedLinear

    @staticmethod
    def __new__(cls: type[_Weight], layer: QuantizedLinear) -> _Weight:
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, layer.shape, dtype=layer.weight_dtype, device=layer.stored[0].device
        )
        made.layer = layer
        return made

    def values(self) -> torch.Tensor:
        """Return the dequantised weight."""
        return self.layer.dequantised()


class _View(_Frozen):
    """Dequantised values that a view of a weight shares: they have memory, and are read like any tensor."""

    plain: torch.Tensor

    @staticmethod
    def __new__(cls: type[_View], values: torch.Tensor) -> _View:
        made = torch.Tensor._make_subclass(cls, values)
        made.plain = values
        return made

    def values(self) -> torch.Tensor:
        """Return the values."""
        return self.plain


def _read(value: Any) -> Any:
    return value.values() if isinstance(value, _Frozen) else value
