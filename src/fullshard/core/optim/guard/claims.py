"""Records of what an optimizer steps, which the ranks of a sharded model compare at the end of backward.

An elementwise optimizer needs no other ranks, so no step would notice that a rank has put a parameter into another
group than the others (for instance by the size of its own rows) and decays half a matrix. The records enter the
checksum that ranks exchange anyway, so no collective is added.
"""

from __future__ import annotations

import zlib
from weakref import WeakKeyDictionary

import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from fullshard.core.layout import Claims
from fullshard.core.optim.guard.members import Members
from fullshard.core.optim.shards import meta_of
from fullshard.errors import ShardingError

_NOT_COMPARED = ("params", "param_names", "lr", "initial_lr")

_PLAIN = (bool, int, float, str, type(None))

_noted: WeakKeyDictionary[Optimizer, tuple[int, ...]] = WeakKeyDictionary()
"""Sizes of the groups that were recorded."""


def refuse_unreduced(members: Members) -> None:
    """Refuse to step while gradients of ``no_sync`` or ``no_all_reduce`` are unreduced: they would be left out.

    Raises:
        ShardingError: Some gradients are unreduced.
    """
    units = [unit for reference in members.units if (unit := reference()) is not None]
    waiting = [
        unit.name for unit in units if unit.holds_gradient or any(lane.partial is not None for lane in unit.lanes)
    ]
    if waiting:
        raise ShardingError(
            f"The optimizer would step without the gradients of {len(waiting)} units, such as {waiting[0]}: they were "
            "computed inside no_sync or no_all_reduce and wait to be summed over ranks. Run the last backward before a "
            "step outside of both."
        )


def note_claims(optimizer: Optimizer) -> None:
    """Record the sharded parameters of an optimizer and their groups, on each rank alone, without communication.

    Recorded are the numbers of groups, which distinguish learning rates, and options that are plain values except
    learning rates: at the first step, and when parameters were added. Optimizers that step in backward are left out.
    """
    sizes = tuple(len(group["params"]) for group in optimizer.param_groups)
    if _noted.get(optimizer) == sizes:
        return
    of_model: dict[int, tuple[list[Claims], Claims]] = {}
    number = 0
    for group in optimizer.param_groups:
        params = [p for p in group["params"] if hasattr(p, "shard_claims") and not _steps_in_backward(p)]
        if not params:
            continue
        options = tuple(f"{key}={value!r}" for key, value in group.items() if _is_compared(key, value))
        for param in params:
            claims: list[Claims] = param.shard_claims
            of_model.setdefault(id(claims), (claims, {}))[1][meta_of(param).name] = (number, options)
        number += 1
    for claims, new in of_model.values():
        claims.append(new)
    if of_model:
        _noted[optimizer] = sizes


def note_rates(optimizer: Optimizer, members: Members) -> None:
    """Record the learning rates of a step, which ranks compare at the end of the next backward.

    The record of a group is a product of its rate and its parameters' names, so ranks may group differently.
    """
    for group, compared in zip(optimizer.param_groups, members.groups, strict=True):
        rate = group.get("lr")
        on_device = isinstance(rate, torch.Tensor) and rate.device.type != "cpu"  # reading it would wait for the device
        if rate is None or on_device:
            continue
        for names, first in compared:
            rates: list[tuple[int, str, float]] = vars(first)["shard_rates"]
            rates.append((names * zlib.crc32(repr(float(rate)).encode()), meta_of(first).name, float(rate)))


def _steps_in_backward(param: Parameter) -> bool:
    """Return whether a parameter is stepped when its gradient arrives."""
    return hasattr(param, "shard_optimizer") or bool(param._post_accumulate_grad_hooks)


def _is_compared(key: str, value: object) -> bool:
    values = value if isinstance(value, (tuple, list)) else (value,)
    return key not in _NOT_COMPARED and all(isinstance(one, _PLAIN) for one in values)
