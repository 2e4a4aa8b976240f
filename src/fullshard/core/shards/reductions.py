"""The global rule: reductions of the full tensor.

Each rank reduces its rows; the partial results are gathered (one number a tensor, or one row) and combined on every
rank. Reductions along other dimensions than 0 need no communication if ranks hold full rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fullshard.core.shards.elementwise import common_row_split, local, rows_of_full
from fullshard.core.shards.shard import RowSplit, Rule, Shard, as_shard, every_part, refusal
from fullshard.errors import ShardingError

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which partial results are combined."""
    return torch.promote_types(dtype, torch.float32)


def _dims(value: torch.Tensor, dim: Any) -> tuple[int, ...] | None:
    """Return the dimensions to reduce, counted from 0; None for all."""
    if dim is None or dim == () or dim == []:
        return None
    rank = max(1, value.dim())
    dims = tuple(d % rank for d in ((dim,) if isinstance(dim, int) else dim))
    return None if len(set(dims)) == rank else dims


def _stays_here(func: Any, value: Shard, dims: tuple[int, ...] | None) -> bool:
    """Return True if each row is reduced alone.

    Raises:
        ShardingError: Rows or columns are to be reduced, but ranks hold parts of rows.
    """
    if dims is not None and not value.row_split.whole_rows:
        raise refusal(f"{func.__name__} along a dimension", (value,))
    return dims is not None and 0 not in dims


def _left(value: torch.Tensor, dims: tuple[int, ...] | None) -> list[int]:
    """Return the remaining shape after ``dims`` are reduced."""
    return [] if dims is None else [n for d, n in enumerate(value.shape) if d not in dims]


def _kept(result: torch.Tensor, value: torch.Tensor, dims: tuple[int, ...] | None, *, keepdim: bool) -> torch.Tensor:
    """Return ``result`` with reduced dimensions of size 1 if ``keepdim``; a scalar, (0,) on most ranks, has none."""
    if not keepdim or (isinstance(value, Shard) and value.row_split.shape == ()):
        return result
    return result.reshape([1 if dims is None or d in dims else n for d, n in enumerate(value.shape)])


def reduction(combine: Callable[..., torch.Tensor], neutral: float | None = None) -> Rule:
    """Return the rule for a reduction whose partial results are combined by ``combine(stacked, 0)``.

    Args:
        combine: A reduction over dimension 0.
        neutral: The partial result of no elements, for functions that refuse an empty input.
    """

    def reduce(func: Any, args: Args, kwargs: Kwargs) -> Any:
        value, dim = args[0], kwargs.get("dim", kwargs.get("axis", args[1] if len(args) > 1 else None))
        if isinstance(dim, torch.Tensor) or "other" in kwargs or not isinstance(value, Shard):
            return local(func, args, kwargs)  # torch.max(a, b)
        if func.__name__ == "count_nonzero" and len(args) > 2:
            args, dim = (value, args[1:]), args[1:]  # without keepdim, every integer is a dimension
        dims = _dims(value, dim)
        if kwargs.get("out") is not None:
            raise refusal(f"{func.__name__}(out=)", args)
        if _stays_here(func, value, dims):
            result = func(*args, **kwargs)
            for one in result if isinstance(result, tuple) else (result,):
                as_shard(one, value.row_split)
            return result
        if dim is not None and func.__name__ in ("max", "min"):
            raise refusal(f"{func.__name__} along the rows, with indices (use a{func.__name__})", args)
        keepdim = kwargs.get("keepdim", args[2] if len(args) > 2 else False)
        kwargs = {key: one for key, one in kwargs.items() if key not in ("dim", "axis", "keepdim")}
        if value.numel() == 0 and neutral is not None:
            mine = _nothing(value, _left(value, dims), neutral)
        else:
            mine = func(value, **kwargs) if dims is None else func(value, dims, **kwargs)
        whole = combine(every_part(mine, value.row_split.comm, func.__name__), 0)
        return _kept(whole, value, dims, keepdim=keepdim)

    return reduce


