"""The class of shards, how a tensor's rows are split over ranks, and what shards communicate."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any, TypeVar

import torch
from torch import nn

from fullshard.core.comm import Comm, same_group, settle
from fullshard.core.layout import Block, ShardMeta
from fullshard.core.torch_private import lists_of_fast_types, plain_functions, set_eval_frame
from fullshard.errors import ShardingError

Untraced = TypeVar("Untraced", bound=Callable[..., Any])


def untraced(function: Untraced) -> Untraced:
    """Make torch.compile break its graph at ``function`` and trace nothing that it calls.

    Like ``torch.compiler.disable``, which would import the compiler and add a second to every start.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        before = set_eval_frame(None)
        try:
            return function(*args, **kwargs)
        finally:
            set_eval_frame(before)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    return call  # type: ignore[return-value]


@dataclass(frozen=True, eq=False, slots=True)
class RowSplit:
    """How dimension 0 of a tensor is split over ranks. Rows of a vector are its elements.

    Attributes:
        name: The parameter, for messages.
        comm: The ranks.
        key: The same on all ranks, and equal for two tensors whose rows are divided alike; None if a mask picked rows.
        first: First row here, counted in the full tensor.
        total: Rows of the full tensor; not meaningful without a key.
        shape: Full shape if it does not follow from the rows here: for scalars, and if rows are divided too.
        whole_rows: True if this rank holds full rows.
        parts: For a vector joined from several: the row split, elements in full and elements here of each.
        divided: For a parameter that tensor parallelism divides too, its place; then there is no key, as this rank's
            rows are not rows of the full tensor.
    """

    name: str
    comm: Comm
    key: Hashable
    first: int
    total: int
    shape: tuple[int, ...] | None = None
    whole_rows: bool = True
    parts: tuple[tuple[RowSplit, int, int], ...] = ()
    divided: ShardMeta | None = None

    def full_shape(self, rows: torch.Tensor) -> tuple[int, ...] | None:
        """Return the shape of the full tensor that ``rows``, (rows here, *rest), belong to; None if not known."""
        if self.key is None:
            return None
        return (self.total, *rows.shape[1:]) if self.shape is None else self.shape

    def full_numel(self, rows: torch.Tensor) -> int | None:
        """Return the number of elements of the full tensor; None if not known without communication."""
        shape = self.full_shape(rows) if self.divided is None else self.divided.global_shape
        return None if shape is None else prod(shape)

    def first_element(self, rows: torch.Tensor) -> int:
        """Return the index of the first element here in the flattened full tensor."""
        return self.first * (prod(rows.shape[1:]) if rows.dim() else 1)

    def flat(self, rows: torch.Tensor) -> RowSplit:
        """Return the row split of ``rows.flatten()``."""
        if self.key is None or (rows.dim() == 1 and self.shape is None):
            return self
        inner = prod(rows.shape[1:]) if rows.dim() else 1
        total = self.full_numel(rows)
        assert total is not None
        return RowSplit(self.name, self.comm, ("flat", self.key, inner), self.first_element(rows), total)

    def picked(self) -> RowSplit:
        """Return the row split of elements picked by a mask: the numbers of other ranks are not known."""
        return RowSplit(f"elements of {self.name}", self.comm, None, 0, 0)


