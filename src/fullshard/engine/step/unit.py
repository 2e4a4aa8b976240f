"""A unit: the parameters that are gathered and reduced together, and their state."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import nn

from fullshard.comm import Mesh, Work, settle
from fullshard.engine.step.buffers import Account
from fullshard.engine.step.collectives import PendingReduce, finish_partial, finish_reduce, start_gather, start_reduce
from fullshard.engine.step.lane import Lane
from fullshard.engine.step.param import COPY_REFUSED, CREATE_GRAPH_REFUSED, ShardedParam
from fullshard.engine.step.recorder import Recorder, Transfer
from fullshard.engine.step.schedule import Call
from fullshard.errors import InvariantError, ShardingError
from fullshard.policy import UnitPolicy


class State(Enum):
    """Where a unit's parameters are."""

    SHARDED = "sharded"
    GATHERING = "gathering"
    GATHERED = "gathered"


@dataclass(frozen=True)
class Whole:
    """The unit's modules show full parameters in the shards' dtype, and run as plain modules.

    Attributes:
        here: Whether they do on this rank, else on rank 0 only.
    """

    here: bool

    def require_here(self) -> None:
        """Refuse what needs the parameters where this rank has not got them.

        Raises:
            ShardingError: Only rank 0 has them.
        """
        if not self.here:
            raise ShardingError(
                "Only rank 0 has the full parameters here (rank0_only=True), so other ranks can neither run the model "
                "nor read its state: do that on rank 0 alone, or on every rank with rank0_only=False."
            )


