"""Evaluation in the parameters' own dtypes, for a model that trains in narrower ones."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from fullshard.core.engine.step.precision import Dtypes
from fullshard.core.engine.step.runtime import Runtime
from fullshard.core.engine.step.unit import Unit
from fullshard.core.policy import MixedPrecision, UnitPolicy
from fullshard.core.shards import untraced
from fullshard.core.torch_private import in_backward
from fullshard.errors import ShardingError

_NARROW: weakref.WeakKeyDictionary[Unit, tuple[UnitPolicy, list[Dtypes]]] = weakref.WeakKeyDictionary()
"""Training policy and lane dtypes of the units that currently compute in full precision."""

_BUFFERS: weakref.WeakKeyDictionary[nn.Module, dict[str, torch.dtype]] = weakref.WeakKeyDictionary()
"""The dtypes of modules' buffers in the mode that is currently off; at first, those before sharding."""


def remember_buffers(modules: Iterable[nn.Module], precision: MixedPrecision) -> None:
    """Record the dtypes of floating buffers before they are cast, if evaluation needs them."""
    for module in modules if precision.full_in_eval else ():
        floating = {key: b.dtype for key, b in module._buffers.items() if b is not None and b.is_floating_point()}
        if floating:
            _BUFFERS[module] = floating


def follow_mode(units: Sequence[Unit]) -> None:
    """Make ``units`` with ``full_in_eval`` compute in full precision while the root of their model does not train.

    The hooks run before the engine's own, which cast inputs and gather.
    """
    for unit in units:
        for module in unit.modules if unit.policy.precision.full_in_eval else ():
            module.register_forward_pre_hook(functools.partial(_follow, unit), prepend=True)


@untraced
def _follow(unit: Unit, _module: nn.Module, _args: tuple[Any, ...]) -> None:
    switch_if_due(unit.runtime)


def switch_if_due(runtime: Runtime) -> None:
    """Switch the units of a model whose mode has changed since its last forward; every rank calls it.

    Raises:
        ShardingError: Gradients wait to be reduced.
    """
    if runtime.open_calls or in_backward() or any(one.summoned or one.stays_shown for one in runtime.units):
        return
    full = not runtime.root.modules[0].training
    switching = [one for one in runtime.units if one.policy.precision.full_in_eval and full is not (one in _NARROW)]
    if not switching:
        return
    waiting = [one.name for one in switching if any(lane.holds_gradient for lane in one.lanes)]
    waiting += [one.name for one in switching if any(lane.partial is not None for lane in one.lanes)]
    if waiting:
        raise ShardingError(
            f"The model was set to {'evaluate' if full else 'train'}, in other dtypes (full_in_eval), while gradients "
            f"of no_sync or no_all_reduce wait to be reduced, in unit {waiting[0]}. Finish the accumulation first."
        )
    runtime.forward_event()
    runtime.follow_changes(switching)
    for one in switching:
        _switch(one, full=full)
    modules = {module: None for top in runtime.root.modules for module in top.modules()}
    for module in modules:
        for key, dtype in _BUFFERS.get(module, {}).items():
            buffer = module._buffers.get(key)
            if buffer is not None:
                module._buffers[key], _BUFFERS[module][key] = buffer.to(dtype), buffer.dtype


def _switch(unit: Unit, *, full: bool) -> None:
    """Gather, compute and reduce ``unit`` in its shards' own dtypes, or in those of training again."""
    unit.reshard()
    if full:
        policy, dtypes = unit.policy, [lane.dtypes for lane in unit.lanes]
        _NARROW[unit] = policy, dtypes
        own = dataclasses.replace(policy.precision, param=None, reduce=None, reduce_sum=None)
        policy = dataclasses.replace(policy, precision=own)
        dtypes = [dataclasses.replace(d, compute=d.master, reduce=d.master, reduce_sum=d.master) for d in dtypes]
    else:
        policy, dtypes = _NARROW.pop(unit)
    unit.policy = policy
    for lane, one in zip(unit.lanes, dtypes, strict=True):
        lane.retype(one)
        for param in unit.params_of(lane):
            param.bind(trainable=param.trainable)
        lane.full.release()
