"""When to gather, release and reduce: a pure function from a step's events to actions, without torch.

Forward events are recorded as they come: ``begin`` and ``end`` of each call of a unit. Autograd runs nodes in
descending sequence number, so the record in reverse is the *plan* of backward: from the ``end`` of a call, backward
needs the unit gathered; at the ``begin`` of its first call, all its gradients are complete. The plan is read from this
step's own forward, so a changed order (an evaluation in between, a second path) needs no new recording.

Collectives are issued in plan order only. If this rank's backward skips a call that other ranks run (a block whose
output this rank did not use), it issues the skipped collectives on the way, with zeros for gradients: every rank issues
the same sequence, and none waits for a rank that never comes.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import Enum

from fullshard.core.policy import BackwardPrefetch, Prefetch
from fullshard.errors import WrapError


class Verb(Enum):
    """An action on a unit."""

    GATHER = "gather"
    """Issue the unit's all-gather unless it is under way, and wait for it."""
    PREFETCH = "prefetch"
    """Issue the unit's all-gather if it is sharded, without waiting."""
    TO_SHARDED = "to sharded"
    """Show the shards again but keep the gathered memory for backward."""
    RESHARD = "reshard"
    """Free the gathered parameters."""
    REDUCE = "reduce"
    """Reduce-scatter the unit's gradients, with zeros where none arrived."""
    FLUSH = "flush"
    """Reduce-scatter the unit's gradients if any arrived."""


Action = tuple[Verb, int]


def no_graph() -> None:
    """Stand for the reference to the autograd graph of a call that has none."""


@dataclass(eq=False)
class Call:
    """One forward call of a unit.

    Attributes:
        unit: Index of the unit.
        forward_pass: Number of the root's forward that it belongs to.
        input_node: Whether an autograd node marks the end of this call's backward (some input needs a gradient).
        graph: Reference that is dead when the call's autograd graph is freed; None until the call has ended.
        planned: Whether the call is in the plan; False for recomputation, and after the plan was used.
        begin: Position in the plan where the call's backward is complete.
        end: Position in the plan where the call's backward starts.
        version: Version of the unit's shards when the call ended; None for recomputation.
    """

    unit: int
    forward_pass: int = 0
    input_node: bool = False
    graph: Callable[[], object | None] | None = None
    planned: bool = False
    begin: int = -1
    end: int = -1
    version: int | None = None


def _by_index(lists: Sequence[tuple[str, Sequence[str]]], names: Sequence[str]) -> dict[int, list[int]]:
    """Convert lists of units from names to indices.

    Raises:
        WrapError: A name belongs to no unit.
    """
    index = {name: place for place, name in enumerate(names)}
    unknown = sorted({name for unit, listed in lists for name in (unit, *listed)} - set(index))
    if unknown:
        raise WrapError(f"Prefetch lists name {', '.join(unknown)}; the units are {', '.join(names)}.")
    return {index[unit]: [index[name] for name in listed] for unit, listed in lists}


