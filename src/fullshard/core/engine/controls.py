"""Queries and settings of a sharded model, for users."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from fullshard.core.comm import Mesh
from fullshard.core.engine.full.state import ranks_of
from fullshard.core.engine.full.table import UnitTable, unit_table
from fullshard.core.engine.registry import runtime_of
from fullshard.core.engine.step.recorder import StepRecorder
from fullshard.core.engine.tables.table_lane import TableLane
from fullshard.core.engine.timeline import Recorder


def units(model: nn.Module) -> UnitTable:
    """Return the unit table of a sharded model; any rank, no communication."""
    runtime = runtime_of(model)
    return unit_table(runtime.units, runtime.mesh.shard_group.size)


def check_wrapped(model: nn.Module) -> None:
    """Raise an error now, instead of at the first forward, if ``wrap="auto"`` found no blocks; any rank.

    Raises:
        WrapError: The entire model is one unit, and the user did not ask for that.
    """
    unwrapped = runtime_of(model).unwrapped
    if unwrapped is not None:
        raise unwrapped


def memory_summary(model: nn.Module) -> dict[str, int]:
    """Return the bytes of this rank's part of a sharded model; no communication.

    Returns:
        ``parameters`` (shards now), ``gradients`` (of the shards, now), ``gathered_peak`` (most gathered buffers at
        once so far) and ``gradient_buffer_peak`` (most unsharded gradients at once so far).
    """
    runtime = runtime_of(model)
    grads = [p.sharded.grad for _, p in runtime.all_params() if p.sharded.grad is not None]
    return {
        "parameters": runtime.tracker.live["shards"],
        "gradients": sum(g.nbytes for g in grads),
        "gathered_peak": runtime.tracker.peak["gathered"],
        "gradient_buffer_peak": runtime.tracker.peak["gradients"],
    }


@contextmanager
def record(model: nn.Module) -> Iterator[Recorder]:
    """Record a step or part of one; any rank, no communication.

    Yields:
        The recorder; its ``events`` and ``samples`` are filled when the context exits.
    """
    runtime = runtime_of(model)
    recorder = Recorder(runtime.device.device, runtime.tracker, {u.name: u.gradient_bytes() for u in runtime.units})
    runtime.watch(recorder)
    try:
        yield recorder
    finally:
        runtime.watch(StepRecorder())
        recorder.stop()


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Accumulate gradients without communication: backward adds to unsharded gradients and reduces nothing.

    Saves reduce-scatters at the price of an unsharded gradient of every unit. The first backward after the context
    reduces the sum. All ranks enter it together. Accumulated gradients are not in ``.grad``: ``zero_grad()`` does not
    discard them, ``reset(model)`` does.
    """
    runtime = runtime_of(model)
    before, runtime.reduces_gradients = runtime.reduces_gradients, False
    try:
        yield
    finally:
        runtime.reduces_gradients = before


@contextmanager
def no_all_reduce(model: nn.Module) -> Iterator[None]:
    """Accumulate gradients inside the shard group (hybrid strategies); every rank enters it around the same backwards.

    Gradients are reduce-scattered as always, but summed over replicas only in the first backward outside: one
    all-reduce for several micro-batches, at the price of one shard of gradients. Without replicas it has no effect.
    """
    runtime = runtime_of(model)
    before, runtime.reduces_across = runtime.reduces_across, runtime.mesh.replica_group.size == 1
    try:
        yield
    finally:
        runtime.reduces_across = before


def unreduced(model: nn.Module) -> list[str]:
    """Return the names of units whose gradients wait to be reduced or summed over replicas; no communication."""
    waiting = (
        unit
        for unit in runtime_of(model).units
        if unit.holds_gradient or any(lane.partial is not None for lane in unit.lanes)
    )
    return [unit.name for unit in waiting]


def mesh_of(model: nn.Module) -> Mesh:
    """Return the ranks that share a sharded model; of a tensor parallel one, all that have parts of it."""
    return ranks_of(runtime_of(model))


def has_tables_at_home(model: nn.Module) -> bool:
    """Return whether tokens may travel to rows of tables; the same on every rank."""
    return any(isinstance(lane, TableLane) for unit in runtime_of(model).units for lane in unit.lanes)


def reset(model: nn.Module) -> None:
    """Discard what a failed forward or backward left behind; every rank calls it. The next root forward does so too."""
    runtime_of(model).reset()
    warnings.warn("The model was reset: gradients of the failed step are gone, shards are unchanged.", stacklevel=2)
