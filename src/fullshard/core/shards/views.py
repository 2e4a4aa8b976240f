"""Rules of functions about shape: views and indices after which each element's place is known."""

from __future__ import annotations

from math import prod
from typing import Any

import torch

from fullshard.core.shards.cut import Cut, joined
from fullshard.core.shards.elementwise import rows_of_full
from fullshard.core.shards.shard import Shard, as_shard, refusal

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


def view(func: Any, args: Args, kwargs: Kwargs) -> torch.Tensor:
    """Compute ``view`` and ``reshape`` to one dimension, to another shard's shape, or with the rows as they are.

    Sizes may be those of the full tensor or of the rows here.
    """
    value, sizes = args[0], args[1:] or tuple(kwargs.values())
    if sizes and isinstance(sizes[0], torch.Tensor):
        return _view_as(func, value, sizes[0])
    if not isinstance(value, Shard) or (sizes and isinstance(sizes[0], torch.dtype)):
        raise refusal(func.__name__, args)
    sizes = tuple(sizes[0]) if sizes and isinstance(sizes[0], (tuple, list)) else tuple(sizes)
    cut, full = value.cut, value.cut.full_shape(value)
    numel = value.numel() if full is None else prod(full)
    wanted = _resolved(sizes, numel)
    if full is not None and sizes == full and (not full or not cut.whole_rows):
        return as_shard(value.reshape(value.shape), cut)
    if wanted in ((numel,), (value.numel(),)):
        return as_shard(value.reshape(-1), cut.flat(value))
    if sizes == tuple(value.shape):
        return as_shard(value.reshape(sizes), cut)
    if full and cut.whole_rows:
        for rows, inner in ((full[0], wanted[1:]), (value.shape[0], _resolved(sizes, value.numel())[1:])):
            if rows in (wanted[0], sizes[0]) and prod(inner) == prod(full[1:]):
                return as_shard(value.reshape(value.shape[0], *inner), cut)
    raise refusal(f"{func.__name__} to {sizes}", args)


