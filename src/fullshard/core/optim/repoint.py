"""Pointing an optimizer that was made before sharding at the shards."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fullshard.core.layout import StatePart, elementwise
from fullshard.core.optim.shards import meta_of
from fullshard.core.shards import on_rows
from fullshard.errors import ConfigError


class Places:
    """Where a model's parameters are registered; made before ``fully_shard(model)``, on any rank, for :func:`repoint`.

    ``fully_shard`` replaces a parameter on the meta device by one with memory, while an optimizer still has the old
    one. Only weak references are kept.
    """

    def __init__(self, model: nn.Module) -> None:
        """Record where the parameters of ``model`` are registered now."""
        self.model = type(model).__name__
        self._modules = weakref.WeakSet(model.modules())
        self._registered = {
            id(param): (weakref.ref(param), weakref.ref(module), key)
            for module in model.modules()
            for key, param in module._parameters.items()
            if param is not None
        }

    def now_of(self, param: nn.Parameter) -> nn.Parameter | None:
        """Return the parameter registered in place of ``param`` now, perhaps itself; None if it is not the model's."""
        noted, home, key = self._registered.get(id(param), (None, None, ""))
        module = home() if home is not None and noted is not None and noted() is param else None
        if module is not None:
            return module._parameters[key]
        inside = any(param is one for module in self._modules for one in module._parameters.values())
        return param if inside else None


@on_rows
def repoint(optimizer: Optimizer, places: Sequence[Places]) -> None:
    """Make an optimizer that was built before sharding step the shards; on every rank, after ``fully_shard``.

    ``fully_shard`` keeps the user's Parameter objects and gives them their shard's rows, except those on the meta
    device, which it replaces. The optimizer's state is still that of the full parameters.

    Groups keep their options and their order, also where a learning rate schedule holds them. Of state of a parameter's
    shape, this rank's elements are moved to the shard's device; statistics of rows, columns or blocks are split as the
    optimizer's ``state_part`` describes; single numbers, such as ``step``, stay unchanged. Parameters that are shards
    already, or were left out of sharding, are not touched.

    Args:
        optimizer: A torch optimizer; changed in place.
        places: Of the models that together have its parameters, as they were before sharding.

    Raises:
        ConfigError: A parameter belongs to none of the models, or its state is neither elementwise nor one number;
            nothing has changed then.
    """
    old = [param for group in optimizer.param_groups for param in group["params"]]
    new = {id(p): next((now for place in places if (now := place.now_of(p)) is not None), None) for p in old}
    _refuse_strangers(optimizer, new, places)
    states = [
        (param, shard, _part_of_state(optimizer, optimizer.state[param], shard))
        for param in old
        if (shard := new[id(param)]) is not None and param in optimizer.state and hasattr(shard, "shard_meta")
    ]
    for param, shard, state in states:
        del optimizer.state[param]
        optimizer.state[shard] = state
    for group in optimizer.param_groups:
        group["params"][:] = [new[id(param)] for param in group["params"]]  # in place: some optimizers keep the list


def _refuse_strangers(optimizer: Optimizer, new: Mapping[int, nn.Parameter | None], places: Sequence[Places]) -> None:
    strangers = [
        f"number {number} of group {at}, shape {tuple(param.shape)}"
        for at, group in enumerate(optimizer.param_groups)
        for number, param in enumerate(group["params"])
        if new[id(param)] is None
    ]
    if strangers:
        more = f" and {len(strangers) - 5} more" if len(strangers) > 5 else ""
        raise ConfigError(
            f"{type(optimizer).__name__} has {len(strangers)} parameters that do not belong to the sharded "
            f"{' or '.join(place.model for place in places)}: {'; '.join(strangers[:5])}{more}. Make the optimizer "
            "from model.parameters() of the sharded model, after the last change to its modules."
        )


def _part_of_state(optimizer: Optimizer, state: Mapping[str, Any], shard: nn.Parameter) -> dict[str, Any]:
    """Return this rank's part of the state of an unsharded parameter."""
    meta = meta_of(shard)
    # An optimizer whose state is not all elementwise describes its parts, and has no state where there are no rows.
    describe: Callable[[nn.Parameter, str], StatePart | None] | None = getattr(optimizer, "state_part", None)
    if describe is not None and meta.rank not in meta.owners:
        return {}
    own: dict[str, Any] = {}
    for key, value in state.items():
        if not isinstance(value, torch.Tensor) or key == "step":
            own[key] = value
        else:
            part = describe(shard, key) if describe is not None else None
            own[key] = _own(value, part or elementwise(meta), shard, key)
    return own


def _own(value: torch.Tensor, part: StatePart, shard: nn.Parameter, key: str) -> torch.Tensor:
    """Return this rank's part of a tensor of state; single numbers, and tensors made for the shard, unchanged."""
    shape = tuple(value.shape)
    if shape == part.shape:
        own = value.detach().reshape(-1)[slice(*part.held)].view(part.local_shape)
        return own.to(shard.device, copy=own.numel() < value.numel())
    if shape in (part.local_shape, ()):
        return value
    meta = meta_of(shard)
    raise ConfigError(
        "Optimizer state can be sharded if it is one number, has the parameter's shape, or the optimizer describes "
        f"its parts; {key!r} of {meta.name} has shape {shape} and the parameter {meta.global_shape}. Make the "
        "optimizer after the model is sharded, or use one with elementwise state or one of fullshard.optim."
    )
