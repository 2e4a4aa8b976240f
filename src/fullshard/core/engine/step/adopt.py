"""Changes that users make to parameters between steps: adopted when a pass begins, or refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from fullshard.core.engine.step.lane import Lane
from fullshard.core.engine.step.param import ShardedParam
from fullshard.core.engine.step.precision import dtypes_of
from fullshard.core.engine.step.unit import Unit
from fullshard.core.shards import on_rows, restore_all
from fullshard.errors import ShardingError


@on_rows
def adopt_changes(units: Sequence[Unit]) -> bool:
    """Adopt parameters that were frozen, unfrozen, cast or given new memory since the last pass; no communication.

    Returns:
        True if the schedule must be rebuilt.

    Raises:
        ShardingError: A parameter was replaced, moved to another device, given a gradient hook, or only some of the
            parameters of a unit were cast.
    """
    replan = False
    restore_all(param.sharded for unit in units for param in unit.params)  # left plain by a step that raised
    for unit in units:
        if unit.unsharded or unit.summoned is not None:
            continue
        for lane in unit.lanes:
            members = unit.params_of(lane)
            for param in members:
                _check(param)
            _adopt_dtype(unit, lane, members)
            if moved := [param for param in members if param.moved]:
                _adopt_values(lane, members, moved)
        # Not under no_grad: peft freezes adapters for the duration of a reference forward.
        if torch.is_grad_enabled() and any(p.sharded.requires_grad != p.trainable for p in unit.params):
            _adopt_requires_grad(unit)
            replan = True
    return replan


def _check(param: ShardedParam) -> None:
    for module, key in param.slots:
        if module._parameters.get(key) is not param.sharded:
            raise ShardingError(
                f"{param.meta.name} was replaced by another Parameter after fully_shard (load_state_dict(assign=True), "
                f"or an assignment to {type(module).__name__}.{key}). Change values in place, or replace it "
                "before sharding."
            )
    if param.sharded._backward_hooks:
        raise ShardingError(
            f"{param.meta.name} has a gradient hook (register_hook), which would never be called: gradients arrive in "
            "the unsharded parameter. Use register_post_accumulate_grad_hook, which gets the reduced gradient, or "
            "change .grad after backward."
        )


def _adopt_dtype(unit: Unit, lane: Lane, members: Sequence[ShardedParam]) -> None:
    """Follow ``model.double()``: keep the lane in the new dtype, and compute in it unless the policy sets another."""
    dtypes = {param.sharded.dtype for param in members}
    if dtypes == {lane.shard.dtype}:
        return
    if len(dtypes) > 1 or not lane.shard.is_floating_point():
        raise ShardingError(
            f"Only some parameters of unit {unit.name} were cast after fully_shard: it holds {sorted(map(str, dtypes))}"
            f" where it was sharded as {lane.shard.dtype}. Cast the full model, or cast before fully_shard."
        )
    _check_no_accumulation(unit, lane, "cast")
    unit.reshard()
    precision = unit.policy.precision
    kept = precision.param is not None and lane.dtypes.compute != dtypes_of(precision, lane.shard, kept=False).compute
    new = dtypes_of(precision, members[0].sharded.data, kept=kept)
    _retype(lane, members, dataclasses.replace(new, shard=members[0].sharded.dtype))


def _check_no_accumulation(unit: Unit, lane: Lane, done: str) -> None:
    if lane.holds_gradient or lane.partial is not None:
        raise ShardingError(
            f"Parameters of unit {unit.name} were {done} while gradients of no_sync or no_all_reduce wait to be "
            "reduced. Finish the accumulation with a backward outside of it first."
        )


def _retype(lane: Lane, members: Sequence[ShardedParam], dtypes: object) -> None:
    values = [param.sharded.data for param in members]
    lane.retype(dtypes)  # type: ignore[arg-type]
    for param, value in zip(members, values, strict=True):
        local = param.local_view(lane.shard)
        local.copy_(value)
        param.sharded.data = local
        param.sharded.grad = (
            None if param.sharded.grad is None else param.sharded.grad.to(lane.dtypes.grad or local.dtype)
        )
        param.bind(trainable=param.trainable)
    lane.full.release()


def _adopt_values(lane: Lane, members: Sequence[ShardedParam], moved: Sequence[ShardedParam]) -> None:
    """Adopt the values of shards that were given other memory, by ``.data`` or by a cast back and forth.

    The lane moves to new memory: the old one may be a user's backup, to be restored after an evaluation.
    """
    for param in moved:
        expected = param.local_view(lane.shard)
        if (param.sharded.device, param.sharded.shape) != (expected.device, expected.shape):
            raise ShardingError(
                f"{param.meta.name} is {tuple(param.sharded.shape)} on {param.sharded.device} but was sharded as "
                f"{tuple(expected.shape)} on {expected.device}: move the model before fully_shard, or shard it for "
                "another device with fully_shard(device=…)."
            )
    with torch.no_grad():
        _retype(lane, members, lane.dtypes)


def _adopt_requires_grad(unit: Unit) -> None:
    """Freeze or unfreeze parameters; rows stay in place, so that optimizer states stay valid."""
    for lane in unit.lanes:
        members = unit.params_of(lane)
        _check_no_accumulation(unit, lane, "frozen or unfrozen")
        wanted = [param.sharded.requires_grad for param in members]
        master = lane.dtypes.master
        if any(wanted) and lane.shard.dtype != master:
            # Frozen parameters were kept in the compute dtype; from now on an optimizer updates them.
            unit.reshard()
            _retype(lane, members, dataclasses.replace(lane.dtypes, shard=master))
        for param, trainable in zip(members, wanted, strict=True):
            param.set_trainable(trainable=trainable)
    unit.count_trainable()
