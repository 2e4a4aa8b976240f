"""The local rule: functions that compute each element from the elements at the same place."""

from __future__ import annotations

from typing import Any

import torch

from fullshard.core.comm import same_group
from fullshard.core.shards.cut import Cut, tensors_in
from fullshard.core.shards.shard import Shard, as_shard, refusal
from fullshard.errors import ShardingError


def common_cut(values: Any) -> tuple[Cut, Shard]:
    """Return the cut of the shards among ``values``, and the one of them that has the most dimensions.

    Keys are compared, which are equal on all ranks, so that every rank decides alike.

    Raises:
        ShardingError: They are divided in different ways.
    """
    shards = [one for one in tensors_in(values) if isinstance(one, Shard)]
    widest = max(shards, key=lambda one: (one.dim(), one.cut.shape is not None))
    cut = widest.cut
    for one in shards:
        if one.cut is cut:
            continue
        same = one.cut.key == cut.key and one.cut.key is not None and same_group(one.cut.comm, cut.comm)
        if not same or one.dim() != widest.dim():
            raise ShardingError(
                f"{cut.name} and {one.cut.name} are in one operation, but ranks hold different rows of the two. "
                "Compute with what full_tensor() of both returns, on every rank."
            )
    return cut, widest


def rows_of_full(value: Any, cut: Cut, like: torch.Tensor) -> Any:
    """Return this rank's rows of a plain operand that has the full tensor's rows; other values unchanged.

    Args:
        value: An argument of a function.
        cut: The cut of the shard in the same operation.
        like: That shard.

    Raises:
        ShardingError: It has neither these rows, nor the full tensor's, nor a single row.
    """
    if not isinstance(value, torch.Tensor) or isinstance(value, Shard):
        return value
    if cut.shape and not cut.whole_rows and value.numel() != 1 and value.shape != like.shape:
        return _part_of_rows(value, cut, like)
    if value.dim() < max(1, like.dim()):
        return value
    if value.dim() > like.dim() and like.dim():
        raise refusal("broadcasting to more dimensions", (like,))
    given, here = value.shape[0], like.shape[0] if like.dim() else 1
    if given in (1, here):
        return value
    if cut.whole_rows and cut.key is not None and given == cut.total:
        return value[cut.first : cut.first + here]
    raise ShardingError(
        f"{cut.name} is a shard: {here} rows on this rank, of {cut.total}. It was combined with a tensor of shape "
        f"{tuple(value.shape)}. Give one of the full shape, whose rows are selected, or of the rows here."
    )


def _part_of_rows(value: torch.Tensor, cut: Cut, like: torch.Tensor) -> torch.Tensor:
    """Return the operand for this rank's elements if ranks hold parts of rows, from ``value`` in the full shape."""
    assert cut.shape
    try:
        full = value.expand(cut.shape)
    except RuntimeError as error:
        raise ShardingError(
            f"{cut.name} is a shard: {like.numel()} elements on this rank, of shape {cut.shape} in full. It was "
            f"combined with a tensor of shape {tuple(value.shape)}. Give one that can be broadcast to the full shape."
        ) from error
    start = cut.first_element(like)
    return full.reshape(-1)[start : start + like.numel()].view(like.shape)


def local(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute on the rows. The result is a shard, even if it was written into a plain tensor."""
    first = args[0] if args else None
    if func.__name__ in ("to", "type_as"):  # only dtype and device of another tensor are read
        result = func(*args, **kwargs)
        return as_shard(result, first.cut) if isinstance(first, Shard) else result
    cut, widest = common_cut((args, kwargs))
    given = [rows_of_full(value, cut, widest) for value in args]
    named = {key: rows_of_full(value, cut, widest) for key, value in kwargs.items()}
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
            as_shard(one, cut)
    return result


def where(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute ``where`` by the local rule; refused with only a condition, because it then returns indices."""
    if len(args) + len(kwargs) < 2:
        raise refusal("where(condition) without values", (args, kwargs))
    return local(func, args, kwargs)


def local_lists(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Apply the local rule to ``torch._foreach_*``: the tensors at the same place of each list belong together."""
    lists = [list(one) for one in (*args, *kwargs.values()) if _is_list(one)]
    cuts: list[Cut | None] = []
    for place, together in enumerate(zip(*lists, strict=False)):
        if not any(isinstance(one, Shard) for one in together):
            cuts.append(None)
            continue
        cut, widest = common_cut(together)
        cuts.append(cut)
        for values in lists:
            values[place] = rows_of_full(values[place], cut, widest)
        if func.__name__.endswith("_") and lists[0][place] is not together[0]:
            raise refusal(f"{func.__name__}, writing to a full tensor,", together)
    rows = iter(lists)
    given = [next(rows) if _is_list(one) else one for one in args]
    result = func(*given, **{key: next(rows) if _is_list(one) else one for key, one in kwargs.items()})
    for one, cut in zip(lists[0] if result is None else result, cuts, strict=False):
        if cut is not None and one.dim():
            as_shard(one, cut)
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
            f"{param.cut.name} cannot require gradients: it has {param.dtype} numbers, such as the codes and scales of "
            "a quantised weight, which is frozen. Leave it out (param.is_floating_point()) and train an adapter."
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
    return as_shard(value, args[0].cut) if isinstance(value, torch.Tensor) and value.shape == args[0].shape else value


def write_data(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Assign ``shard.data`` or ``shard.grad``: rows, or a full tensor, whose rows are selected."""
    shard, value = args
    if not isinstance(shard, Shard):  # plain.data = shard
        func(shard, value)
        if isinstance(value, Shard) and type(shard) is torch.Tensor:
            as_shard(shard, value.cut)
        return
    if isinstance(value, torch.Tensor) and not isinstance(value, Shard) and value.shape != shard.shape:
        value = rows_of_full(value, shard.cut, shard)
    if isinstance(value, Shard) and value.cut is not shard.cut:
        common_cut((shard, value))
    func(shard, value)


def item(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the one number of a scalar parameter on every rank; a shard of more elements is refused."""
    shard = args[0]
    if shard.cut.full_numel(shard) != 1:
        raise refusal(func.__name__, args)
    return func(Shard.full_tensor(shard).reshape(()), *args[1:], **kwargs)


def numel(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return the number of elements of the full tensor, so that sums divided by it are means."""
    shard = args[0]
    known = shard.cut.full_numel(shard)
    if known is None:
        raise refusal(f"{func.__name__} of elements picked by a mask (use mask.sum())", args)
    return known