def _view_as(func: Any, value: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Compute ``view_as`` and ``reshape_as``: to a shape of the same elements here and on every rank."""
    if not isinstance(value, Shard):
        if value.shape == other.shape:
            return value.view(other.shape)
        raise refusal(func.__name__, (other,))
    if not isinstance(other, Shard):
        if value.shape == other.shape:
            return as_shard(value.view(other.shape), value.cut)
        raise refusal(func.__name__, (value,))
    if value.cut.key is None or value.cut.flat(value).key != other.cut.flat(other).key:
        raise refusal(func.__name__, (value,))
    return as_shard(value.reshape(other.shape), other.cut)


def _resolved(sizes: tuple[int, ...], numel: int) -> tuple[int, ...]:
    """Return ``sizes`` with -1 replaced."""
    known = prod(n for n in sizes if n != -1)
    return tuple(numel // known if n == -1 and known else n for n in sizes)


def flatten(func: Any, args: Args, kwargs: Kwargs) -> torch.Tensor:
    """Compute ``flatten`` and ``ravel``, from dimension 0 to the last, or of later dimensions only."""
    value = args[0]
    start = kwargs.get("start_dim", args[1] if len(args) > 1 else 0) % max(1, value.dim())
    end = kwargs.get("end_dim", args[2] if len(args) > 2 else -1) % max(1, value.dim())
    result = func(*args, **kwargs)
    if (start > 0 and value.cut.whole_rows) or (start == end and value.cut.shape != ()):
        return as_shard(result, value.cut)
    if result.dim() != 1 or end != max(1, value.dim()) - 1:
        raise refusal(func.__name__, args)
    cut = value.cut.flat(value)
    return as_shard(value.view(-1) if result is value else result, cut)  # a view, to keep the argument's own cut


def unsqueeze(func: Any, args: Args, kwargs: Kwargs) -> torch.Tensor:
    """Compute ``unsqueeze`` of a dimension after the rows; a scalar has none, on any rank."""
    value, dim = args[0], kwargs.get("dim", args[1] if len(args) > 1 else 0)
    if not value.cut.shape or not value.cut.whole_rows or dim % (value.dim() + 1) == 0:
        raise refusal(f"{func.__name__}({dim})", args)
    return as_shard(func(*args, **kwargs), value.cut)


def cat(func: Any, args: Args, kwargs: Kwargs) -> torch.Tensor:
    """Compute ``cat`` of flattened shards (``parameters_to_vector``): a vector in this rank's order.

    Sums, norms and products of it are those of the full vector, and slices at the full parameters' places give the
    parameters back (``vector_to_parameters``).
    """
    parts, *rest = args
    parts, dim = list(parts), kwargs.get("dim", rest[0] if rest else 0)
    if dim != 0 or kwargs.get("out") is not None or any(not isinstance(p, Shard) or p.dim() != 1 for p in parts):
        raise refusal(f"{func.__name__} of other than flattened shards", args)
    return as_shard(func(*args, **kwargs), joined([(part.cut, part) for part in parts]))


def getitem(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Compute ``p[...]``, ``p[:]``, ``p[:, a:b]``, ``p[mask]``, and slices that are parts of a joined vector."""
    value, index = args
    if not isinstance(value, Shard):
        raise refusal("an index", args)
    cut = value.cut
    index = index if isinstance(index, tuple) else (index,)
    if cut.parts and len(index) == 1 and isinstance(index[0], slice):
        return _part_of(value, index[0], args)
    if _keeps_rows(index) and (len(index) == 1 or cut.whole_rows):
        return as_shard(func(value, index), cut)
    mask = index[0]
    if len(index) == 1 and isinstance(mask, torch.Tensor) and mask.dtype == torch.bool:
        mask = rows_of_full(mask, cut, value)
        if mask.shape == value.shape:
            return as_shard(func(value, mask), cut.picked())
    raise refusal("an index of rows", args)


def _keeps_rows(index: tuple[Any, ...]) -> bool:
    """Return True if an index takes every row in order; indices of further dimensions are not tensors."""
    first = index[0] if index else Ellipsis
    every_row = (isinstance(first, slice) and first == slice(None)) or (first is Ellipsis and len(index) == 1)
    return every_row and all(isinstance(one, (slice, int, type(None))) or one is Ellipsis for one in index[1:])


def _part_of(value: Shard, wanted: slice, args: Args) -> torch.Tensor:
    """Return the part of a joined vector at the place of one parameter in the full vector."""
    at = here = 0
    for cut, numel, numel_here in value.cut.parts:
        if (wanted.start or 0, wanted.stop, wanted.step) == (at, at + numel, None):
            return as_shard(value.narrow(0, here, numel_here), cut)
        at, here = at + numel, here + numel_here
    raise refusal(f"elements {wanted.start} to {wanted.stop}, which are not one parameter,", args)


def setitem(func: Any, args: Args, kwargs: Kwargs) -> None:
    """Assign rows, columns or masked elements: each rank writes those that it holds."""
    value, index, new = args
    if not isinstance(value, Shard):
        raise refusal("an assignment to an index", args)
    cut = value.cut
    index = index if isinstance(index, tuple) else (index,)
    index = index or (Ellipsis,)
    first, shape = index[0], cut.full_shape(value)
    if isinstance(first, torch.Tensor) and first.dtype == torch.bool and len(index) == 1:
        if isinstance(new, torch.Tensor) and new.dim():
            raise refusal("an assignment of several values to a mask", args)
        func(value, rows_of_full(first, cut, value), new)
    elif _keeps_rows(index) and (len(index) == 1 or cut.whole_rows):
        func(value, index, rows_of_full(new, cut, value) if len(index) == 1 else _own_rows(new, cut, value))
    elif cut.whole_rows and shape and isinstance(first, (int, slice)) and not cut.parts:
        _set_rows(func, value, first, index[1:], new)
    else:
        raise refusal("an assignment to an index", args)


def _own_rows(new: Any, cut: Cut, value: torch.Tensor) -> Any:
    """Return this rank's rows of the values for columns; values with fewer dimensions apply to every row."""
    if isinstance(new, torch.Tensor) and new.dim() == value.dim() and new.shape[0] == cut.total != 1:
        return new[cut.first : cut.first + value.shape[0]]
    return new


def _set_rows(func: Any, value: Shard, first: int | slice, rest: Args, new: Any) -> None:
    """Write those of the rows ``first`` of the full tensor that are on this rank."""
    cut = value.cut
    if isinstance(new, Shard):
        raise refusal("an assignment of a shard to rows", (value,))
    stop_here = cut.first + value.shape[0]
    if isinstance(first, int):
        row = range(cut.total)[first]  # raises IndexError as for the full tensor
        if cut.first <= row < stop_here:
            func(value, (row - cut.first, *rest), new)
        return
    rows = range(cut.total)[first]
    if rows.step != 1:
        raise refusal("an assignment to rows with a step", (value,))
    low, high = max(rows.start, cut.first), min(rows.stop, stop_here)
    if low < high:
        if isinstance(new, torch.Tensor) and new.dim() >= value.dim() and new.shape[0] == len(rows) != 1:
            new = new[low - rows.start : high - rows.start]
        func(value, (slice(low - cut.first, high - cut.first), *rest), new)
