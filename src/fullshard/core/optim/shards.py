"""Shape, ranks and order of an optimizer's parameters; an unsharded parameter is treated as a shard of one rank."""

from __future__ import annotations

import copy
import hashlib
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, zip_longest
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fullshard.core.comm import Comm, SoloComm
from fullshard.core.layout import LaneLayout, Placement, ShardMeta
from fullshard.core.shards import rows_of
from fullshard.core.torch_private import plain_functions
from fullshard.errors import ConfigError, UserError


def meta_of(param: nn.Parameter) -> ShardMeta:
    """Return the :class:`ShardMeta` of a parameter; an unsharded one is treated as one rank's shard."""
    meta: ShardMeta | None = getattr(param, "shard_meta", None)
    if meta is not None:
        return meta
    shape = tuple(param.shape)
    row = max(1, param.numel() // shape[0] if len(shape) > 1 and shape[0] else 1)
    placement = Placement(0, 0, param.numel(), row, row)
    return ShardMeta("", (), shape, LaneLayout(1, max(1, param.numel()), (placement,)), placement, 0)


def comm_of(param: nn.Parameter) -> Comm:
    """Return the ranks that share a parameter; for an unsharded one, a group of this rank only."""
    comm: Comm | None = getattr(param, "shard_comm", None)
    return SoloComm(param.device) if comm is None else comm


def holds_rows(param: nn.Parameter) -> bool:
    """Return whether this rank holds any elements of a parameter."""
    return rows_of(param).numel() > 0


def is_split(param: nn.Parameter) -> bool:
    """Return True if several ranks hold parts of a parameter; any rank, including ranks that hold none of it."""
    meta = meta_of(param)
    return len(meta.owners) > 1 or meta.block is not None


def is_shared(param: nn.Parameter) -> bool:
    """Return True if other ranks may hold parameters, or parts of them, that this one does not."""
    meta = meta_of(param)
    return meta.layout.world_size > 1 or meta.block is not None


def everyone_of(param: nn.Parameter) -> Comm:
    """Return the ranks of a parameter's model where only a group of them shares it, else the ranks that share it."""
    everyone: Comm | None = getattr(param, "shard_everyone", None)
    return comm_of(param) if everyone is None else everyone


def by_comm(
    params: Iterable[nn.Parameter], of: Callable[[nn.Parameter], Comm] = comm_of
) -> list[tuple[Comm, list[nn.Parameter]]]:
    """Return the sharded parameters by the ranks that share them, in an order that is the same on every rank."""
    groups: dict[int, tuple[Comm, list[nn.Parameter]]] = {}
    for param in params:
        if hasattr(param, "shard_comm"):
            comm = of(param)
            groups.setdefault(id(comm), (comm, []))[1].append(param)
    return list(groups.values())


def require_same_parameters(comm: Comm, params: Sequence[nn.Parameter], what: str) -> None:
    """Refuse an optimizer whose parameters or their order differ between ranks. Every rank calls it once.

    Ranks in a common collective must agree on its parameters.

    Args:
        comm: The ranks that share ``params``.
        params: The optimizer's parameters, in its order.
        what: The optimizer, for messages.

    Raises:
        ConfigError: They differ; on every rank.
    """
    if params and all(hasattr(param, "shard_optimizer") for param in params):
        return  # stepped in backward, without communication
    names = [meta_of(param).name for param in params]
    digest = hashlib.sha256("\n".join(names).encode()).hexdigest()
    if len(set(comm.all_gather_object(digest))) > 1:
        by_rank = comm.all_gather_object(names)
        counts = ", ".join(f"rank {rank}: {len(of_rank)}" for rank, of_rank in enumerate(by_rank))
        rank, at = _first_difference(by_rank)
        here, there = (of_rank[at] if at < len(of_rank) else "none" for of_rank in (by_rank[0], by_rank[rank]))
        raise ConfigError(
            f"{what} needs the same parameters in the same order on every rank, also those of which a rank holds no "
            f"rows; it has ({counts}), and number {at} is {here} on rank 0 and {there} on rank {rank}. Give it "
            "model.parameters() on every rank, and do not filter or group by p.shape."
        )


def _first_difference(by_rank: Sequence[Sequence[str]]) -> tuple[int, int]:
    """Return the first rank with other names than rank 0, and the index of the first name that differs."""
    rank = next(rank for rank, names in enumerate(by_rank) if names != by_rank[0])
    pairs = zip_longest(by_rank[0], by_rank[rank])
    return rank, next(number for number, (one, other) in enumerate(pairs) if one != other)


def require_model(model: object, what: str) -> None:
    """Refuse a model's parameters where the model itself is required.

    Raises:
        ConfigError: ``model`` is not a module.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"{what} takes the model itself, because it reads module and parameter names; got a "
            f"{type(model).__name__}. Pass the model, not model.parameters()."
        )


class RowsOptimizer(Optimizer):
    """An optimizer of fullshard, whose step computes with this rank's rows as plain tensors."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as torch's optimizers do.

        Raises:
            ConfigError: Tensor parallelism divides one of its parameters, of which the step would need more.
        """
        super().add_param_group(param_group)
        for param in self.param_groups[-1]["params"]:
            meta = meta_of(param)
            if meta.block is not None:
                raise ConfigError(
                    f"{type(self).__name__} computes with rows, columns or blocks of full parameters, and tensor "
                    f"parallelism divides {meta.name} {meta.global_shape} over {meta.block.count} ranks. Use an "
                    "elementwise optimizer of torch, such as torch.optim.AdamW."
                )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update all parameters that have a gradient; every rank calls it, also without gradients.

        Args:
            closure: Computes the loss and the gradients; called once, before anything else, with gradients enabled.

        Returns:
            The result of ``closure``; None without one.

        Raises:
            ConfigError: An optimizer that communicates has other parameters on other ranks, on every rank; or a
                gradient is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with plain_functions():
            self._update_all()
        return loss

    @abstractmethod
    def _update_all(self) -> None:
        """Step all parameters that have a gradient."""

    def _params(self) -> Iterator[nn.Parameter]:
        return chain.from_iterable(group["params"] for group in self.param_groups)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy the parameters too, marked as the shards that they are.

        torch copies a Parameter without its attributes: an optimizer would then step this rank's rows of a matrix as
        if they were the full matrix.
        """
        for param in self._params():
            marked = vars(param)
            marks = {key: marked[key] for key in ("shard_meta", "shard_comm", "row_split") if key in marked}
            vars(copy.deepcopy(param, memo)).update(marks)
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        made.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return made


def refuse_torch_options(group: Mapping[str, Any], what: str, error: type[UserError] = ConfigError) -> None:
    """Refuse options of torch's AdamW that an optimizer does not implement.

    Args:
        group: A parameter group, given, loaded or saved.
        what: The optimizer, for messages.
        error: The error to raise.
    """
    on = [key for key in ("maximize", "amsgrad") if group.get(key)]
    if on:
        raise error(
            f"{what} does not implement {' or '.join(on)}; a parameter group has {on[0]}=True. Remove the option."
        )


def as_rows(meta: ShardMeta, local: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return this rank's elements of a parameter as full rows of its last dimension, zeros where others hold the rest.

    Args:
        meta: Of the parameter, which has two dimensions or more.
        local: This rank's elements, in any shape.

    Returns:
        The rows, (n, global_shape[-1]), a view of ``local`` if it consists of full rows, and the index of the first one
        among all ``numel / global_shape[-1]`` rows.
    """
    width = meta.global_shape[-1]
    start, stop = meta.element_range
    first, last = start // width, -(-stop // width)
    if start % width == 0 and stop % width == 0:
        return local.reshape(-1, width), first
    rows = local.new_zeros((last - first) * width)
    rows[start - first * width : stop - first * width] = local.reshape(-1)
    return rows.view(-1, width), first
