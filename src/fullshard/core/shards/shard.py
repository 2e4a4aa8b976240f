"""The class of shards between passes, and ways around it for code that computes with rows."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from fullshard.core.shards.cut import Cut, tensors_in
from fullshard.core.shards.gather import gather_full
from fullshard.core.shards.untraced import untraced
from fullshard.core.torch_private import lists_of_fast_types, plain_functions
from fullshard.errors import ShardingError

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
        cut: Which rows these are, and of which ranks' tensor.
    """

    cut: Cut
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
                if any(one.cut.comm.size > 1 for one in tensors_in((args, kwargs)) if isinstance(one, Shard)):
                    raise
                return func(*args, **(kwargs or {}))  # a group of one rank: its rows are the full tensor

    def full_tensor(self) -> torch.Tensor:
        """Return the full tensor, on the device of collectives, without autograd; every rank calls it.

        Raises:
            ShardingError: The elements were picked by a mask, or form a vector of several shards.
        """
        rows, shape = rows_of(self), self.cut.full_shape(self)
        if shape is None or self.cut.parts:
            raise refusal("full_tensor", (self,))
        return gather_full(self.cut.comm, shape, self.cut.first_element(rows), rows.reshape(-1))

    def to_local(self) -> torch.Tensor:
        """Return this rank's rows, (rows here, *rest), as a plain tensor of the same memory, without autograd."""
        return rows_of(self)

    @property
    def global_shape(self) -> tuple[int, ...]:
        """Shape of the full tensor.

        Raises:
            ShardingError: It is not known, because a mask picked the elements.
        """
        with plain_functions():
            shape = self.cut.full_shape(self)
        if shape is None:
            raise refusal("global_shape", (self,))
        return shape

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """Return a shard in memory of its own."""
        with plain_functions():
            return as_shard(self.detach().clone(), self.cut)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be pickled: the file would look like the full tensor.

        Raises:
            ShardingError: Always.
        """
        raise ShardingError(
            f"{self.cut.name} is a shard, this rank's rows, and pickling (torch.save) would save only these. Save what "
            "full_tensor() returns, which every rank calls, or use fullshard.save(model, directory)."
        )

    def __repr__(self, *, tensor_contents: object = None) -> str:
        """Show the rows here and their place in the full tensor."""
        rows = rows_of(self)
        full = self.cut.full_shape(rows)
        what = f"{tuple(rows.shape)} from row {self.cut.first}, of {full}" if full else f"{tuple(rows.shape)}"
        return f"Shard({self.cut.name}, {what}, {rows})"


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


def as_shard(rows: torch.Tensor, cut: Cut) -> torch.Tensor:
    """Turn ``rows``, a plain tensor, into a shard: the same object. Tensors of other classes are unchanged."""
    if type(rows) is torch.Tensor:
        rows.__class__ = Shard
    if isinstance(rows, Shard):
        rows.cut = cut
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
            gradient.__class__ = Shard  # it still has its cut; setting it again would double the time of this loop
        elif gradient is not None:
            as_shard(gradient, param.cut)  # type: ignore[attr-defined]
        elif "stripped_gradient" in vars(param):
            param.grad = vars(param).pop("stripped_gradient")
        param.__class__ = ShardParameter


def restore_all(params: Iterable[nn.Parameter]) -> None:
    """Turn parameters back into shards that a step which raised has left plain."""
    restore((param, None) for param in params if type(param) is nn.Parameter and "cut" in vars(param))


def refusal(name: str, values: Any) -> ShardingError:
    """Return the error for a function called ``name`` whose arguments ``values`` contain a shard."""
    shard = next((one for one in tensors_in(values) if isinstance(one, Shard)), None)
    of = "a shard" if shard is None else f"{shard.cut.name}, a shard"
    return ShardingError(
        f"{name} of {of}: this rank has only some of its rows. Elementwise functions, and norm, sum, mean, max and dot "
        "of all elements, work on shards. For others call full_tensor() on every rank, or work inside "
        "`with unsharded(model):`. For the rows of this rank as a plain tensor, call to_local()."
    )
