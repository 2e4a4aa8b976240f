"""Functions computed on the rows here: elementwise ones, views, and random draws as on the full tensor."""

from __future__ import annotations

import functools
from collections.abc import Callable
from math import prod
from types import FunctionType
from typing import Any

import torch
from torch.nn import init

from fullshard.core.comm import same_group
from fullshard.core.shards.shard import RowSplit, Shard, as_shard, joined, refusal, run_of, tensors_in
from fullshard.core.torch_private import fan_in_and_out, plain_functions
from fullshard.errors import ShardingError


def common_row_split(values: Any) -> tuple[RowSplit, Shard]:
    """Return the row split of the shards among ``values``, and the one of them that has the most dimensions.

    Keys are compared, which are equal on all ranks, so that every rank decides alike.

    Raises:
        ShardingError: They are divided in different ways.
    """
    shards = [one for one in tensors_in(values) if isinstance(one, Shard)]
    widest = max(shards, key=lambda one: (one.dim(), one.row_split.shape is not None))
    row_split = widest.row_split
    for one in shards:
        if one.row_split is row_split:
            continue
        same = (
            one.row_split.key == row_split.key
            and one.row_split.key is not None
            and same_group(one.row_split.comm, row_split.comm)
        )
        if not same or one.dim() != widest.dim():
            raise ShardingError(
                f"{row_split.name} and {one.row_split.name} are in one operation, but ranks hold different rows of the "
                "two. Compute with what full_tensor() of both returns, on every rank."
            )
    return row_split, widest


def rows_of_full(value: Any, row_split: RowSplit, like: torch.Tensor) -> Any:
    """Return this rank's rows of a plain operand that has the full tensor's rows; other values unchanged.

    Args:
        value: An argument of a function.
        row_split: The row split of the shard in the same operation.
        like: That shard.

    Raises:
        ShardingError: It has neither these rows, nor the full tensor's, nor a single row.
    """
    if not isinstance(value, torch.Tensor) or isinstance(value, Shard):
        return value
    if row_split.divided is not None and not _fits(value, like):
        raise ShardingError(
            f"{row_split.name} is a shard: {tuple(like.shape)} on this rank, of {row_split.divided.global_shape}, "
            f"which tensor parallelism divides too. It was combined with a tensor of shape {tuple(value.shape)}. Give "
            "one of the shape on this rank, or compute with what full_tensor() returns, on every rank."
        )
    if row_split.shape and not row_split.whole_rows and value.numel() != 1 and value.shape != like.shape:
        return _part_of_rows(value, row_split, like)
    if value.dim() < max(1, like.dim()):
        return value
    if value.dim() > like.dim() and like.dim():
        raise refusal("broadcasting to more dimensions", (like,))
    given, here = value.shape[0], like.shape[0] if like.dim() else 1
    if given in (1, here):
        return value
    if row_split.whole_rows and row_split.key is not None and given == row_split.total:
        return value[row_split.first : row_split.first + here]
    raise ShardingError(
        f"{row_split.name} is a shard: {here} rows on this rank, of {row_split.total}. It was combined with a tensor "
        f"of shape {tuple(value.shape)}. Give one of the full shape, whose rows are selected, or of the rows here."
    )


def _fits(value: torch.Tensor, like: torch.Tensor) -> bool:
    """Return True if ``value`` can be broadcast to the shape of ``like``."""
    sizes = zip(reversed(value.shape), reversed(like.shape), strict=False)
    return value.dim() <= like.dim() and all(given in (1, wanted) for given, wanted in sizes)


def _part_of_rows(value: torch.Tensor, row_split: RowSplit, like: torch.Tensor) -> torch.Tensor:
    """Return the operand for this rank's elements if ranks hold parts of rows, from ``value`` in the full shape."""
    assert row_split.shape
    try:
        full = value.expand(row_split.shape)
    except RuntimeError as error:
        raise ShardingError(
            f"{row_split.name} is a shard: {like.numel()} elements on this rank, of shape {row_split.shape} in full. "
            f"It was combined with a tensor of shape {tuple(value.shape)}. Give one that can be broadcast to the full "
            "shape."
        ) from error
    start = row_split.first_element(like)
    return full.reshape(-1)[start : start + like.numel()].view(like.shape)