def row_split_of(meta: ShardMeta, comm: Comm) -> RowSplit:
    """Return the row split of a sharded parameter; ``comm``: all ranks that hold parts of it."""
    if meta.block is not None:
        return RowSplit(meta.name, comm, None, 0, meta.global_shape[0], whole_rows=False, divided=meta)
    start, _ = meta.element_range
    placement, layout = meta.placement, meta.layout
    shape = None if meta.global_shape and placement.full_rows else meta.global_shape
    row = placement.row_numel if placement.full_rows else placement.granule
    key = (layout.world_size, layout.shard_numel, placement.start, placement.numel, row, placement.granule)
    return RowSplit(meta.name, comm, key, start // row, placement.numel // row, shape, placement.full_rows)


def joined(parts: list[tuple[RowSplit, torch.Tensor]]) -> RowSplit:
    """Return the row split of flattened shards joined in this rank's order, as ``parameters_to_vector`` does."""
    of_parts = []
    for row_split, rows in parts:
        numel = row_split.full_numel(rows)
        if numel is None or row_split.parts or not same_group(row_split.comm, parts[0][0].comm):
            raise ShardingError(
                f"Elements of {row_split.name} and of {parts[0][0].name} cannot be put into one vector: each must be a "
                "flattened shard of the same ranks. Put together what full_tensor() returns."
            )
        of_parts.append((row_split, numel, rows.numel()))
    key = ("joined", *(row_split.key for row_split, _, _ in of_parts))
    total = sum(numel for _, numel, _ in of_parts)
    return RowSplit("a vector of shards", parts[0][0].comm, key, 0, total, whole_rows=False, parts=tuple(of_parts))


def tensors_in(values: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors among arguments, including those inside lists, tuples and dicts."""
    for value in values.values() if isinstance(values, dict) else values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (tuple, list, dict)):
            yield from tensors_in(value)


_here = threading.local()


@contextmanager
def some_ranks_only(where: str) -> Iterator[None]:
    """Refuse reductions and full tensors of shards inside: other ranks, which do not run this code, would be missed."""
    before, _here.where = getattr(_here, "where", None), where
    try:
        yield
    finally:
        _here.where = before


def _require_all_ranks(what: str) -> None:
    where = getattr(_here, "where", None)
    if where is not None:
        raise ShardingError(
            f"{what} needs every rank, but {where} runs only on the ranks that hold rows of the parameter: the others "
            "would be waited for. Use one optimizer after backward."
        )


def gather_full(comm: Comm, shape: Sequence[int], start: int, flat: torch.Tensor) -> torch.Tensor:
    """Gather a full tensor from the runs that ranks hold of it, on the device of collectives; every rank calls it.

    The ranks first exchange which runs they hold. Then each holder broadcasts its run; few ranks hold parts of a
    parameter.

    Args:
        comm: The ranks.
        shape: Shape of the full tensor.
        start: First element that this rank holds, counted in the flattened full tensor.
        flat: Its elements, (numel,), possibly none.
    """
    what = f"full_tensor() of shape {tuple(shape)}"
    _require_all_ranks(what)
    comm.announce(what)
    runs = torch.empty(2 * comm.size, dtype=torch.int64, device=comm.device)
    _all_gather(comm, runs, torch.tensor([start, start + flat.numel()], device=comm.device))
    full = torch.empty(prod(shape), dtype=flat.dtype, device=comm.device)
    done = 0
    for first, stop, rank in sorted((*run, rank) for rank, run in enumerate(runs.view(-1, 2).tolist())):
        first = max(first, done)  # several ranks may hold the same elements
        if first >= stop:
            continue
        piece = full[first:stop]
        if rank == comm.rank:
            piece.copy_(flat.detach()[first - start : stop - start])
        comm.announce(what)
        work = comm.broadcast(piece.view(torch.uint8), rank)
        work.wait()
        settle(work)
        done = stop
    return full.view(tuple(shape))


def gather_blocks(grid: Any, shape: Sequence[int], block: Block, start: int, rows: torch.Tensor) -> torch.Tensor:
    """Gather a full tensor that tensor parallelism divides, from rows of each rank's block; every rank calls it.

    Args:
        grid: All ranks that hold parts of it, a :class:`fullshard.core.comm.GridComm`.
        shape: Shape of the full tensor.
        block: This rank's block.
        start: First element that this rank holds, counted in the flattened block.
        rows: Its elements, in any shape.
    """
    mine = gather_full(grid.shards, block.shape(shape), start, rows.reshape(-1))
    blocks = mine.new_empty(block.count, *mine.shape)
    _all_gather(grid.blocks, blocks.view(-1).view(torch.uint8), mine.view(-1).view(torch.uint8))
    return torch.cat(blocks.unbind(), block.dim)


def run_of(full: torch.Tensor, block: Block | None, start: int, stop: int) -> torch.Tensor:
    """Return elements ``start`` to ``stop`` of a block of a full tensor, flattened; None: of all of it."""
    if block is not None:
        offsets, sizes = block.offsets(full.shape), block.shape(full.shape)
        full = torch.narrow(full, block.dim, offsets[block.dim], sizes[block.dim])
    return torch.reshape(full, (-1,))[start:stop]


def _all_gather(comm: Comm, full: torch.Tensor, mine: torch.Tensor) -> None:
    """Fill ``full``, and return when other ranks have read ``mine``, so that the caller may drop it."""
    work = comm.all_gather(full, mine)
    work.wait()
    settle(work)


class _EveryPart(torch.autograd.Function):
    """The all-gather of partial results. Backward gives each rank the gradient of its own part."""

    @staticmethod
    def forward(ctx: Any, mine: torch.Tensor, comm: Comm, what: str) -> torch.Tensor:
        ctx.rank = comm.rank
        sent = mine.detach().to(comm.device).contiguous().reshape(-1)
        is_bool = sent.dtype == torch.bool
        sent = sent.view(torch.uint8) if is_bool else sent
        full = sent.new_empty(comm.size * sent.numel())
        _require_all_ranks(f"{what} of shards")
        comm.announce(f"{what} of shards")
        _all_gather(comm, full, sent)
        full = full.view(torch.bool) if is_bool else full
        return full.view(comm.size, *mine.shape).to(mine.device)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0][ctx.rank], None, None


def every_part(mine: torch.Tensor, comm: Comm, what: str) -> torch.Tensor:
    """Return the tensor ``mine`` of every rank, (size, *shape), the same on each; every rank calls it.

    Partial results are gathered and combined on each rank, not all-reduced: the bits are equal on all ranks, and a
    maximum keeps its nan.
    """
    return mine[None] if comm.size == 1 else _EveryPart.apply(mine, comm, what)


STATE_ON_ALL_RANKS = "_fullshard_state_on_all_ranks"
"""Mark on a parameter whose optimizer state every rank must have, including ranks without rows."""

Rule = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""Computes a function, given with its arguments, at least one of which is a shard. Inside, shards are plain tensors."""

Function = TypeVar("Function", bound=Callable[..., Any])


class Shard(torch.Tensor):
    """This rank's rows of a tensor, (rows here, *rest), with the knowledge that they are rows.

    Elementwise functions compute on the rows and return shards. Reductions (``norm``, ``sum``, ``mean``, ``max``,
    ``dot``…) compute over all ranks and return plain tensors, so every rank must call them. Functions that need the
    full tensor are refused by name. ``shape`` and ``size`` describe the rows; ``numel`` counts the full tensor.

    It is a ``__torch_function__`` class: below autograd, shards are plain tensors, also for fused and foreach kernels.

    Attributes:
        row_split: Which rows these are, and of which ranks' tensor.
    """

    row_split: RowSplit
    find_rule: Callable[[Any], Rule]
    """Set by ``rules``, which knows all of torch's functions."""

    @classmethod
    @untraced
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Compute ``func`` by its rule.

        Raises:
            ShardingError: It needs elements that are on other ranks.
        """
        rule = Shard.find_rule(func)
        with plain_functions():
            try:
                return rule(func, args, kwargs or {})
            except ShardingError:
                if any(one.row_split.comm.size > 1 for one in tensors_in((args, kwargs)) if isinstance(one, Shard)):
                    raise
                return func(*args, **(kwargs or {}))  # a group of one rank: its rows are the full tensor

    def full_tensor(self) -> torch.Tensor:
        """Return the full tensor, on the device of collectives, without autograd; every rank calls it.

        Raises:
            ShardingError: The elements were picked by a mask, or form a vector of several shards.
        """
        rows, shape = rows_of(self), self.row_split.full_shape(self)
        if self.row_split.divided is not None:
            place = self.row_split.divided
            assert place.block is not None
            return gather_blocks(self.row_split.comm, place.global_shape, place.block, place.element_range[0], rows)
        if shape is None or self.row_split.parts:
            raise refusal("full_tensor", (self,))
        return gather_full(self.row_split.comm, shape, self.row_split.first_element(rows), rows.reshape(-1))

    def to_local(self) -> torch.Tensor:
        """Return this rank's rows, (rows here, *rest), as a plain tensor of the same memory, without autograd."""
        return rows_of(self)

    @property
    def global_shape(self) -> tuple[int, ...]:
        """Shape of the full tensor.

        Raises:
            ShardingError: It is not known, because a mask picked the elements.
        """
        if self.row_split.divided is not None:
            return self.row_split.divided.global_shape
        with plain_functions():
            shape = self.row_split.full_shape(self)
        if shape is None:
            raise refusal("global_shape", (self,))
        return shape

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """Return a shard in memory of its own."""
        with plain_functions():
            return as_shard(self.detach().clone(), self.row_split)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be pickled: the file would look like the full tensor.

        Raises:
            ShardingError: Always.
        """
        raise ShardingError(
            f"{self.row_split.name} is a shard, this rank's rows, and pickling (torch.save) would save only these. "
            "Save what full_tensor() returns, which every rank calls, or use fullshard.save(model, directory)."
        )

    def __repr__(self, *, tensor_contents: object = None) -> str:
        """Show the rows here and their place in the full tensor."""
        rows = rows_of(self)
        full = self.row_split.full_shape(rows)
        what = f"{tuple(rows.shape)} from row {self.row_split.first}, of {full}" if full else f"{tuple(rows.shape)}"
        return f"Shard({self.row_split.name}, {what}, {rows})"

    def __format__(self, format_spec: str) -> str:
        """Show the same in a formatted string, as tensors of one and more dimensions do."""
        return object.__format__(self, format_spec)


class ShardParameter(Shard, nn.Parameter):
    """The class of a sharded Parameter between passes; ``__class__`` is assigned, so it stays the user's object."""

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """Return a Parameter of the same rows in memory of its own, which is a shard too."""
        if id(self) not in memo:
            copy = nn.Parameter(rows_of(self).clone(memory_format=torch.preserve_format), self.requires_grad)
            vars(copy).update(vars(self))
            copy.__class__ = type(self)
            memo[id(self)] = copy
        return memo[id(self)]


# Otherwise optimizers and clipping would compute tensor by tensor.
for _supported in lists_of_fast_types():
    _supported.extend(kind for kind in (Shard, ShardParameter) if kind not in _supported)


@functools.lru_cache
def parameter_class(kind: type[nn.Parameter]) -> type[nn.Parameter]:
    """Return the class of shards of ``kind``'s Parameters; ``kind`` itself if it overrides torch's functions."""
    if kind is nn.Parameter:
        return ShardParameter
    overrides = any("__torch_function__" in vars(base) for base in kind.__mro__[: kind.__mro__.index(nn.Parameter)])
    return kind if overrides else type(kind.__name__, (ShardParameter, kind), {})


def as_shard(rows: torch.Tensor, row_split: RowSplit) -> torch.Tensor:
    """Turn ``rows``, a plain tensor, into a shard: the same object. Tensors of other classes are unchanged."""
    if type(rows) is torch.Tensor:
        rows.__class__ = Shard
    if isinstance(rows, Shard):
        rows.row_split = row_split
    return rows


def rows_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a shard's rows as a plain tensor of the same memory, without autograd; other tensors likewise."""
    with plain_functions():
        return tensor.detach()


def on_rows(function: Function) -> Function:
    """Run ``function`` with shards as plain tensors of their rows. Not for generators, nor around users' code."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with plain_functions():
            return function(*args, **kwargs)

    return call  # type: ignore[return-value]


def strip(params: Iterable[nn.Parameter]) -> list[tuple[nn.Parameter, torch.Tensor | None]]:
    """Make shards and their gradients plain, for a step that is known to treat each rank's rows alone.

    The step then has no overhead. Parameters without rows on this rank have no gradient meanwhile, and so get no
    optimizer state: some optimizers divide by the number of rows. Those with the mark keep their gradient.

    Returns:
        Each parameter that was a shard, with its gradient if that was one; for :func:`restore`.
    """
    stripped: list[tuple[nn.Parameter, torch.Tensor | None]] = []
    with plain_functions():
        for param in params:
            if type(param) is ShardParameter:
                param.__class__ = nn.Parameter  # pyright: ignore[reportAttributeAccessIssue]
                gradient = param.grad
                if not param.nbytes and STATE_ON_ALL_RANKS not in vars(param):
                    vars(param)["stripped_gradient"], param.grad, gradient = gradient, None, None
                elif type(gradient) is Shard:
                    gradient.__class__ = torch.Tensor  # pyright: ignore[reportAttributeAccessIssue]
                else:
                    gradient = None
                stripped.append((param, gradient))
    return stripped


def restore(stripped: Iterable[tuple[nn.Parameter, torch.Tensor | None]]) -> None:
    """Turn the result of :func:`strip` back into shards; a gradient that the step replaced becomes one too."""
    for param, before in stripped:
        gradient = param.grad
        if gradient is not None and gradient is before:
            # It still has its row split; setting it again would double the time of this loop.
            gradient.__class__ = Shard
        elif gradient is not None:
            as_shard(gradient, param.row_split)  # type: ignore[attr-defined]
        elif "stripped_gradient" in vars(param):
            param.grad = vars(param).pop("stripped_gradient")
        param.__class__ = ShardParameter


def restore_all(params: Iterable[nn.Parameter]) -> None:
    """Turn parameters back into shards that a step which raised has left plain."""
    restore((param, None) for param in params if type(param) is nn.Parameter and "row_split" in vars(param))


def refusal(name: str, values: Any) -> ShardingError:
    """Return the error for a function called ``name`` whose arguments ``values`` contain a shard."""
    shard = next((one for one in tensors_in(values) if isinstance(one, Shard)), None)
    of = "a shard" if shard is None else f"{shard.row_split.name}, a shard"
    return ShardingError(
        f"{name} of {of}: this rank has only some of its rows. Elementwise functions, and norm, sum, mean, max and dot "
        "of all elements, work on shards. For others call full_tensor() on every rank, or work inside "
        "`with unsharded(model):`. For the rows of this rank as a plain tensor, call to_local()."
    )
