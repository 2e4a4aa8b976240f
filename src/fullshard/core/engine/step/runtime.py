"""Executes the schedule of one sharded model on one rank, and detects the end of backward."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from torch import nn

from fullshard.core.comm import Device, Mesh
from fullshard.core.engine.step.adopt import adopt_changes
from fullshard.core.engine.step.agreement import Agreement
from fullshard.core.engine.step.lane import BufferTracker, LaneState
from fullshard.core.engine.step.param import ShardedParam
from fullshard.core.engine.step.recorder import StepRecorder
from fullshard.core.engine.step.schedule import Action, Call, Schedule, Verb, no_graph
from fullshard.core.engine.step.unit import Keep, Unit, is_plain_embedding
from fullshard.core.policy import Prefetch
from fullshard.core.torch_private import call_after_backward
from fullshard.errors import MismatchError, ProcessGroupError, WrapError


class Runtime:
    """The executor of one sharded model's schedule on one rank.

    Attributes:
        units: Root first.
        mesh: The ranks that share the model.
        prefetch: Which units are gathered ahead, and when.
        tracker: Bytes of the engine's buffers.
        device: The device that units compute on.
        ignored: Ids of the parameters left out of sharding.
        reduces_gradients: False inside ``no_sync``: gradients stay unsharded and are summed.
        reduces_across: False inside ``no_all_reduce``: gradients are summed inside the shard group only.
        recorder: Notified while a step is recorded.
        follow_tree: Called when modules or parameters are registered otherwise than at the last call, on every rank.
        on_added: Called with parameters that were added after sharding, by name.
        check_buffers: Called before the first evaluation after training, on every rank; None: nothing is compared.
        unwrapped: The error of the model's first forward if there are no units but the root; usually None.
        state_dict: Functions that replace the model's ``state_dict`` and ``load_state_dict``, or None.
        agreement: Compares what ranks do.
        open_calls: Forward calls that are running, the outermost first.
        schedule: Turns events into actions.
    """

    def __init__(
        self,
        units: list[Unit],
        mesh: Mesh,
        prefetch: Prefetch,
        tracker: BufferTracker,
        device: Device,
        ignored: frozenset[int],
    ) -> None:
        """Start with every unit sharded."""
        self.units = units
        self.mesh = mesh
        self.prefetch = prefetch
        self.tracker = tracker
        self.device = device
        self.ignored = ignored
        self.reduces_gradients = True
        self.reduces_across = True
        self.recorder = StepRecorder()
        self.unwrapped: WrapError | None = None
        self.state_dict: tuple[Callable[..., Any], Callable[..., Any]] | None = None
        self.agreement = Agreement(mesh, device, [unit.name for unit in units])
        for _, param in self.all_params():
            vars(param.sharded).update(shard_fingerprints=self.agreement.fingerprints, shard_rates=self.agreement.rates)
        self.open_calls: list[Call] = []
        self._reducing: deque[Unit] = deque()  # in the order in which their reduces were issued
        self._in_backward = False
        self._guarded = False
        self.check_buffers: Callable[[Runtime], None] | None = None
        self._has_trained = False
        self.follow_tree: Callable[[Runtime], None]
        self.on_added: Callable[[dict[str, nn.Parameter]], None]
        self._tree: list[object] = []
        # torch's encoder inspects its layers' parameters in its own forward without computing with them, and takes
        # another path if one has a ``__torch_function__``.
        encoders = (m for top in self.root.modules for m in top.modules() if isinstance(m, nn.TransformerEncoder))
        inspected = {module for encoder in encoders for module in encoder.modules()}
        for _, param in self.all_params():
            param.inspected = param.slots[0][0] in inspected
        for index, unit in enumerate(units):
            unit.index = index
            unit.runtime, unit.recorder = self, self.recorder
            for param in unit.params:
                param.on_arrival, param.on_complete = partial(self.on_arrival, unit), partial(self.on_complete, unit)
        self.schedule = Schedule(
            [unit.trainable for unit in units],
            root=0,
            keeps_after_forward=[unit.index for unit in units if unit.policy.strategy.keeps_after_forward],
            # A unit that is more than the embedding may hold something else that reads the weight.
            unread=[unit.index for unit in units[1:] if all(map(is_plain_embedding, unit.modules))],
            prefetch=prefetch,
            names=[unit.name for unit in units],
        )
        self._follow_options()

    @property
    def root(self) -> Unit:
        """The unit of the model itself."""
        return self.units[0]

    def perform(self, actions: Iterable[Action]) -> None:
        """Execute the schedule's actions in order."""
        for verb, index in actions:
            unit = self.units[index]
            if verb is Verb.GATHER:
                self.gather(unit)
            elif verb is Verb.PREFETCH:
                self.issue_gather(unit)
            elif verb is Verb.TO_SHARDED:
                if not unit.stays_unsharded:
                    unit.to_sharded()
            elif verb is Verb.RESHARD:
                self.release(unit)
            elif verb is Verb.REDUCE or unit.holds_gradient:
                self._reduce(unit, final=verb is Verb.REDUCE)

    def release(self, unit: Unit) -> None:
        """Free the unit's full parameters, unless there is a reason to keep them; the only place that decides."""
        if not unit.keep:
            unit.reshard()
        elif not unit.stays_unsharded:
            unit.to_sharded()

    def refresh(self, unit: Unit) -> None:
        """Free what is gathered and may be older than the shards, unless a context keeps it shown.

        All ranks call it at the same events, needed or not: a rank without rows sees no change and would gather less.
        """
        unit.keep.discard(Keep.NEXT_PASS)
        self.release(unit)

    def gather(self, unit: Unit) -> None:
        """Gather the unit and show its full parameters; lanes that backward has freed early stay free."""
        self.issue_gather(unit)
        unit.finish_gather()

    def need(self, unit: Unit, param: ShardedParam) -> None:
        """Gather ``param`` if it is not gathered: backward computes with it now."""
        if not unit.unsharded or param.lane.state is LaneState.SPENT:
            self.backward_event()
            unit.reclaim()
            self.gather(unit)

    def read_for_the_last_time(self, unit: Unit, param: ShardedParam) -> None:
        """Free a table's memory after its last read in backward, before its gradient takes as much."""
        if param.watched and param.reads == 0 and not param.plain_use and not unit.keep:
            unit.free_early(param)

    def issue_gather(self, unit: Unit) -> None:
        """Start the gather of the unit, if one of its lanes is sharded."""
        if unit.state is LaneState.SHARDED:
            self.agreement.before("all-gather", unit.index)
            unit.issue_gather()

    def _reduce(self, unit: Unit, *, final: bool) -> None:
        if not self.reduces(unit):
            return
        if unit.index not in self.schedule.with_input_node:  # no other event shows the end of its backward
            self.recorder.end(unit.name, "backward")
        self._finish_reducing(0 if unit.reducing else self.device.reduces_behind)
        self.agreement.before("reduce-scatter", unit.index)
        unit.issue_reduce(across=self.reduces_across and unit.options.all_reduce, final=final)
        self._reducing.append(unit)

    def _finish_reducing(self, left: int = 0) -> None:
        """Wait for reduces until ``left`` are under way."""
        while len(self._reducing) > left:
            unit = self._reducing.popleft()
            # The all-reduce across replicas may start only now, after another unit was announced.
            self.mesh.announce(f"reduce-scatter of unit {unit.name}")
            unit.finish_reduce()

    def configure(self, unit: Unit, **changes: Any) -> None:
        """Change fields of the unit's :class:`UnitOptions`; every rank calls it with the same values."""
        unit.options = dataclasses.replace(unit.options, **changes)
        self._follow_options()

    def _follow_options(self) -> None:
        """Pass to the schedule which units stay gathered after forward, and which they gather ahead."""
        for unit in self.units:
            options = unit.options
            if options.reshard_after_forward is False:
                self.schedule.keeps_after_forward |= {unit.index} - self.schedule.unread
            elif options.reshard_after_forward:
                self.schedule.keeps_after_forward -= {unit.index}
            for ahead, lists in (
                (options.forward_prefetch, self.schedule.forward_lists),
                (options.backward_prefetch, self.schedule.backward_lists),
            ):
                if ahead is not None:
                    lists[unit.index] = [one.index for one in ahead if one.runtime is self]

    def reduces(self, unit: Unit) -> bool:
        """Return whether backward reduces the gradients of ``unit``."""
        return self.reduces_gradients and unit.options.reduce_gradients

    def unchanged(self, units: Iterable[Unit]) -> list[Unit]:
        """Return those of ``units`` to be kept for the next pass whose shards have not changed on any rank."""
        asked = [unit for unit in units if Keep.NEXT_PASS in unit.keep and not unit.stays_unsharded]
        changed = self.agreement.on_any_rank([unit.has_changed() for unit in asked])
        return [unit for unit, is_stale in zip(asked, changed, strict=True) if not is_stale]

    # Events

    def begin_pass(self) -> None:
        """Prepare for the root's forward outside backward.

        Raises:
            WrapError: The engine was to choose the units and found none.
            ShardingError: Parameters were changed in a way that cannot be followed.
        """
        if self.unwrapped is not None:
            raise self.unwrapped
        self.guard_shards(on=False)  # still on after a forward that was interrupted
        self.open_calls.clear()
        unchanged = self.unchanged(self.units)
        for unit in self.units:
            unit.open_calls, unit.group_call = 0, None
            # After a wrong guess of the schedule, an exception, or a forward without a backward, what is gathered may
            # be older than the shards.
            if unit in unchanged:
                unit.keep.discard(Keep.NEXT_PASS)
                unit.to_sharded()
            else:
                self.refresh(unit)
        self._adopt(self.units)
        self.check_tree()
        if self._has_trained and self.check_buffers is not None and not self.root.modules[0].training:
            self._has_trained = False
            self.check_buffers(self)
        self.guard_shards(on=True)
        self.schedule.pass_begins()

    def follow_changes(self, units: Sequence[Unit] | None = None) -> None:
        """Free what is gathered of ``units``, and adopt what users have changed; before shards are read outside a pass.

        Every rank calls it; it does not communicate.

        Raises:
            ShardingError: Parameters were changed in a way that cannot be followed.
        """
        units = self.units if units is None else units
        for unit in units:
            if not unit.open_calls:
                self.refresh(unit)
        self._adopt([unit for unit in units if not unit.open_calls])
        if len(units) == len(self.units):
            self.check_tree()

    def check_tree(self) -> None:
        """Follow changes of the module tree, or refuse them; any rank, no communication.

        Raises:
            ShardingError: A parameter was added, removed or replaced.
        """
        tree: list[object] = []
        modules = (module for top in self.root.modules for module in top.modules())
        for held in (held for module in modules for held in (module._modules, module._parameters) if held):
            tree += held
            tree += map(id, held.values())
        if tree != self._tree and not any(unit.summoned for unit in self.units):
            self.follow_tree(self)
            self._tree = tree

    def _adopt(self, units: Sequence[Unit]) -> None:
        if adopt_changes(units):
            self.replan()

    def guard_shards(self, *, on: bool) -> None:
        """Refuse computing with shards, or stop refusing: during the root's forward, only full parameters are meant."""
        if on is not self._guarded:
            self._guarded = on
            for _, param in self.all_params():
                param.guard_shard(on=on)

    def replan(self) -> None:
        """Schedule the parameters as they are now, after some were frozen, unfrozen or cast."""
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
        """Clean up after a call of ``unit`` failed: end the calls inside it, and show no full parameters.

        It runs when the forward fails, not when the next one begins: in between, users load weights, build optimizers
        and clip.
        """
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
        """Release ``unit``; if ranks are lost its gather fails too, and the first error is already being raised."""
        try:
            self.release(unit)
        except (MismatchError, ProcessGroupError):
            unit.to_sharded()

    def begin_direct_call(self, unit: Unit) -> None:
        """Prepare for a call of ``unit`` outside a pass: what a forward kept for its backward may be stale."""
        self.follow_changes([unit])

    def forward_event(self) -> None:
        """Reset if a forward runs outside backward while a backward was never finished."""
        if self._in_backward:
            self.reset()

    def end_pass(self, *, training: bool) -> None:
        """Finish the root's forward."""
        self.guard_shards(on=False)
        self.schedule.pass_ends()
        self.drop_guesses()
        if not training:
            self.agreement.pass_is_over()

    def drop_guesses(self) -> None:
        """Free what was gathered ahead but not used: weights may change after the outermost call."""
        for unit in self.units:
            if unit.state is LaneState.GATHERING and Keep.NEXT_PASS not in unit.keep:
                self.release(unit)

    def backward_event(self) -> None:
        """Ensure that the end of the running backward is noticed; called at any sign of a backward."""
        if not self._in_backward:
            self._in_backward = True
            for unit in self.units:
                unit.begin_backward()
            call_after_backward(self.end_backward)

    def on_arrival(self, unit: Unit, param: ShardedParam) -> None:
        """Receive the gradient that autograd has accumulated for ``param``."""
        if param.full.grad is not None:
            self.receive(unit, param, lambda: unit.add_gradient(param))

    def receive(self, unit: Unit, param: ShardedParam, write: Callable[[], None]) -> None:
        """Let ``write`` put a gradient of ``param`` into its lane."""
        self.backward_event()
        # Finish earlier reduces before allocating this gradient, which bounds the memory of unsharded gradients. Wait
        # for one of this unit too: writing into a lane that is being reduced corrupts it.
        if param.lane.gradient is None or unit.reducing:
            self._finish_reducing(0 if unit.reducing else self.device.reduces_behind)
        write()
        param.arrived = True

    def on_complete(self, unit: Unit, param: ShardedParam) -> None:
        """Reduce the unit if this parameter's gradient, now complete, was the last one missing."""
        if self._in_backward and unit.note_complete(param):
            self.perform(self.schedule.all_arrived(unit.index))

    def end_backward(self) -> None:
        """Issue the reduces that are still due, wait for them, and leave every unit sharded; autograd is done."""
        self.perform(self.schedule.sweep())
        for unit in reversed(self.units):
            if unit.holds_gradient:  # not in the plan, or late
                self._reduce(unit, final=False)
        self._finish_reducing()
        for unit in self.units:
            if self.reduces(unit) and self.reduces_across and unit.options.all_reduce:
                unit.finish_partial()
        self.device.host_ready()
        for unit in self.units:
            unit.call_due_hooks()
        if any(map(self.reduces, self.units)):
            self._settle_unused()
        for unit in self.units:
            self.recorder.end(unit.name, "backward")
            unit.record_gradients()
            unit.end_backward(synced=self.reduces(unit))
            self.release(unit)
        self.schedule.reset()
        self._in_backward, self._has_trained = False, True

    def _settle_unused(self) -> None:
        """Set the zero gradients of parameters that no rank used back to None, as in an unsharded run.

        Otherwise AdamW would decay weights that the unsharded run leaves alone.
        """
        params = list(self.all_params())
        arrived = [param.arrived or not param.trainable for _, param in params]
        used = self.agreement.after_backward(arrived, self.schedule.checksum)
        if used is None:
            return
        for (unit, param), is_used in zip(params, used, strict=True):
            if param.trainable and not param.arrived:
                if not is_used:
                    param.drop_zeros()
                elif is_used and param.has_gradient_hooks and self.reduces(unit):
                    param.call_gradient_hooks()

    def reset(self) -> None:
        """Discard everything a failed step left behind; shards and reduced gradients stay."""
        self.open_calls.clear()
        self._in_backward = False
        for unit in self.units:
            unit.open_calls, unit.group_call = 0, None
            unit.drop_gradients()
            self.release(unit)
        self._reducing.clear()
        self.schedule.reset()

    def watch(self, recorder: StepRecorder) -> None:
        """Send the following events to ``recorder``; a new :class:`StepRecorder` ends a record."""
        self.recorder, self.tracker.watch = recorder, recorder.sample
        for unit in self.units:
            unit.recorder = recorder

    def all_params(self) -> Iterable[tuple[Unit, ShardedParam]]:
        """Yield every sharded parameter with its unit, root first."""
        return ((unit, param) for unit in self.units for param in unit.params)

    def __deepcopy__(self, memo: dict[int, Any]) -> Runtime:
        """Refuse, as :meth:`Unit.__deepcopy__` does."""
        self.root.__deepcopy__(memo)
        return self