class Unit:
    """The state machine of one unit; it owns the buffers, and its verbs are the only ones that move them.

    ::

        SHARDED --issue_gather--> GATHERING --finish_gather--> GATHERED --reshard--> SHARDED

    Attributes:
        index: Place in the model's list of units; the root is 0.
        name: Qualified name of its module.
        modules: The modules whose forwards need the parameters, in the order they run in; nearly always one.
        params: Its parameters.
        lanes: Its buffers.
        policy: What was said about it when it was sharded.
        state: Where the parameters are.
        shown: Whether the modules' attributes are the full parameters.
        parted: Lanes whose gathered memory is back already, because nothing in this backward reads it any more.
        pinned: Whether the unit stays gathered until backward is over (nothing tells when it is done with them).
        held: Number of contexts that want the unit gathered.
        open_calls: Forward calls that run right now.
        recomputed: Forward calls of a reentrant checkpoint whose backward is not over.
        casts_output: Whether ``fully_shard`` was called on it: its outputs get the policy's output dtype.
        group_call: Of a unit of several modules, the one call that spans them while it is open.
        group_needs_backward: Whether an output of that call requires grad.
        recorder: Told what happens while a step is recorded.
        syncing: Whether its gradients are reduced; else they stay unsharded and are added up.
        across: Whether its gradients are added up over replicas too.
        divide: The summed gradients are divided by this; None: by the number of ranks.
        keeps_after_forward: Whether it stays gathered between forward and backward; None: as its strategy says, and
            as the root does.
        keeps_after_backward: Whether it stays gathered from backward to the next forward, if the shards do not change.
        ahead: Units to gather ahead when its ``"forward"`` or ``"backward"`` starts, where that was said.
        fresh: Whether what is gathered is kept to the next pass, if the shards do not change.
        whole: Set while the modules show full parameters that the unit did not gather itself.
        on_reduced: Called with each lane's reduced gradient, (shard_numel,), to be changed in place.
    """

    def __init__(
        self,
        name: str,
        modules: tuple[nn.Module, ...],
        params: list[ShardedParam],
        lanes: list[Lane],
        policy: UnitPolicy,
    ) -> None:
        """Take over parameters and lanes whose shards are filled; the lanes' buffers are released."""
        self.index = 0
        self.runtime: Any = None  # of the sharded model it belongs to, and its hooks: they are of higher floors
        self.hooks: Any = None
        self.name = name
        self.modules = modules
        self.params = params
        self.lanes = lanes
        self.policy = policy
        self.state = State.SHARDED
        self.pinned = False
        self.parted: list[Lane] = []
        self._works: list[Work] = []
        self._untaken: list[Work] = []  # all-gathers that other ranks may still read from
        self._pending: list[PendingReduce] = []
        self._final = False
        self.count_trainable()
        self._arrived = 0
        self._owed = False  # gradient hooks that are called when backward is over
        self.shown = False
        self.held = 0
        self.open_calls = 0
        self.casts_output = False
        self.recomputed = 0
        self.group_call: Call | None = None
        self.group_needs_backward = False
        self.recorder: Recorder | None = None
        self.whole: Whole | None = None
        self.syncing = True
        self.across = True
        self.divide = policy.precision.divide
        self.keeps_after_forward: bool | None = None
        self.keeps_after_backward = False
        self.ahead: dict[str, list[Unit]] = {}
        self.fresh = False
        self.on_reduced: Callable[[torch.Tensor], object] | None = None
        for param in params:
            param.sharded.shard_unit = weakref.ref(self)  # type: ignore[attr-defined]
            param.show_shard()
        for lane in lanes:
            lane.full.release()

    def join(self, paths: Mapping[int, list[str]], mesh: Mesh, account: Account) -> None:
        """Become part of a larger model: ``paths`` holds the names there of each module, by id."""
        self.name = " + ".join(paths[id(module)][0] for module in self.modules)
        for param in self.params:
            names = [f"{path}.{key}" if path else key for module, key in param.slots for path in paths[id(module)]]
            param.rename(names)
        for lane in self.lanes:
            lane.join(mesh, account)
        for param in self.params:
            param.sharded.shard_comm = param.lane.mesh.shard_group  # type: ignore[attr-defined]

    def __deepcopy__(self, memo: dict[int, object]) -> Unit:
        """Refuse: a copy would share this rank's buffers and join other ranks' collectives.

        Raises:
            ShardingError: Always.
        """
        raise ShardingError(COPY_REFUSED)

    def __reduce__(self) -> str:
        """Refuse to be pickled, as ``__deepcopy__`` does."""
        return str(self.__deepcopy__({}))

    def count_trainable(self) -> None:
        """Note how many gradients complete the unit, after that changed."""
        self._waiting_for = sum(p.trainable for p in self.params)
        self.trainable = self._waiting_for > 0
        for lane in self.lanes:
            lane.trainable = any(p.trainable for p in self.params if p.lane is lane)

    # Parameters

    def version(self) -> int:
        """A number that grows with each in-place change of a shard."""
        with torch._C.DisableTorchFunctionSubclass():  # a guard need not be asked
            return sum(param.sharded._version for param in self.params)

    def has_changed(self) -> bool:
        """Whether this rank's part of what is gathered is not what its shards hold now; True where nothing is.

        Values are compared: fused optimizers and ``param.data`` leave a tensor's version as it is.
        """
        if self.state is State.SHARDED or self.parted or any(p.sharded.data_ptr() != p.address for p in self.params):
            return True
        self._await_gather()
        for lane in self.lanes:
            low, high = lane.layout.shard_bounds(lane.mesh.shard_group.rank)
            mine = lane.full.alias[low:high]
            if not torch.equal(mine, lane.shard.to(mine)):
                return True
        return False

    def lacks(self, *, whole: bool) -> bool:
        """Whether a gather is due; ``whole``: also of lanes that were parted with."""
        return self.state is State.SHARDED or (whole and bool(self.parted))

    def issue_gather(self) -> None:
        """Start the all-gather of what is not there; nothing when it is under way or done."""
        if self.state is not State.SHARDED and not self.parted:
            return
        if self.recorder is not None:
            self.recorder.begin(self.name, "gather")
        if self.state is State.SHARDED:
            self._works = start_gather(self.lanes)
        else:
            self.hide()
            self._works += start_gather(self.parted)
        if self.recorder is not None:
            self.recorder.issued(self.name, "gather", self._works)
        self.parted = []
        self.state = State.GATHERING

    def part_with(self, param: ShardedParam) -> None:
        """Free the gathered memory of ``param``, which is alone in its lane, before the unit's."""
        if self.state is State.GATHERED and param.lane not in self.parted:
            self.settle()
            param.show_shard()
            param.lane.full.release()
            self.parted.append(param.lane)

    def finish_gather(self) -> None:
        """Wait for the all-gather and show the full parameters; nothing when that is done."""
        if self.state is State.SHARDED:
            raise InvariantError(f"unit {self.name}: finish_gather in state {self.state}")
        self._await_gather()
        self.state = State.GATHERED
        if not self.shown:
            self.shown = True
            for param in self.params:
                if param.lane not in self.parted:
                    param.show_full()

    def settle(self) -> None:
        """Wait until other ranks have read what this one gave to the all-gather: it may be changed or freed then."""
        self._wait("gather", self._untaken, settle)
        self._untaken = []

    def hide(self) -> None:
        """Show the shards, keep the gathered memory: between forward and backward only autograd looks at it."""
        if self.shown:
            self.shown = False
            for param in self.params:
                param.show_shard()

    def reshard(self) -> None:
        """Show the shards and free the gathered parameters; waits for a gather under way."""
        if self.state is State.SHARDED:
            return
        self._await_gather()
        self.settle()
        self.hide()
        for lane in self.lanes:
            lane.full.release()
        self.parted = []
        self.state = State.SHARDED

    def _await_gather(self) -> None:
        self._wait("gather", self._works, lambda work: work.wait())
        self._untaken += self._works
        self._works = []

    def _wait(self, kind: Transfer, works: Sequence[Work], how: Callable[[Work], None]) -> None:
        """Apply ``how``, which waits, to ``works``."""
        if self.recorder is not None and works:
            self.recorder.wait(self.name, kind, works, how)
            return
        for work in works:
            how(work)

    def write_back(self) -> None:
        """Take over into the shards, element by element, what differs from them in the gathered parameters.

        Raises:
            ShardingError: A parameter was replaced instead of changed.
        """
        if self.state is not State.GATHERED:
            raise InvariantError(f"unit {self.name}: write_back in state {self.state}")
        for param in self.params:
            if any(module._parameters.get(key) is not param.full for module, key in param.slots):
                raise ShardingError(
                    f"{param.meta.name} was replaced by another Parameter inside unsharded(model); change its "
                    "values in place (param.copy_, param.data.copy_) instead."
                )
        for lane in self.lanes:
            low, high = lane.layout.shard_bounds(lane.mesh.shard_group.rank)
            mine = lane.full.alias[low:high]
            # Only where it differs: a shard is wider than the compute dtype, and what nobody touched keeps its bits.
            changed = mine != lane.shard.to(mine)
            changed = changed.to(lane.shard.device)
            lane.shard[changed] = mine.to(lane.shard.device)[changed].to(lane.shard.dtype)

    # Gradients

    def watch_gradients(
        self, on_arrival: Callable[[Unit, ShardedParam], None], on_complete: Callable[[Unit, ShardedParam], None]
    ) -> None:
        """Have ``on_arrival(unit, param)`` called when autograd has a gradient, ``on_complete`` after all uses."""
        for param in self.params:
            param.on_arrival = partial(on_arrival, self)
            param.on_complete = partial(on_complete, self)

    def add_gradient(self, param: ShardedParam) -> None:
        """Move autograd's gradient of ``param`` into the lane, and free it.

        Raises:
            ShardingError: The gradient is sparse, or was made with ``create_graph=True``.
        """
        gradient = param.full.grad
        if gradient is None:
            return
        if gradient.layout != torch.strided:
            raise ShardingError(
                f"{param.meta.name} got a gradient of layout {gradient.layout}; lanes are dense. Use sparse=False."
            )
        if gradient.requires_grad:
            raise ShardingError(CREATE_GRAPH_REFUSED)
        param.lane.add_gradient(param.place, gradient)
        param.full.grad = None

    def note_complete(self, param: ShardedParam) -> bool:
        """Every use of ``param`` has given its gradient; returns whether that is so of all of the unit's parameters."""
        if param.arrived and not param.waiting:
            param.waiting = True
            self._arrived += 1
        return self._arrived == self._waiting_for

    @property
    def reducing(self) -> bool:
        """Whether a reduce-scatter is under way: the lanes' gradients must not be written."""
        return bool(self._pending)

    @property
    def holds_gradient(self) -> bool:
        """Whether an unsharded gradient waits to be reduced (one under way does not count)."""
        return not self._pending and any(lane.gradient is not None for lane in self.lanes)

    def issue_reduce(self, *, across: bool, final: bool) -> None:
        """Start the reduce-scatter, with zeros where no gradient arrived.

        Args:
            across: Whether replicas add up theirs too.
            final: Whether no more gradients of the unit are to come in this backward.
        """
        self.finish_reduce()
        self._final = final
        if self.recorder is not None:
            self.recorder.begin(self.name, "reduce")
        self._pending = start_reduce(self.lanes, across=across)
        if self.recorder is not None:
            self.recorder.issued(self.name, "reduce", [one.work for one in self._pending])
        self._arrived = 0
        for param in self.params:
            param.waiting = False

    def finish_reduce(self) -> None:
        """Wait for the reduce-scatter and assign the gradients of the shards; nothing when none is under way."""
        pending, self._pending = self._pending, []
        if self.recorder is not None and pending:
            self.recorder.wait(self.name, "reduce", [one.work for one in pending], lambda work: work.wait())
        for one in pending:
            self._take(one.lane, finish_reduce(one, self.divide))
        self.note_gradients()

    def gradient_bytes(self) -> int:
        """Bytes that the gradients of its shards take on the device that it computes on."""
        own = (param.sharded.grad for param in self.params if not param.lane.offloaded)
        return sum(gradient.nbytes for gradient in own if gradient is not None)

    def note_gradients(self) -> None:
        """Record, while a step is recorded, what the gradients of its shards take."""
        if self.recorder is not None:
            self.recorder.gradients_take(self.name, self.gradient_bytes())

    def finish_partial(self) -> None:
        """Add up across replicas what backwards without that left behind; nothing where nothing was left."""
        for lane in self.lanes:
            self._take(lane, finish_partial(lane, self.divide))

    def _take(self, lane: Lane, shard: torch.Tensor | None) -> None:
        """Give a lane's reduced gradient to its parameters, and those that are complete to who waits for them."""
        if shard is None:
            return
        if self.on_reduced is not None:
            self.on_reduced(shard)
        mine = [param for param in self.params if param.lane is lane]
        hooked = [param for param in mine if param.has_gradient_hooks]
        if lane.offloaded:
            shard = lane.to_host(shard)
            if hooked or any(param.sharded.grad is not None for param in mine):
                lane.device.host_ready()  # the CPU reads it now, else at the end of backward
        for param in mine:
            param.take_gradient(shard)
        if hooked and self._final:
            self._call_hooks(hooked)
        elif hooked:
            self._owed = True

    def _call_hooks(self, params: list[ShardedParam]) -> None:
        """Give complete gradients to who waits for them; of one that did not arrive here, the end of backward tells."""
        for param in params:
            if param.arrived:
                param.stepped = True
                param.call_gradient_hooks()

    def call_owed_hooks(self) -> None:
        """Backward is over: nothing more is to come of gradients that came in several parts."""
        if self._owed:
            self._call_hooks([param for param in self.params if param.has_gradient_hooks and not param.stepped])

    def begin_backward(self) -> None:
        """Remember which shards have a gradient already."""
        for param in self.params:
            param.had_gradient = param.sharded.grad is not None

    def end_backward(self, *, synced: bool) -> None:
        """Begin a new count of arrivals; what arrived without being reduced is remembered for the flags."""
        self._arrived = 0
        self._owed = False
        self.recomputed = 0
        for param in self.params:
            param.waiting = param.stepped = False
            param.reads = 0
            param.arrived = param.arrived and (not synced or param.lane.partial is not None)

    def drop_gradients(self) -> None:
        """Throw away unsharded gradients of a backward that was given up."""
        for one in self._pending:
            one.work.wait()
            settle(one.sent)
        self._pending = []
        for lane in self.lanes:
            lane.drop_gradient()
            lane.partial = None
        self.end_backward(synced=True)
