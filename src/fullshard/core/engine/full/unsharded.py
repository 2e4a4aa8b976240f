"""Units that stay unsharded: for a context, or until the next pass; full parameters are in the compute dtype."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn

from fullshard.core.engine.registry import runtime_of
from fullshard.core.engine.step.runtime import Runtime
from fullshard.core.engine.step.unit import Keep, Unit
from fullshard.core.engine.tables.table_lane import request_tables
from fullshard.core.torch_private import in_backward
from fullshard.errors import ShardingError


@contextmanager
def unsharded(model: nn.Module, *, write_back: bool = True) -> Iterator[None]:
    """Show full parameters, in the compute dtype, on every rank; all ranks enter it together.

    Changes of parameters made inside, in place or by ``p.data = x``, are kept: each rank keeps its own rows, so write
    the same values on every rank. Memory: the gathered model.

    Args:
        model: A sharded model.
        write_back: Whether changes are kept; if not, they are lost and nothing is compared at the end.

    Raises:
        ShardingError: Entered during backward, or while full parameters are shown already.
    """
    runtime = runtime_of(model)
    if in_backward():
        raise ShardingError("unsharded(model) cannot be entered during backward: it gathers and frees units itself.")
    if any(unit.summoned for unit in runtime.units):
        raise ShardingError("unsharded(model) cannot be entered while full parameters are shown already.")
    runtime.forward_event()
    runtime.follow_changes()
    outermost = Keep.CONTEXT not in runtime.root.keep
    order = _Order(runtime)
    with _kept(runtime, runtime.units, Keep.CONTEXT) as entered:
        for unit in runtime.units:
            unit.settle()  # writes inside the context must not reach a rank that still reads
        for unit in entered:
            for param in unit.params:
                param.full.__class__ = param.plain_class  # writes inside the context are kept, by whatever means
            for lane in unit.lanes if outermost and write_back else ():
                lane.expect_writes()
        try:
            yield
        finally:
            if outermost:
                order.restore()
            for unit in runtime.units if outermost and write_back else ():
                _write_back(unit)


@contextmanager
def root_unsharded(model: nn.Module) -> Iterator[None]:
    """Keep the root unit unsharded between the forwards of a generation loop; all ranks enter it together.

    ``generate`` of a sharded model enters it. Without effect where the root shows full parameters already.
    """
    runtime = runtime_of(model)
    root = runtime.root
    runtime.forward_event()
    if root.summoned is not None:
        yield
        return
    if not root.stays_unsharded:
        root.reshard()  # the gathered values may be older than the shards
        runtime.follow_changes([root])
    with _kept(runtime, [root], Keep.GENERATION):
        yield


@contextmanager
def _kept(runtime: Runtime, units: Iterable[Unit], reason: Keep) -> Iterator[list[Unit]]:
    """Gather ``units`` and keep them unsharded for ``reason``; yield those that were not kept for it before."""
    entered = [unit for unit in units if reason not in unit.keep]
    for unit in units:
        request_tables(unit)
        runtime.gather(unit)
    for unit in entered:
        unit.keep.add(reason)
    try:
        yield entered
    finally:
        for unit in entered:
            unit.keep.discard(reason)
        for unit in entered:
            if not unit.open_calls:
                runtime.release(unit)


def unshard(unit: Unit) -> None:
    """Start the gather of a unit for the user; it is kept until the next pass begins. Every rank calls it."""
    runtime = unit.runtime
    request_tables(unit)
    if in_backward():
        runtime.issue_gather(unit)
        return
    runtime.forward_event()
    if not runtime.open_calls and not unit.stays_unsharded and not runtime.unchanged([unit]):
        unit.reshard()  # the gathered values may be older than the shards
    runtime.issue_gather(unit)
    unit.keep.add(Keep.NEXT_PASS)


def reshard(unit: Unit) -> None:
    """Free the full parameters of a unit for the user. Every rank calls it.

    Raises:
        ShardingError: Its forward is running.
    """
    if unit.open_calls:
        raise ShardingError(f"reshard() inside unit {unit.name}'s own forward would free what it computes with.")
    unit.keep.discard(Keep.NEXT_PASS)
    unit.runtime.release(unit)


class _Order:
    """The order of units that ranks compare and prefetch by. Without gathers, a rank may run forwards alone.

    Afterwards the order is restored, also on ranks that ran none, so that all agree again.
    """

    def __init__(self, runtime: Runtime) -> None:
        """Keep the order of ``runtime``."""
        self._runtime = runtime
        schedule = runtime.schedule
        self._first_pass = runtime.agreement.first_pass
        self._kept = schedule.checksum, schedule.last, dict(schedule.following), set(schedule.gathered)

    def restore(self) -> None:
        """Forget the calls since then, except for what their backward needs."""
        schedule = self._runtime.schedule
        self._runtime.agreement.first_pass = self._first_pass
        schedule.checksum, schedule.last, schedule.following, schedule.gathered = self._kept


def _write_back(unit: Unit) -> None:
    """Copy what differs in the gathered parameters into this rank's shards, element by element.

    Raises:
        ShardingError: A parameter was replaced instead of changed.
    """
    for param in unit.params:
        if any(module._parameters.get(key) is not param.full for module, key in param.slots):
            raise ShardingError(
                f"{param.meta.name} was replaced by another Parameter inside unsharded(model); change its "
                "values in place (param.copy_, param.data.copy_) instead."
            )
    _take_assigned(unit)
    for lane in unit.lanes:
        lane.write_back()


def _take_assigned(unit: Unit) -> None:
    """Move values that ``param.data = x`` put elsewhere into the gathered memory, and point the parameters at it.

    Raises:
        ShardingError: They have another shape or dtype.
    """
    other = []
    for param in unit.params:
        if param.plain_class is not nn.Parameter:
            continue  # made by its class, without memory of its own
        place = param.lane.full_view(param.place)
        given = param.full.data
        if given.data_ptr() == place.data_ptr() and given.dtype == place.dtype:
            continue
        param.full.data = place
        if given.shape == place.shape and given.dtype == place.dtype:
            place.copy_(given)
        else:
            other.append(f"{param.meta.name} ({tuple(given.shape)}, {given.dtype})")
    if other:
        raise ShardingError(
            f"{', '.join(other)}: given another shape or dtype inside unsharded(model). Keep both; cast a model before "
            "fully_shard, or with mp_policy."
        )
