"""Search and cast of tensors in the inputs and outputs of modules; the dtypes of a parameter."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fullshard.core.policy import MixedPrecision


def torch_dtype(name: str | None) -> torch.dtype | None:
    """Return the ``torch.dtype`` of a policy's dtype name."""
    return None if name is None else getattr(torch, name)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield every tensor in nested tuples, lists, dicts and dataclasses, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name))


def map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return the same structure with ``change`` applied to every tensor; unchanged parts are the same objects."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        changed = {key: map_tensors(item, change) for key, item in value.items()}
        if all(changed[key] is value[key] for key in value):
            return value
        if type(value) is dict:
            return changed
        if dataclasses.is_dataclass(value):  # such as a Hugging Face ModelOutput
            return type(value)(**changed)
        copied = copy.copy(value)  # keeps a defaultdict's factory
        copied.update(changed)
        return copied
    if isinstance(value, (tuple, list)):
        items = [map_tensors(item, change) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
        changed = {name: map_tensors(item, change) for name, item in fields.items()}
        return value if all(changed[n] is fields[n] for n in fields) else dataclasses.replace(value, **changed)
    return value


def markable_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield tensors that require grad, at the top and in nested tuples: replaceable without copying a list."""
    if isinstance(value, torch.Tensor):
        if value.requires_grad:
            yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from markable_tensors(item)


def replace_markable(value: Any, replacement: dict[int, torch.Tensor]) -> Any:
    """Return the same value with the tensors of :func:`markable_tensors` replaced, by id.

    Not a closure that calls itself: that is a reference cycle, which would keep activations until a garbage collection.
    """
    if isinstance(value, torch.Tensor):
        return replacement.get(id(value), value)
    if isinstance(value, tuple):
        items = [replace_markable(item, replacement) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return value


def cast_floats(value: Any, name: str | None) -> Any:
    """Cast every floating tensor in ``value`` to the named dtype; None casts nothing."""
    dtype = torch_dtype(name)
    if dtype is None:
        return value
    return map_tensors(value, lambda t: t.to(dtype) if t.is_floating_point() and t.dtype != dtype else t)


@dataclasses.dataclass(frozen=True)
class Dtypes:
    """The dtypes of one parameter.

    Attributes:
        master: Dtype of the parameter before sharding.
        shard: Dtype of the shard: the master dtype, or the compute dtype of a frozen parameter, which nothing updates,
            unless the policy keeps it.
        compute: Dtype of the gathered parameter and of the computation.
        reduce: Dtype in which the unsharded gradient is collected and sent.
        reduce_sum: Dtype in which gradients of different ranks are summed.
        grad: Dtype of the shard's gradient; None: that of the shard.
    """

    master: torch.dtype
    shard: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype
    reduce_sum: torch.dtype
    grad: torch.dtype | None = None


def dtypes_of(policy: MixedPrecision, param: torch.Tensor, *, kept: bool) -> Dtypes:
    """Return the dtypes of ``param``; ``kept``: its module computes in float32 whatever the policy's compute dtype."""
    kept = kept and policy.param is not None
    wanted = torch.float32 if kept else torch_dtype(policy.param)
    compute = wanted if wanted is not None and param.is_floating_point() else param.dtype
    reduce = torch_dtype(policy.reduce) or param.dtype
    reduce_sum = torch_dtype(policy.reduce_sum) or reduce
    if kept:
        reduce, reduce_sum = (torch.promote_types(one, torch.float32) for one in (reduce, reduce_sum))
    return Dtypes(
        master=param.dtype,
        shard=param.dtype if param.requires_grad or policy.keep_frozen else compute,
        compute=compute,
        reduce=reduce,
        reduce_sum=reduce_sum,
        grad=reduce_sum if policy.keep_low_precision_grads else None,
    )
