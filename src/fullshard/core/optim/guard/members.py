"""The known facts about an optimizer's sharded parameters, cached until its parameters change."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fullshard.core.optim.shards import is_split, meta_of

# Stored on the optimizer: parameters may refer to their optimizer, as with step_in_backward, so the entries of a
# separate table, which hold parameters, would keep both alive forever.
_NAME = "_fullshard_members"


@dataclass(frozen=True)
class Members:
    """The sharded parameters of an optimizer.

    Attributes:
        key: What the entry was computed from: for each group its parameters' identities, their units, and whether
            backward steps them.
        given: The optimizer's parameters, kept alive so that their identities are not reused.
        sharded: Those that are sharded.
        split: True if several ranks hold parts of one of them.
        units: Their units, as weak references; without parameters that are stepped in backward.
        groups: For each group, and each sharded model that it steps and whose learning rates are compared, the checksum
            of its parameters' names and the first of them.
        stripped: The shards that are made plain during a step, with their gradients.
    """

    key: list[list[object]]
    given: list[nn.Parameter]
    sharded: list[nn.Parameter]
    split: bool
    units: list[Callable[[], Any]]
    groups: list[list[tuple[int, nn.Parameter]]]
    stripped: list[tuple[nn.Parameter, torch.Tensor | None]] = field(default_factory=list)

    def __reduce__(self) -> tuple[Any, ...]:
        """Reduce to None in a copy or a pickle of the optimizer, whose parameters differ."""
        return type(None), ()


def members_of(optimizer: Optimizer) -> Members:
    """Return the facts about an optimizer's parameters; any rank, no communication."""
    key = [_identity(group["params"]) for group in optimizer.param_groups]
    known: Members | None = vars(optimizer).get(_NAME)
    if known is None or known.key != key:
        known = vars(optimizer)[_NAME] = _look_up(optimizer, key)
    return known


def _identity(params: list[nn.Parameter]) -> list[object]:
    # Runs at each step, so it builds no tuple for each parameter. Sharding again makes new units.
    attributes = list(map(vars, params))
    units = [known.get("shard_unit") for known in attributes]
    return [list(map(id, params)), units, ["shard_optimizer" in known for known in attributes]]


def members_before(optimizer: Optimizer) -> Members:
    """Return the result of :func:`members_of` from before the step, whatever the step has changed since."""
    return vars(optimizer)[_NAME]


def _look_up(optimizer: Optimizer, key: list[list[object]]) -> Members:
    given = [param for group in optimizer.param_groups for param in group["params"]]
    sharded = [param for param in given if hasattr(param, "shard_meta")]
    after_backward = (vars(p)["shard_unit"] for p in sharded if "shard_unit" in vars(p) and not _in_backward(p))
    units = {id(unit()): unit for unit in after_backward}
    groups = [_compared(group["params"]) for group in optimizer.param_groups]
    return Members(key, given, sharded, any(map(is_split, sharded)), list(units.values()), groups)


def _compared(params: list[nn.Parameter]) -> list[tuple[int, nn.Parameter]]:
    # By model: ranks may list the parameters in different orders, and so begin with different models.
    of_model: dict[int, list[nn.Parameter]] = {}
    for param in params:
        if "shard_rates" in vars(param) and not _in_backward(param):
            of_model.setdefault(id(vars(param)["shard_rates"]), []).append(param)
    return [
        (sum(zlib.crc32(meta_of(p).name.encode()) for p in compared), compared[0]) for compared in of_model.values()
    ]


def _in_backward(param: nn.Parameter) -> bool:
    return hasattr(param, "shard_optimizer")