def _nothing(value: torch.Tensor, shape: list[int], neutral: float) -> torch.Tensor:
    """Return the partial result of a rank without rows; integers have no infinity."""
    if value.dtype == torch.bool:
        neutral = float(neutral > 0)
    elif not value.is_floating_point():
        info = torch.iinfo(value.dtype)
        neutral = info.max if neutral > 0 else info.min
    return torch.full(shape, neutral, dtype=value.dtype, device=value.device)


def norm(func: Any, args: Args, kwargs: Kwargs) -> torch.Tensor:
    """Compute ``norm``, ``linalg.norm`` and ``linalg.vector_norm`` as the norm of the ranks' norms."""
    kwargs = dict(kwargs)
    value = args[0]
    _require_floating(func, value)
    given = kwargs.get("ord", args[1] if len(args) > 1 else None)
    order = kwargs.pop("p", kwargs.pop("ord", args[1] if len(args) > 1 else 2.0))
    dim = kwargs.pop("dim", kwargs.pop("axis", args[2] if len(args) > 2 else None))
    keepdim = kwargs.pop("keepdim", args[3] if len(args) > 3 else False)
    order = 2.0 if order in (None, "fro") else order
    dims = _dims(value, dim)
    of_matrix = func is torch.linalg.norm and (value.dim() if dim is None else len(dims or (0, 1))) == 2
    if isinstance(order, (str, torch.Tensor)) or kwargs.get("out") is not None or (of_matrix and order != 2.0):
        what = "with out=" if kwargs.get("out") is not None else f"of order {order!r}"
        raise refusal(f"{func.__name__} {what}{' of a matrix' if of_matrix else ''},", args)
    if of_matrix and isinstance(given, (int, float)):
        raise refusal(f"{func.__name__}, the spectral norm,", args)
    dtype = kwargs.get("dtype")
    if _stays_here(func, value, dims):
        return as_shard(torch.linalg.vector_norm(value, order, dims, keepdim, dtype=dtype), value.row_split)
    mine = _norm_here(value, float(order), dims, dtype)
    whole = _norm_of_norms(every_part(mine, value.row_split.comm, func.__name__), float(order))
    return _kept(whole.to(dtype or value.dtype), value, dims, keepdim=keepdim)


def _require_floating(func: Any, value: torch.Tensor) -> None:
    """Refuse whole numbers on every rank: torch would raise only where there are rows, and other ranks would wait.

    Raises:
        ShardingError: The tensor has whole numbers, such as the codes of quantised weights.
    """
    if not value.is_floating_point() and not value.is_complex():
        name = value.row_split.name if isinstance(value, Shard) else "a tensor"
        raise ShardingError(
            f"{func.__name__} of {name} needs floating numbers, as in torch, and got {value.dtype}, such as the codes "
            "and scales of a quantised weight. Leave it out (param.is_floating_point()), or convert it (param.float())."
        )