class Schedule:
    """The schedule of one step. Every rank makes the same calls in the same order, except for those it skips.

    Attributes:
        events: Recorded forward events, ``(is_end, call)``.
        plan: The events of planned calls in reverse; None until backward begins.
        cursor: First position of the plan that backward has not passed.
        queue: Units to be reduced, in plan order.
        final: Of each unit, the position of the plan where its gradients are complete.
        ready: Units of the queue whose gradients are complete.
        with_input_node: Units of which a call has an input node.
        reached: Forward passes that this backward has reached.
        gathered: Units that the actions so far have gathered and not released.
        following: Of each unit, the unit that followed it in the last forward.
        checksum: Of the order of forward calls and reduces, compared over ranks.
    """

    def __init__(
        self,
        trainable: Sequence[bool],
        root: int,
        *,
        keeps_after_forward: Collection[int] = (),
        unread: Collection[int] = (),
        prefetch: Prefetch | None = None,
        names: Sequence[str] = (),
    ) -> None:
        """Schedule units ``0..len(trainable) - 1``.

        Args:
            trainable: Whether each unit has gradients to reduce.
            root: Index of the root.
            keeps_after_forward: Units that stay gathered between forward and backward, in addition to the root.
            unread: Units whose backward needs no parameters, such as an embedding's.
            prefetch: Which units are gathered ahead, and when; None: the default.
            names: Names of the units, for the lists of ``prefetch``.

        Raises:
            WrapError: A list of ``prefetch`` names a unit that does not exist.
        """
        self.trainable = list(trainable)
        self.root = root
        self.unread = frozenset(unread)
        # The root's parameters are the first that backward needs.
        self.keeps_after_forward = {root, *keeps_after_forward} - self.unread
        self.prefetch = prefetch or Prefetch()
        self.forward_lists = _by_index(self.prefetch.forward_lists, names)
        self.backward_lists = _by_index(self.prefetch.backward_lists, names)
        self.following: dict[int, int | None] = {}
        self.last: int | None = None
        self.forward_pass = 0
        self.plan_key = b""
        self.reset()

    def replan(self, trainable: Sequence[bool], key: bytes) -> None:
        """Start again after parameters were frozen or unfrozen; ``key`` tells which are trainable, for the checksum."""
        self.trainable = list(trainable)
        self.plan_key = key
        self.reset()

    def reset(self) -> None:
        """Discard the recorded calls: backward is over, or was abandoned."""
        for _, call in getattr(self, "events", ()):
            call.planned = False
        self.events: list[tuple[bool, Call]] = []
        self.plan: list[tuple[bool, Call]] | None = None
        self.cursor = 0
        self.queue: list[int] = []
        self.final: dict[int, int] = {}
        self.ready: set[int] = set()
        self.with_input_node: set[int] = set()
        self.reached: set[int] = set()
        self.gathered: set[int] = set()
        self.checksum = zlib.crc32(self.plan_key)

    # Forward

    def pass_begins(self) -> None:
        """Record that the root's forward starts: the next unit follows none."""
        self.last = None
        self.forward_pass += 1
        self.gathered.clear()
        # A pass whose graphs are freed has no backward; calls that are still open have no graph yet.
        alive = {call.forward_pass for _, call in self.events if call.graph is None or call.graph() is not None}
        self.events = [event for event in self.events if event[1].forward_pass in alive]

    def pass_ends(self) -> None:
        """Record that the root's forward is over: no unit follows the last one."""
        if self.last is not None:
            self.following[self.last] = None
        self.last = None

    def forward_begins(self, unit: int, *, input_node: bool = False, alone: bool = False) -> tuple[Call, list[Action]]:
        """Record that a call of ``unit`` starts; return the call and the actions before it computes.

        Args:
            unit: Index of the unit.
            input_node: See :class:`Call`.
            alone: Whether it is inside no other call: weights may change before the next one, so no unit is prefetched.
        """
        call = Call(unit, self.forward_pass, input_node)
        self.events.append((False, call))
        self._add_to_checksum(unit)
        actions = [(Verb.GATHER, unit)]
        if unit != self.root:
            if self.last is not None:
                self.following[self.last] = unit
            self.last = unit
        self.gathered.add(unit)
        if not alone:
            actions += self._ahead(unit, self.forward_lists.get(unit, self._guess(unit)))
        return call, actions

    def _guess(self, unit: int) -> list[int]:
        """Return the units that followed ``unit`` in the last forward, as many as are prefetched."""
        guess: list[int] = []
        following = self.following.get(unit) if self.prefetch.forward and unit != self.root else None
        while following is not None and following not in (unit, *guess) and len(guess) < self.prefetch.ahead:
            guess.append(following)
            following = self.following.get(following)
        return guess

    def _ahead(self, unit: int, wanted: Sequence[int]) -> list[Action]:
        """Prefetch ``wanted`` while ``unit`` computes, as far as the bound on units in flight allows."""
        bound = self.prefetch.max_in_flight
        actions: list[Action] = []
        for other in wanted:
            if other == unit:
                continue
            if bound is not None and len(self.gathered - {self.root, other}) >= bound:
                break
            self.gathered.add(other)
            actions.append((Verb.PREFETCH, other))
        return actions

    def forward_ends(self, call: Call, *, needs_backward: bool) -> list[Action]:
        """Record that a call has computed its outputs.

        Args:
            call: The call from :meth:`forward_begins`.
            needs_backward: Whether an output requires grad, so that backward will reach this call.
        """
        if needs_backward:
            self.events.append((True, call))
            call.planned = True
        else:
            self.events = [event for event in self.events if event[1] is not call]
        if needs_backward and call.unit in self.keeps_after_forward:
            return [(Verb.TO_SHARDED, call.unit)]
        return [self._reshard(call.unit)]

    def _reshard(self, unit: int) -> Action:
        self.gathered.discard(unit)
        return Verb.RESHARD, unit

    # Backward

    def _make_plan(self) -> None:
        if self.plan is not None:
            return
        self.plan = [event for event in reversed(self.events) if event[1].planned]
        for index, (is_end, call) in enumerate(self.plan):
            if is_end:
                call.end = index
            else:
                call.begin = index
                self.final[call.unit] = index
                if call.input_node:
                    self.with_input_node.add(call.unit)
        self.queue = sorted((u for u in self.final if self.trainable[u]), key=self.final.__getitem__)

    def backward_begins(self, call: Call) -> list[Action]:
        """Record that backward reaches the outputs of ``call``."""
        if not call.planned:
            return [(Verb.GATHER, call.unit)]
        self._make_plan()
        if call.end < self.cursor:  # another output of a call that backward has reached already
            return [(Verb.GATHER, call.unit)]
        self.reached.add(call.forward_pass)
        actions = self._skip_to(call.end)
        self.cursor = call.end + 1
        if call.unit not in self.unread:
            actions.append((Verb.GATHER, call.unit))
            self.gathered.add(call.unit)
        return actions + self._prefetch_after(call.end, BackwardPrefetch.BACKWARD_PRE)

    def all_arrived(self, unit: int) -> list[Action]:
        """Record that every trainable parameter of ``unit`` has its gradient."""
        self._make_plan()
        if unit in self.queue:
            self.ready.add(unit)
            return self._pop_ready()
        # One that was reduced already: a late gradient is reduced in the sweep.
        return [] if unit in self.final else [(Verb.FLUSH, unit)]

    def backward_ends(self, call: Call) -> list[Action]:
        """Record that the input node of ``call`` ran: nothing in this call needs the parameters any more."""
        unit = call.unit
        actions: list[Action] = []
        if not call.planned:
            actions.append((Verb.FLUSH, unit))
        else:
            self._make_plan()
            actions += self._skip_to(call.begin)
            self.cursor = max(self.cursor, call.begin + 1)
            if self.final[unit] == call.begin and unit in self.queue:
                self.ready.add(unit)
                actions += self._pop_ready()
        actions.append(self._reshard(unit))
        if call.planned:
            actions += self._prefetch_after(call.begin, BackwardPrefetch.BACKWARD_POST)
        return actions

    def awaits_backward(self, unit: int) -> bool:
        """Return whether a recorded call of ``unit`` still awaits its backward."""
        return any(
            call.unit == unit and call.planned and not (0 <= call.begin < self.cursor) for _, call in self.events
        )

    def sweep(self) -> list[Action]:
        """Return what is still due at the end of backward, in plan order."""
        self._make_plan()
        assert self.plan is not None
        actions = self._skip_to(len(self.plan))
        self.ready.update(self.queue)
        return actions + self._pop_ready()

    def _skip_to(self, index: int) -> list[Action]:
        """Return the actions of the plan before ``index`` that this rank's backward skipped."""
        assert self.plan is not None
        actions: list[Action] = []
        for place in range(self.cursor, index):
            is_end, call = self.plan[place]
            if is_end:
                # A forward pass that backward never reached was dropped by every rank, not skipped by this one.
                if call.forward_pass in self.reached:
                    if call.unit not in self.unread:  # ranks that run it gather it here
                        self.gathered.add(call.unit)
                        actions.append((Verb.PREFETCH, call.unit))
                    actions += self._prefetch_after(place, BackwardPrefetch.BACKWARD_PRE)
                continue
            if self.final[call.unit] == place and call.unit in self.queue:
                # Everything before this position is complete: a gradient that has not arrived will not.
                self.ready.add(call.unit)
                actions += self._pop_ready()
            if call.unit != self.root:
                actions.append(self._reshard(call.unit))
            if call.forward_pass in self.reached:
                actions += self._prefetch_after(place, BackwardPrefetch.BACKWARD_POST)
        self.cursor = max(self.cursor, index)
        return actions

    def _prefetch_after(self, place: int, occasion: BackwardPrefetch) -> list[Action]:
        """Return the prefetches of calls after ``place`` in the plan, if this is the occasion to issue them."""
        assert self.plan is not None
        if occasion is not self.prefetch.backward:
            return []
        here = self.plan[place][1]
        coming: list[int] = []
        listed = self.backward_lists.get(here.unit)
        limit = self.prefetch.ahead if listed is None else len(self.plan)
        for is_end, call in self.plan[place + 1 :]:
            # Not across forward passes: an earlier one may have been dropped and would be gathered for nothing.
            if len(coming) >= limit or call.forward_pass != here.forward_pass:
                break
            if is_end and call.unit not in coming and call.unit not in self.unread:
                coming.append(call.unit)
                if call.unit == here.unit:
                    break
        if listed is not None:
            coming = [unit for unit in listed if unit in coming]
        return self._ahead(here.unit, coming)

    def _pop_ready(self) -> list[Action]:
        """Return the reduces that are complete and next in plan order."""
        actions: list[Action] = []
        while self.queue and self.queue[0] in self.ready:
            unit = self.queue.pop(0)
            actions.append((Verb.REDUCE, unit))
            self._add_to_checksum(unit)
            if unit not in self.with_input_node and unit != self.root:
                actions.append(self._reshard(unit))
        return actions

    def _add_to_checksum(self, unit: int) -> None:
        """Add a forward call or a reduce to the checksum over which ranks compare their schedules."""
        self.checksum = zlib.crc32(unit.to_bytes(4, "little"), self.checksum)