def local(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute on the rows. The result is a shard, even if it was written into a plain tensor."""
    first = args[0] if args else None
    if func.__name__ in ("to", "type_as"):  # only dtype and device of another tensor are read
        result = func(*args, **kwargs)
        return as_shard(result, first.row_split) if isinstance(first, Shard) else result
    row_split, widest = common_row_split((args, kwargs))
    given = [rows_of_full(value, row_split, widest) for value in args]
    named = {key: rows_of_full(value, row_split, widest) for key, value in kwargs.items()}
    writes = (func.__name__.endswith("_") and not func.__name__.endswith("__")) or func.__name__.startswith("__i")
    plain = first if isinstance(first, torch.Tensor) and not isinstance(first, Shard) else None
    other_rows = writes and plain is not None and plain.shape != widest.shape
    if (writes and given[0] is not first) or other_rows or named.get("out") is not kwargs.get("out"):
        raise refusal(f"{func.__name__}, writing to a full tensor,", (args, kwargs))
    result = func(*given, **named)
    for one in result if isinstance(result, tuple) else (result,):
        if isinstance(one, torch.Tensor):
            # Not checked after a write, which has happened already and whose target determines the rows.
            if not writes and one.dim() and widest.dim() and one.shape[:1] != widest.shape[:1]:
                raise refusal(f"{func.__name__} with a tensor of other rows", (args, kwargs))
            as_shard(one, row_split)
    return result


def where(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute ``where`` by the local rule; refused with only a condition, because it then returns indices."""
    if len(args) + len(kwargs) < 2:
        raise refusal("where(condition) without values", (args, kwargs))
    return local(func, args, kwargs)


def local_lists(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Apply the local rule to ``torch._foreach_*``: the tensors at the same place of each list belong together."""
    lists = [list(one) for one in (*args, *kwargs.values()) if _is_list(one)]
    row_splits: list[RowSplit | None] = []
    for place, together in enumerate(zip(*lists, strict=False)):
        if not any(isinstance(one, Shard) for one in together):
            row_splits.append(None)
            continue
        row_split, widest = common_row_split(together)
        row_splits.append(row_split)
        for values in lists:
            values[place] = rows_of_full(values[place], row_split, widest)
        if func.__name__.endswith("_") and lists[0][place] is not together[0]:
            raise refusal(f"{func.__name__}, writing to a full tensor,", together)
    rows = iter(lists)
    given = [next(rows) if _is_list(one) else one for one in args]
    result = func(*given, **{key: next(rows) if _is_list(one) else one for key, one in kwargs.items()})
    for one, row_split in zip(lists[0] if result is None else result, row_splits, strict=False):
        if row_split is not None and one.dim():
            as_shard(one, row_split)
    return result


def _is_list(value: object) -> bool:
    return isinstance(value, (list, tuple)) and len(value) > 0 and isinstance(value[0], torch.Tensor)


def about(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Answer a question about the rows as for any tensor in memory."""
    return func(*args, **kwargs)


def set_requires_grad(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Freeze or unfreeze.

    Raises:
        ShardingError: A parameter of bytes would require gradients.
    """
    param, *given = args
    wanted = given[0] if given else kwargs.get("requires_grad", True)
    if wanted and not param.dtype.is_floating_point and not param.dtype.is_complex:
        raise ShardingError(
            f"{param.row_split.name} cannot require gradients: it has {param.dtype} numbers, such as the codes and "
            "scales of a quantised weight, which is frozen. Leave it out (param.is_floating_point()) and train an "
            "adapter."
        )
    return func(*args, **kwargs)


def refused(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Refuse by name.

    Raises:
        ShardingError: Always.
    """
    name = getattr(func, "__name__", str(func))
    raise refusal(getattr(func.__self__, "__name__", name) if name == "__get__" else name, (args, kwargs))


def read_data(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return ``shard.data`` or ``shard.grad`` as a shard; autograd makes plain gradients."""
    value = func(*args)
    return (
        as_shard(value, args[0].row_split)
        if isinstance(value, torch.Tensor) and value.shape == args[0].shape
        else value
    )


def write_data(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Assign ``shard.data`` or ``shard.grad``: rows, or a full tensor, whose rows are selected."""
    shard, value = args
    if not isinstance(shard, Shard):  # plain.data = shard
        func(shard, value)
        if isinstance(value, Shard) and type(shard) is torch.Tensor:
            as_shard(shard, value.row_split)
        return
    if isinstance(value, torch.Tensor) and not isinstance(value, Shard) and value.shape != shard.shape:
        value = rows_of_full(value, shard.row_split, shard)
    if isinstance(value, Shard) and value.row_split is not shard.row_split:
        common_row_split((shard, value))
    func(shard, value)


def item(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the one number of a scalar parameter on every rank; a shard of more elements is refused."""
    shard = args[0]
    if shard.row_split.full_numel(shard) != 1:
        raise refusal(func.__name__, args)
    return func(Shard.full_tensor(shard).reshape(()), *args[1:], **kwargs)


def numel(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return the number of elements of the full tensor, so that sums divided by it are means."""
    shard = args[0]
    known = shard.row_split.full_numel(shard)
    if known is None:
        raise refusal(f"{func.__name__} of elements picked by a mask (use mask.sum())", args)
    return known


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
    row_split, full = value.row_split, value.row_split.full_shape(value)
    numel = value.numel() if full is None else prod(full)
    wanted = _resolved(sizes, numel)
    if full is not None and sizes == full and (not full or not row_split.whole_rows):
        return as_shard(value.reshape(value.shape), row_split)
    if wanted in ((numel,), (value.numel(),)):
        return as_shard(value.reshape(-1), row_split.flat(value))
    if sizes == tuple(value.shape):
        return as_shard(value.reshape(sizes), row_split)
    if full and row_split.whole_rows:
        for rows, inner in ((full[0], wanted[1:]), (value.shape[0], _resolved(sizes, value.numel())[1:])):
            if rows in (wanted[0], sizes[0]) and prod(inner) == prod(full[1:]):
                return as_shard(value.reshape(value.shape[0], *inner), row_split)
    raise refusal(f"{func.__name__} to {sizes}", args)


def _view_as(func: Any, value: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Compute ``view_as`` and ``reshape_as``: to a shape of the same elements here and on every rank."""
    if not isinstance(value, Shard):
        if value.shape == other.shape:
            return value.view(other.shape)
        raise refusal(func.__name__, (other,))
    if not isinstance(other, Shard):
        if value.shape == other.shape:
            return as_shard(value.view(other.shape), value.row_split)
        raise refusal(func.__name__, (value,))
    if value.row_split.key is None or value.row_split.flat(value).key != other.row_split.flat(other).key:
        raise refusal(func.__name__, (value,))
    return as_shard(value.reshape(other.shape), other.row_split)


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
    if (start > 0 and value.row_split.whole_rows) or (start == end and value.row_split.shape != ()):
        return as_shard(result, value.row_split)
    if result.dim() != 1 or end != max(1, value.dim()) - 1:
        raise refusal(func.__name__, args)
    row_split = value.row_split.flat(value)
    return as_shard(value.view(-1) if result is value else result, row_split)  # a view: the argument keeps its own


def unsqueeze(func: Any, args: Args, kwargs: Kwargs) -> torch.Tensor:
    """Compute ``unsqueeze`` of a dimension after the rows; a scalar has none, on any rank."""
    value, dim = args[0], kwargs.get("dim", args[1] if len(args) > 1 else 0)
    if not value.row_split.shape or not value.row_split.whole_rows or dim % (value.dim() + 1) == 0:
        raise refusal(f"{func.__name__}({dim})", args)
    return as_shard(func(*args, **kwargs), value.row_split)


def cat(func: Any, args: Args, kwargs: Kwargs) -> torch.Tensor:
    """Compute ``cat`` of flattened shards (``parameters_to_vector``): a vector in this rank's order.

    Sums, norms and products of it are those of the full vector, and slices at the full parameters' places give the
    parameters back (``vector_to_parameters``).
    """
    parts, *rest = args
    parts, dim = list(parts), kwargs.get("dim", rest[0] if rest else 0)
    if dim != 0 or kwargs.get("out") is not None or any(not isinstance(p, Shard) or p.dim() != 1 for p in parts):
        raise refusal(f"{func.__name__} of other than flattened shards", args)
    return as_shard(func(*args, **kwargs), joined([(part.row_split, part) for part in parts]))


def getitem(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Compute ``p[...]``, ``p[:]``, ``p[:, a:b]``, ``p[mask]``, and slices that are parts of a joined vector."""
    value, index = args
    if not isinstance(value, Shard):
        raise refusal("an index", args)
    row_split = value.row_split
    index = index if isinstance(index, tuple) else (index,)
    if row_split.parts and len(index) == 1 and isinstance(index[0], slice):
        return _part_of(value, index[0], args)
    if _keeps_rows(index) and (len(index) == 1 or row_split.whole_rows):
        return as_shard(func(value, index), row_split)
    mask = index[0]
    if len(index) == 1 and isinstance(mask, torch.Tensor) and mask.dtype == torch.bool:
        mask = rows_of_full(mask, row_split, value)
        if mask.shape == value.shape:
            return as_shard(func(value, mask), row_split.picked())
    raise refusal("an index of rows", args)


def _keeps_rows(index: tuple[Any, ...]) -> bool:
    """Return True if an index takes every row in order; indices of further dimensions are not tensors."""
    first = index[0] if index else Ellipsis
    every_row = (isinstance(first, slice) and first == slice(None)) or (first is Ellipsis and len(index) == 1)
    return every_row and all(isinstance(one, (slice, int, type(None))) or one is Ellipsis for one in index[1:])


def _part_of(value: Shard, wanted: slice, args: Args) -> torch.Tensor:
    """Return the part of a joined vector at the place of one parameter in the full vector."""
    at = here = 0
    for row_split, numel, numel_here in value.row_split.parts:
        if (wanted.start or 0, wanted.stop, wanted.step) == (at, at + numel, None):
            return as_shard(value.narrow(0, here, numel_here), row_split)
        at, here = at + numel, here + numel_here
    raise refusal(f"elements {wanted.start} to {wanted.stop}, which are not one parameter,", args)


def setitem(func: Any, args: Args, kwargs: Kwargs) -> None:
    """Assign rows, columns or masked elements: each rank writes those that it holds."""
    value, index, new = args
    if not isinstance(value, Shard):
        raise refusal("an assignment to an index", args)
    row_split = value.row_split
    index = index if isinstance(index, tuple) else (index,)
    index = index or (Ellipsis,)
    first, shape = index[0], row_split.full_shape(value)
    if isinstance(first, torch.Tensor) and first.dtype == torch.bool and len(index) == 1:
        if isinstance(new, torch.Tensor) and new.dim():
            raise refusal("an assignment of several values to a mask", args)
        func(value, rows_of_full(first, row_split, value), new)
    elif _keeps_rows(index) and (len(index) == 1 or row_split.whole_rows):
        func(value, index, rows_of_full(new, row_split, value) if len(index) == 1 else _own_rows(new, row_split, value))
    elif row_split.whole_rows and shape and isinstance(first, (int, slice)) and not row_split.parts:
        _set_rows(func, value, first, index[1:], new)
    else:
        raise refusal("an assignment to an index", args)


def _own_rows(new: Any, row_split: RowSplit, value: torch.Tensor) -> Any:
    """Return this rank's rows of the values for columns; values with fewer dimensions apply to every row."""
    if isinstance(new, torch.Tensor) and new.dim() == value.dim() and new.shape[0] == row_split.total != 1:
        return new[row_split.first : row_split.first + value.shape[0]]
    return new


def _set_rows(func: Any, value: Shard, first: int | slice, rest: Args, new: Any) -> None:
    """Write those of the rows ``first`` of the full tensor that are on this rank."""
    row_split = value.row_split
    if isinstance(new, Shard):
        raise refusal("an assignment of a shard to rows", (value,))
    stop_here = row_split.first + value.shape[0]
    if isinstance(first, int):
        row = range(row_split.total)[first]  # raises IndexError as for the full tensor
        if row_split.first <= row < stop_here:
            func(value, (row - row_split.first, *rest), new)
        return
    rows = range(row_split.total)[first]
    if rows.step != 1:
        raise refusal("an assignment to rows with a step", (value,))
    low, high = max(rows.start, row_split.first), min(rows.stop, stop_here)
    if low < high:
        if isinstance(new, torch.Tensor) and new.dim() >= value.dim() and new.shape[0] == len(rows) != 1:
            new = new[low - rows.start : high - rows.start]
        func(value, (slice(low - row_split.first, high - row_split.first), *rest), new)


_INITIALISERS = (
    *("trunc_normal_", "eye_", "dirac_", "xavier_uniform_", "xavier_normal_", "kaiming_normal_", "orthogonal_"),
    *("sparse_",),
)
"""Functions of ``torch.nn.init`` that read the shape of the tensor without asking its class."""


def _full_like(shard: torch.Tensor, func: Any) -> torch.Tensor:
    """Return an uninitialised plain tensor of the full shape and this rank's dtype and device."""
    assert isinstance(shard, Shard)
    divided = shard.row_split.divided
    shape = shard.row_split.full_shape(shard) if divided is None else divided.global_shape
    if shape is None or shard.row_split.parts:
        raise refusal(getattr(func, "__name__", str(func)), (shard,))
    return torch.empty(shape, dtype=shard.dtype, device=shard.device)


def _rows(full: torch.Tensor, shard: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor of the full shape, in the shape of the rows here."""
    assert isinstance(shard, Shard)
    divided = shard.row_split.divided
    if divided is not None:
        return run_of(full, divided.block, *divided.element_range).view(shard.shape)
    start = shard.row_split.first_element(shard)
    return full.reshape(-1)[start : start + torch.Tensor.numel(shard)].view(shard.shape)


def drawn(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Fill a shard in place as the full tensor would be filled; returns the shard.

    Each rank draws the full tensor and keeps its rows: if ranks' random states are equal, they get the rows of one draw
    and the states stay equal. Needs memory for the full tensor for a moment.
    """
    kwargs = dict(kwargs)
    shard, rest = (args[0], args[1:]) if args else (kwargs.pop("tensor"), ())
    if not isinstance(shard, Shard) or any(isinstance(one, Shard) for one in (*rest, *kwargs.values())):
        raise refusal(func.__name__, (args, kwargs))
    full = _full_like(shard, func)
    with torch.no_grad():
        func(full, *rest, **kwargs)
    # Initialisers, Python functions (torch's, or those that transformers substitutes while it initialises), write into
    # Parameters; torch refuses normal_(), copy_() and similar outside of no_grad.
    with torch.set_grad_enabled(torch.is_grad_enabled() and not isinstance(func, FunctionType)):
        shard.copy_(_rows(full, shard))
    return shard


def drawn_like(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Compute ``randn_like`` and similar: the rows here of the result for the full tensor."""
    shard = args[0]
    kwargs = {key: value for key, value in kwargs.items() if key != "memory_format"}
    full = func(_full_like(shard, func), *args[1:], **kwargs)
    return as_shard(_rows(full, shard).clone().requires_grad_(full.requires_grad), shard.row_split)


def _for_shards(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return an initialiser of ``torch.nn.init`` that treats shards by :func:`drawn`."""

    @functools.wraps(function)
    def initialise(*args: Any, **kwargs: Any) -> Any:
        tensor = args[0] if args else kwargs.get("tensor")
        if not isinstance(tensor, Shard):
            return function(*args, **kwargs)
        with plain_functions():
            return drawn(function, args, kwargs)

    return initialise


def _fans(tensor: torch.Tensor) -> tuple[int, int]:
    """Return fan-in and fan-out of the full shape, as torch does."""
    if isinstance(tensor, Shard):
        tensor = torch.empty(tensor.global_shape, device="meta")
    return fan_in_and_out(tensor)


# Also replaced where they were imported by name before this module.
if hasattr(init, "_calculate_fan_in_and_fan_out"):
    init._calculate_fan_in_and_fan_out = _fans
for _name in _INITIALISERS:
    setattr(init, _name, _for_shards(getattr(init, _name)))