def _norm_here(
    value: torch.Tensor, order: float, dims: tuple[int, ...] | None = None, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Return the norm of the rows here in float32 or wider; without rows, a value that does not change the total."""
    wide = dtype or _wide(value.dtype)
    if value.numel() == 0:
        return torch.full(_left(value, dims), math.inf if order < 0 else 0.0, dtype=wide, device=value.device)
    return torch.linalg.vector_norm(value, order, dims, dtype=wide)


def _norm_of_norms(stacked: torch.Tensor, order: float) -> torch.Tensor:
    """Return the norm over dimension 0; of order 0, which counts, the sum."""
    return stacked.sum(0) if order == 0 else torch.linalg.vector_norm(stacked, order, 0)


def foreach_norm(func: Any, args: Args, kwargs: Kwargs) -> list[torch.Tensor]:
    """Compute ``torch._foreach_norm``: one collective for all tensors of the same ranks."""
    values = list(args[0])
    for one in values:
        _require_floating(func, one)
    order = float(kwargs.get("ord", args[1] if len(args) > 1 else 2.0))
    found = [_norm_here(one, order) for one in values]
    for comm, places in _by_comm(values):
        widest = _wide(torch.float64 if any(found[p].dtype == torch.float64 for p in places) else torch.float32)
        mine = torch.stack([found[place].to(comm.device, widest) for place in places])
        whole = _norm_of_norms(every_part(mine, comm, "norms"), order)
        for place, one in zip(places, whole.unbind(), strict=True):
            found[place] = one.to(values[place].device)
    return [one.to(kwargs.get("dtype") or value.dtype) for one, value in zip(found, values, strict=True)]


def foreach_max(func: Any, args: Args, kwargs: Kwargs) -> list[torch.Tensor]:
    """Compute ``torch._foreach_max`` tensor by tensor."""
    largest = reduction(torch.amax, -math.inf)
    return [largest(torch.amax, (one,), {}) if isinstance(one, Shard) else one.amax() for one in args[0]]


def _by_comm(values: Sequence[torch.Tensor]) -> list[tuple[Any, list[int]]]:
    """Return the places of shards in a list, by the ranks that share them, in order of first appearance."""
    groups: dict[int, tuple[Any, list[int]]] = {}
    for place, one in enumerate(values):
        if isinstance(one, Shard):
            groups.setdefault(id(one.row_split.comm), (one.row_split.comm, []))[1].append(place)
    return list(groups.values())


def moments(func: Any, args: Args, kwargs: Kwargs) -> torch.Tensor:
    """Compute ``mean``, ``var`` and ``std`` from each rank's count, mean and sum of squared deviations.

    Source of the combination: Chan, Golub, LeVeque, "Updating formulae and a pairwise algorithm", 1979.
    """
    value, dim = args[0], kwargs.get("dim", kwargs.get("axis", args[1] if len(args) > 1 else None))
    dims = _dims(value, None if isinstance(dim, bool) else dim)
    if kwargs.get("out") is not None or len(args) > 2:
        raise refusal(f"{func.__name__} with out= or several positional arguments", args)
    if _stays_here(func, value, dims):
        return as_shard(func(*args, **kwargs), value.row_split)
    over = tuple(range(value.dim())) if dims is None else dims
    count = math.prod(value.shape[d] for d in over)
    wide = value.to(kwargs.get("dtype") or _wide(value.dtype))
    left = _left(value, dims)
    mean = wide.mean(over) if count else wide.new_zeros(left)
    rest = wide.var(over, correction=0) * count if count else wide.new_zeros(left)
    parts = every_part(torch.stack([torch.full_like(mean, count), mean, rest]), value.row_split.comm, func.__name__)
    counts, means, rests = parts.unbind(1)
    total = counts.sum(0)
    mean = (means * counts).sum(0) / total
    if func.__name__ == "mean":
        result = mean.to(kwargs.get("dtype") or value.dtype)
    else:
        correction = kwargs.get("correction", kwargs.get("unbiased", dim if isinstance(dim, bool) else True))
        var = (rests.sum(0) + ((means - mean).square() * counts).sum(0)) / (total - int(correction))
        result = (var.sqrt() if func.__name__ == "std" else var).to(value.dtype)
    return _kept(result, value, dims, keepdim=kwargs.get("keepdim", False))


def _with_other(args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """Return the arguments with the second operand by position, whatever keyword it was given by."""
    kwargs = dict(kwargs)
    for name in ("input", "x1", "other", "tensor", "x2"):
        if name in kwargs:
            args = (*args, kwargs.pop(name))
    return args, kwargs


def _pair(args: Args) -> tuple[RowSplit, torch.Tensor, torch.Tensor]:
    """Return the row split of two operands and the rows here of both."""
    row_split, widest = common_row_split(args[:2])
    one, other = (rows_of_full(value, row_split, widest) for value in args[:2])
    return row_split, one, other


def dot(func: Any, args: Args, kwargs: Kwargs) -> torch.Tensor:
    """Compute ``dot``, ``vdot`` and ``inner`` of vectors as the sum of the ranks' products."""
    args, kwargs = _with_other(args, kwargs)
    row_split, one, other = _pair(args)
    if one.dim() != 1 or other.dim() != 1 or kwargs or (row_split.shape is not None and len(row_split.shape) != 1):
        raise refusal(f"{func.__name__} of matrices", args)
    return every_part(func(one, other), row_split.comm, func.__name__).sum(0)


def cosine_similarity(func: Any, args: Args, kwargs: Kwargs) -> torch.Tensor:
    """Compute ``F.cosine_similarity`` of two vectors, or row by row.

    As torch does: ``x.y / (max(|x|, eps) max(|y|, eps))``.
    """
    args, kwargs = _with_other(args, kwargs)
    row_split, one, other = _pair(args)
    dim = kwargs.get("dim", args[2] if len(args) > 2 else 1)
    eps = kwargs.get("eps", args[3] if len(args) > 3 else 1e-8)
    if one.shape != other.shape or (one.dim() > 1 and (dim % one.dim() == 0 or not row_split.whole_rows)):
        raise refusal(f"{func.__name__} over the first dimension", args)
    if one.dim() > 1:
        return as_shard(func(one, other, dim, eps), row_split)
    mine = torch.stack([(one * other).sum(), one.square().sum(), other.square().sum()])
    product, first, second = every_part(mine, row_split.comm, func.__name__).sum(0)
    return product / (first.sqrt().clamp_min(eps) * second.sqrt().clamp_min(eps))


def agree(func: Any, args: Args, kwargs: Kwargs) -> bool:
    """Compute ``equal`` and ``allclose``: true if they are on every rank.

    Raises:
        ShardingError: On some rank the tensors cannot be compared. Raised on every rank, none of which waits.
    """
    args, kwargs = _with_other(args, kwargs)
    row_split, widest = common_row_split(args[:2])
    try:
        one, other = (rows_of_full(value, row_split, widest) for value in args[:2])
        found = int(func(one, other, *args[2:], **kwargs))
    except (ShardingError, RuntimeError):
        found = -1
    every = every_part(torch.tensor(found, device=widest.device), row_split.comm, func.__name__)
    if bool((every < 0).any()):
        raise refusal(f"{func.__name__} with a tensor of other rows", args)
    return bool(every.all())


def unscale(func: Any, args: Args, kwargs: Kwargs) -> None:
    """Unscale gradients as torch's GradScaler does; an infinity or nan on any rank sets ``found_inf`` on all."""
    func(*args, **kwargs)
    for comm, _ in _by_comm(args[0]):
        args[1].copy_(every_part(args[1], comm, "infinities").amax(0))


def within_rows(position: int) -> Rule:
    """Return the rule of a function along one dimension, which must not be that of rows (softmax, argmax, sort…).

    Args:
        position: Index of ``dim`` among the positional arguments.
    """

    def compute(func: Any, args: Args, kwargs: Kwargs) -> Any:
        value = args[0]
        dim = kwargs.get("dim", args[position] if len(args) > position else None)
        inner = isinstance(dim, int) and isinstance(value, Shard) and value.dim() and dim % value.dim()
        if not inner or not value.row_split.whole_rows or kwargs.get("out") is not None:
            raise refusal(f"{func.__name__} over rows", args)
        if func.__name__ == "quantile":
            return _quantile(func, args, kwargs)
        result = func(*args, **kwargs)
        for one in result if isinstance(result, tuple) else (result,):
            as_shard(one, value.row_split)
        return result

    return compute


def _quantile(func: Any, args: Args, kwargs: Kwargs) -> torch.Tensor:
    """Compute one quantile of each row; torch refuses to do so of no rows, and puts several before the rows."""
    value, *rest = args
    share = kwargs.get("q", rest[0] if rest else None)
    if isinstance(share, torch.Tensor) and share.dim():
        raise refusal(f"several of {func.__name__}", args)
    some = value if value.shape[0] else value.new_zeros(1, *value.shape[1:])
    return as_shard(func(some, *rest, **kwargs)[: value.shape[0]], value.row_split)
