"""The work of a step: its operators with their arguments, and where collectives start and are waited for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from fullshard.core.comm import Work as CommWork
from fullshard.core.torch_private import operator, tree_leaves

_MOVES_NOTHING = {
    *("aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided"),
    "aten::_unsafe_view",  # a view, although not declared as one
}

IN_PLACE: dict[Any, Any] = {
    torch.ops.aten.index_put.default: operator("_index_put_impl_") or torch.ops.aten.index_put.default,
    torch.ops.aten.index_add.default: torch.ops.aten.index_add_.default,
    torch.ops.aten.scatter_add.default: torch.ops.aten.scatter_add_.default,
    torch.ops.aten.scatter.src: torch.ops.aten.scatter_.src,
}
"""In-place operations of autograd's indexing formulas on fresh zeros, except while a dispatch mode is on, as here."""

_QUANTISED_PRODUCT = "bitsandbytes::gemm_4bit"
"""Operator of bitsandbytes: input, codes, the weight's shape (outputs, inputs). By name: it may not be installed."""


@dataclass(frozen=True)
class Operator:
    """An operator with the shapes of its arguments; calls with equal shapes are one."""

    key: str  # its name and its arguments' dtypes and shapes
    flops: int  # of products and attention, a multiply-add as two; 0 for others
    nbytes: int  # bytes that it must read and write at least
    dtype: torch.dtype | None  # of its first floating-point tensor; None without one


@dataclass(frozen=True)
class Computed:
    """An operator runs on the compute stream."""

    operator: str  # its key
    phase: str


@dataclass(frozen=True)
class Issued:
    """A collective that starts behind everything computed so far."""

    number: int
    kind: str
    sent_bytes: int  # by this rank
    ranks: range  # the world's ranks that take part


@dataclass(frozen=True)
class Awaited:
    """A wait of the compute stream for a collective."""

    number: int


Event = Computed | Issued | Awaited


class Work:
    """The work of a step, in order."""

    def __init__(self, phase: Callable[[], str]) -> None:
        """Begin empty; ``phase`` returns the current phase of a step."""
        self.events: list[Event] = []
        self.operators: dict[str, Operator] = {}
        self._phase = phase
        self._collectives = 0

    def compute(self, func: Any, args: Any, kwargs: Any, result: Any) -> str:
        """Record an operator that was called, and return its key; views count too, as calls that move nothing."""
        key = _key(IN_PLACE.get(func, func), args, kwargs)
        if key not in self.operators:
            flops, nbytes = _flops(func, args, kwargs, result), _bytes(func, args, kwargs, result)
            self.operators[key] = Operator(key, flops, nbytes, _dtype(args, kwargs))
        self.events.append(Computed(key, self._phase()))
        return key

    def issue(self, kind: str, sent_bytes: int, ranks: range) -> CommWork:
        """Record a collective; the result records when it is waited for."""
        number, self._collectives = self._collectives, self._collectives + 1
        self.events.append(Issued(number, kind, sent_bytes, ranks))
        return _Noting(self, number)


class _Noting:
    """A collective whose wait is recorded."""

    def __init__(self, work: Work, number: int) -> None:
        self._work, self._number = work, number

    def wait(self) -> None:
        """See :meth:`Comm.Work.wait`."""
        self._work.events.append(Awaited(self._number))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))


def _key(func: Any, args: Any, kwargs: Any) -> str:
    given = ", ".join(f"{tensor.dtype}{list(tensor.shape)}{tensor.stride()}" for tensor in _tensors((args, kwargs)))
    return f"{func}({given})".replace("torch.", "")


def _dtype(args: Any, kwargs: Any) -> torch.dtype | None:
    return next((tensor.dtype for tensor in _tensors((args, kwargs)) if tensor.is_floating_point()), None)


def _flops(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Return the floating-point operations of a product, by torch's own formulas."""
    if func._schema.name == _QUANTISED_PRODUCT:
        return 2 * args[0].numel() * args[2][0]
    formula = flop_registry.get(func._overloadpacket, _CPU_ATTENTION.get(func._schema.name))
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=result))


def _attention(*args: Any, out_val: Any, **kwargs: Any) -> int:
    query, key, value = args[:3]
    return sdpa_flop_count(query.shape, *_repeated(query, key, value))


def _attention_backward(*args: Any, out_val: Any, **kwargs: Any) -> int:
    grad, query, key, value = args[:4]
    return sdpa_backward_flop_count(grad.shape, query.shape, *_repeated(query, key, value))


def _repeated(query: torch.Tensor, *shared: torch.Tensor) -> list[tuple[int, ...]]:
    """Return the shapes of keys and values with the query's heads: torch 2.11's formulas refuse fewer."""
    return [(*query.shape[:2], *tensor.shape[2:]) for tensor in shared]


_CPU_ATTENTION: dict[str, Callable[..., int]] = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": _attention,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
}
"""Formulas that torch's table leaves out, by name: a later torch may lack the operators."""


def _bytes(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Return the bytes that an operator reads and writes if each element of each tensor moves once."""
    if func._schema.name in _MOVES_NOTHING or is_view(func):
        return 0
    read = sum(_held(tensor) for tensor in _tensors((args, kwargs)))
    return read + sum(_held(tensor) for tensor in _tensors(result))


def _held(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's elements; those of an expanded dimension are one."""
    elements = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        elements *= size if stride or not size else 1
    return elements * tensor.element_size()


def is_view(func: Any) -> bool:
    """Return whether an operator returns a view of its argument."""
    aliased = [one.alias_info for one in func._schema.returns if one.alias_info is not None]
    return bool(aliased) and not any(one.is_write for one in aliased)
