"""What a sharded model knows beside its units: the schedule, the collectives' order, the end of backward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from fullshard.comm import Device, Mesh
from fullshard.engine.step.adopt import adopt_changes, check_nothing_was_added
from fullshard.engine.step.agreement import Agreement
from fullshard.engine.step.buffers import Account
from fullshard.engine.step.param import ShardedParam
from fullshard.engine.step.plain_modules import is_plain_embedding
from fullshard.engine.step.recorder import Kind, Recorder
from fullshard.engine.step.schedule import Action, Call, Schedule, Verb, no_graph
from fullshard.engine.step.torch_private import call_after_backward, in_backward
from fullshard.engine.step.unit import State, Unit
from fullshard.errors import MismatchError, ProcessGroupError, ShardingError, WrapError
from fullshard.policy import Prefetch


class Runtime:
    """The executor of one sharded model's schedule on one rank.

    Attributes:
        mesh: The ranks that share the model.
        units: Root first.
        prefetch: What is gathered ahead, and when.
        account: Bytes of the engine's buffers.
        device: What the units compute on.
        syncing: False inside ``no_sync``: gradients stay unsharded and are added up.
        across: False inside ``no_all_reduce``: gradients are added up inside the shard group only.
        recorder: Told what happens while a step is recorded.
    """

    def __init__(
        self,
        units: list[Unit],
        mesh: Mesh,
        prefetch: Prefetch,
        account: Account,
        device: Device,
        ignored: frozenset[int],
    ) -> None:
        """Start with every unit sharded; ``ignored`` are the ids of the parameters left out."""
        self.units = units
        self.mesh = mesh
        self.prefetch = prefetch
        self.account = account
        self.device = device
        self.syncing = True
        self.across = True
        self.recorder: Recorder | None = None
        self.ignored = ignored
        self.unwrapped: WrapError | None = None  # why this is no whole model; nothing of the kind for most
        self.state_dict: tuple[Callable[..., Any], Callable[..., Any]] | None = None  # who answers in its place
        self.agreement = Agreement(mesh, [unit.name for unit in units])
        for _, param in self.all_params():
            param.sharded.shard_claims = self.agreement.claims  # type: ignore[attr-defined]
        self.open_calls: list[Call] = []
        self._reducing: Unit | None = None
        self._in_backward = False
        self._guarded = False
        inspected = _looked_at_from_outside(self.root)
        self._guardable = [param for _, param in self.all_params() if param.slots[0][0] not in inspected]
        for index, unit in enumerate(units):
            unit.index = index
            unit.runtime = self
            unit.watch_gradients(self.on_arrival, self.on_complete)
        self.schedule = Schedule(
            [unit.trainable for unit in units],
            root=0,
            keeps_after_forward=[unit.index for unit in units if unit.policy.strategy.keeps_after_forward],
            # Of a unit that is more than the embedding itself, something else may read the weight.
            unread=[unit.index for unit in units[1:] if all(map(is_plain_embedding, unit.modules))],
            prefetch=prefetch,
            names=[unit.name for unit in units],
        )
        self.follow_units()

    @property
    def root(self) -> Unit:
        """The unit of the model itself."""
        return self.units[0]

    def perform(self, actions: Iterable[Action]) -> None:
        """Do what the schedule says, in order."""
        for verb, index in actions:
            unit = self.units[index]
            if verb is Verb.GATHER:
                self.gather(unit)
            elif verb is Verb.PREFETCH:
                self._issue(unit)
            elif verb is Verb.HIDE:
                if not unit.held:
                    unit.hide()
            elif verb is Verb.RESHARD:
                self.release(unit)
            elif verb is Verb.REDUCE or unit.holds_gradient:
                self._reduce(unit, final=verb is Verb.REDUCE)

    def release(self, unit: Unit) -> None:
        """Free the unit's full parameters, unless something wants them kept."""
        if unit.held:
            return
        if unit.pinned or (unit.keeps_after_backward and self._in_backward):
            unit.hide()
        else:
            unit.reshard()

    def gather(self, unit: Unit, *, whole: bool = False) -> None:
        """Have the unit's full parameters in place; ``whole``: also those that backward has parted with."""
        self._issue(unit, whole=whole)
        unit.finish_gather()

    def need(self, unit: Unit, param: ShardedParam) -> None:
        """Backward computes with ``param`` now; normally it is there."""
        if not unit.shown or param.lane in unit.parted:
            self.backward_event()
            self.gather(unit, whole=True)

    def read_for_the_last_time(self, unit: Unit, param: ShardedParam) -> None:
        """Backward has used ``param``: give a table's memory back, before its gradient takes as much."""
        wanted = unit.held or unit.pinned or unit.keeps_after_backward
        if param.watched and param.reads == 0 and not param.plain_use and not wanted:
            unit.part_with(param)

    def _issue(self, unit: Unit, *, whole: bool = False) -> None:
        if unit.lacks(whole=whole):
            self.agreement.before("all-gather", unit.index)
            unit.issue_gather()

    def _reduce(self, unit: Unit, *, final: bool) -> None:
        if not self.syncs(unit):
            return
        if unit.index not in self.schedule.with_input_node:  # nothing else tells that its backward is over
            self.ends(unit, "backward")
        self._finish_reducing()
        self.agreement.before("reduce-scatter", unit.index)
        unit.issue_reduce(across=self.across and unit.across, final=final)
        self._reducing = unit

    def _finish_reducing(self) -> None:
        if self._reducing is not None:
            # The all-reduce across replicas may start only now, when another unit was announced since.
            self.mesh.announce(f"reduce-scatter of unit {self._reducing.name}")
            self._reducing.finish_reduce()
            self._reducing = None

    # What is said about single units after they were sharded

    def follow_units(self) -> None:
        """Take over which units stay after forward and what they gather ahead."""
        for unit in self.units:
            if unit.keeps_after_forward:
                self.schedule.keeps_after_forward |= {unit.index} - self.schedule.unread
            elif unit.keeps_after_forward is not None:
                self.schedule.keeps_after_forward -= {unit.index}
            for when, lists in (("forward", self.schedule.forward_lists), ("backward", self.schedule.backward_lists)):
                if when in unit.ahead:
                    lists[unit.index] = [one.index for one in unit.ahead[when] if one.runtime is self]

    def syncs(self, unit: Unit) -> bool:
        """Whether the gradients of ``unit`` are reduced."""
        return self.syncing and unit.syncing

    def unshard(self, unit: Unit) -> None:
        """Start the gather of ``unit`` because the user asks; what is gathered is kept to the next pass."""
        if not in_backward():
            self.forward_event()
            if not self.open_calls and not unit.held and not self._kept([unit]):
                unit.reshard()  # what is gathered may be older than the shards
        self._issue(unit)
        unit.fresh = True

    def reshard(self, unit: Unit) -> None:
        """Free the full parameters of ``unit`` because the user asks.

        Raises:
            ShardingError: Its forward runs.
        """
        if unit.open_calls:
            raise ShardingError(f"reshard() inside unit {unit.name}'s own forward would free what it computes with.")
        unit.fresh = False
        self.release(unit)

    def _kept(self, units: Iterable[Unit]) -> list[Unit]:
        """Those of ``units`` whose gathered parameters are to be kept and are still those of all ranks' shards."""
        asked = [unit for unit in units if unit.fresh and not unit.held]
        changed = self.agreement.on_any_rank([unit.has_changed() for unit in asked])
        return [unit for unit, is_stale in zip(asked, changed, strict=True) if not is_stale]

    # Events

    def begin_pass(self) -> None:
        """The root's forward starts, outside backward.

        Raises:
            WrapError: The engine was to choose the units and found none.
            ShardingError: Parameters were changed in a way that cannot be followed.
        """
        if self.unwrapped is not None:
            raise self.unwrapped
        self.guard_shards(on=False)  # of a forward that was interrupted
        self.open_calls.clear()
        kept = self._kept(self.units)
        for unit in self.units:
            unit.open_calls, unit.group_call = 0, None
            # A wrong guess of the schedule, an exception, or a forward that saw no backward: what was gathered then may
            # be older than the shards by now.
            if unit in kept:
                unit.hide()
            else:
                self.release(unit)
            unit.fresh = False
        if adopt_changes(self.units):
            self.replan()
        if self.agreement.first_pass and not any(unit.whole for unit in self.units):
            check_nothing_was_added(self.root.modules, self.all_params(), self.ignored)
        self.guard_shards(on=True)
        self.schedule.pass_begins()

    def guard_shards(self, *, on: bool) -> None:
        """Refuse what computes with shards while the root's forward runs, where only full parameters are meant."""
        if on is not self._guarded:
            self._guarded = on
            for param in self._guardable:
                param.guard_shard(on=on)

    def replan(self) -> None:
        """Parameters were frozen, unfrozen or cast: schedule what is there now, from the next pass on."""
        key = bytes(param.trainable for _, param in self.all_params())
        self.schedule.replan([unit.trainable for unit in self.units], key)

    def close_groups(self, until: Call | None = None, last: Call | None = None) -> None:
        """End the calls of units of several modules that no longer run, the innermost first.

        Args:
            until: Do not end this call, nor those around it.
            last: End this one as well, and none around it.
        """
        while self.open_calls:
            call = self.open_calls[-1]
            unit = self.units[call.unit]
            if call is until or unit.group_call is not call or unit.open_calls:
                return
            self.open_calls.pop()
            unit.group_call = None
            call.graph = call.graph or no_graph
            self.perform(self.schedule.forward_ends(call, needs_backward=unit.group_needs_backward))
            if call is last:
                return

    def abandon(self, unit: Unit) -> None:
        """A call of ``unit`` failed: forget it and what was open inside, and show no full parameters."""
        while self.open_calls:
            call = self.open_calls.pop()
            inner = self.units[call.unit]
            inner.group_call = None
            inner.open_calls = max(0, inner.open_calls - 1)
            self.schedule.forward_ends(call, needs_backward=False)
            self._release_after_failure(inner)
            if inner is unit:
                break
        if unit is self.root:
            self.guard_shards(on=False)
            for each in self.units:
                each.open_calls = 0
                self._release_after_failure(each)

    def _release_after_failure(self, unit: Unit) -> None:
        """Release ``unit``; where ranks have parted its gather fails too, and the first error is on its way already."""
        with contextlib.suppress(MismatchError, ProcessGroupError):
            self.release(unit)

    def refresh(self, unit: Unit) -> None:
        """Called outside a pass: what forward kept for a backward may be older than the shards."""
        if unit.state is State.GATHERED and not unit.shown and not unit.held:
            unit.reshard()

    def forward_event(self) -> None:
        """Any forward outside backward: a backward that did not come to its end was given up."""
        if self._in_backward:
            self.reset()

    def end_pass(self, *, training: bool) -> None:
        """The root's forward is over."""
        self.guard_shards(on=False)
        self.schedule.pass_ends()
        self.drop_guesses()
        if not training:
            self.agreement.pass_is_over()

    def drop_guesses(self) -> None:
        """The outermost call is over: weights may change before what was gathered for nothing is wanted."""
        for unit in self.units:
            if unit.state is State.GATHERING and not unit.fresh:
                self.release(unit)

    def backward_event(self) -> None:
        """Any sign of backward: make sure that its end will be noticed."""
        if not self._in_backward:
            self._in_backward = True
            for unit in self.units:
                unit.begin_backward()
            call_after_backward(self.end_backward)

    def on_arrival(self, unit: Unit, param: ShardedParam) -> None:
        """Autograd has accumulated the gradient of ``param``."""
        if param.full.grad is not None:
            self.receive(unit, param, lambda: unit.add_gradient(param))

    def receive(self, unit: Unit, param: ShardedParam, write: Callable[[], None]) -> None:
        """Have ``write`` put a gradient of ``param`` into its lane."""
        self.backward_event()
        # At most one unit's unsharded gradients exist: the one before must be out before this one is allocated.
        if param.lane.gradient is None or unit.reducing:
            self._finish_reducing()
        write()
        param.arrived = True

    def on_complete(self, unit: Unit, param: ShardedParam) -> None:
        """Every use of ``param`` has given its gradient: reduce the unit if that completes it."""
        if self._in_backward and unit.note_complete(param):
            self.perform(self.schedule.all_arrived(unit.index))

    def end_backward(self) -> None:
        """Autograd is done: issue what is still due, wait for it, and leave every unit sharded."""
        self.perform(self.schedule.sweep())
        for unit in reversed(self.units):
            if unit.holds_gradient:  # outside the plan, or late
                self._reduce(unit, final=False)
        self._finish_reducing()
        for unit in self.units:
            if self.syncs(unit) and self.across and unit.across:
                unit.finish_partial()
        self.device.host_ready()
        for unit in self.units:
            unit.call_owed_hooks()
        if any(map(self.syncs, self.units)):
            self._settle_unused()
        for unit in self.units:
            self.ends(unit, "backward")
            unit.note_gradients()
            unit.end_backward(synced=self.syncs(unit))
            unit.pinned = False
            unit.fresh = unit.keeps_after_backward
            self.release(unit)
        self.schedule.reset()
        self._in_backward = False

    def _settle_unused(self) -> None:
        """Take back the zero gradients of parameters that no rank used, as an unsharded run would leave them None."""
        params = list(self.all_params())
        used = self.agreement.after_backward([p.arrived or not p.trainable for _, p in params], self.schedule.checksum)
        if used is None:
            return
        for (unit, param), is_used in zip(params, used, strict=True):
            if param.trainable and not param.arrived:
                if not is_used and not param.had_gradient:
                    param.sharded.grad = None
                elif is_used and param.has_gradient_hooks and self.syncs(unit):
                    param.call_gradient_hooks()

    def reset(self) -> None:
        """Drop everything a failed step left behind; shards and reduced gradients stay."""
        self.open_calls.clear()
        self._in_backward = False
        for unit in self.units:
            unit.open_calls, unit.group_call = 0, None
            unit.drop_gradients()
            unit.pinned = unit.fresh = False
            self.release(unit)
        self._reducing = None
        self.schedule.reset()

    # The record of a step

    def begins(self, unit: Unit, kind: Kind) -> None:
        """Record, while a step is recorded, that ``unit`` begins something."""
        if self.recorder is not None:
            self.recorder.begin(unit.name, kind)

    def ends(self, unit: Unit, kind: Kind) -> None:
        """Record, while a step is recorded, that it is over."""
        if self.recorder is not None:
            self.recorder.end(unit.name, kind)

    def watch(self, recorder: Recorder | None) -> None:
        """Tell ``recorder`` what happens from now on; None: nobody is told."""
        self.recorder = recorder
        self.account.watch = None if recorder is None else recorder.sample
        for unit in self.units:
            unit.recorder = recorder

    # What other code asks

    def all_params(self) -> Iterable[tuple[Unit, ShardedParam]]:
        """Every sharded parameter with its unit, root first."""
        return ((unit, param) for unit in self.units for param in unit.params)

    def __deepcopy__(self, memo: dict[int, Any]) -> Runtime:
        """Refuse, as :meth:`Unit.__deepcopy__` does."""
        self.root.__deepcopy__(memo)
        return self


def _looked_at_from_outside(root: Unit) -> set[nn.Module]:
    """Modules whose parameters a container asks about in its own forward without computing with them.

    torch's encoder goes another way where one of its layers' parameters has a ``__torch_function__``.
    """
    encoders = (m for top in root.modules for m in top.modules() if isinstance(m, nn.TransformerEncoder))
    return {module for encoder in encoders for module in encoder.modules()}
