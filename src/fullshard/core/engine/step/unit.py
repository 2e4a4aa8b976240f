"""A unit: the parameters that are gathered and reduced together."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import nn

from fullshard.core.comm import DONE, Work, settle
from fullshard.core.engine.step.lane import Lane, LaneState, predivisor
from fullshard.core.engine.step.param import COPY_REFUSED, CREATE_GRAPH_REFUSED, ShardedParam
from fullshard.core.engine.step.recorder import StepRecorder, Transfer
from fullshard.core.engine.step.schedule import Call
from fullshard.core.policy import UnitPolicy
from fullshard.core.shards import on_rows
from fullshard.core.torch_private import plain_functions
from fullshard.errors import InvariantError, ShardingError


def plain_type(module: nn.Module) -> type[nn.Module]:
    """Return the class of ``module``, without a subclass that a wrapper added and that does not change forward."""
    return getattr(type(module), "_fullshard_plain_type", type(module))


def is_plain_embedding(module: nn.Module) -> bool:
    """Return whether the backward of ``module`` is a sum of rows and reads no parameter."""
    if plain_type(module) is not nn.Embedding:
        return False
    return module.max_norm is None and not module.scale_grad_by_freq and not module.sparse


@dataclass
class PendingReduce:
    """A lane's reduce-scatter under way.

    Attributes:
        lane: The lane.
        shard: Receives this rank's slice of the sum; (shard_numel,), in the dtype in which gradients are summed.
        work: The collective, including the all-reduce across replicas.
        sent: The part of it during which other ranks read this rank's gradient.
        across: True if it includes the all-reduce across replicas.
    """

    lane: Lane
    shard: torch.Tensor
    work: Work
    sent: Work
    across: bool


def start_reduce(lanes: Sequence[Lane], *, across: bool) -> list[PendingReduce]:
    """Issue each trainable lane's reduce-scatter; ``across``: and the all-reduce over replicas, on a side stream."""
    pending: list[PendingReduce] = []
    for lane in lanes:
        if not lane.trainable:
            continue
        shard, work = lane.start_sum()
        inside = work or DONE
        if across and lane.mesh.replica_group.size > 1:
            work = _then_across(lane, shard, work)
        pending.append(PendingReduce(lane, shard, work or DONE, inside, across))
    return pending


def _then_across(lane: Lane, shard: torch.Tensor, inside: Work | None) -> Work:
    """All-reduce across replicas, after the reduce-scatter inside the shard group: 1/N of the gradient's bytes."""
    # The work keeps a reference until it was waited for: the side stream reads memory of the compute stream, and the
    # allocator would reuse it as soon as the last reference is gone.
    partial, lane.partial = lane.partial, None

    def work() -> None:
        if inside is not None:
            inside.wait()
        if partial is not None:
            shard.add_(partial)
        lane.mesh.replica_group.all_reduce(shard).wait()

    return lane.device.on_side_stream("replicate", work)


def finish_reduce(pending: PendingReduce, divide: float | None) -> torch.Tensor | None:
    """Wait for one lane's reduce-scatter, free its unsharded gradient and return the mean over all ranks.

    ``divide`` divides the sum over ranks; None: the number of ranks.

    Returns:
        This rank's shard of the gradient, (shard_numel,), zero in padding; None if replicas are not summed yet: then
        ``lane.partial`` holds the sum.
    """
    pending.work.wait()
    settle(pending.sent)
    lane, shard = pending.lane, pending.shard
    lane.drop_gradient()
    if not pending.across:
        lane.partial = shard if lane.partial is None else lane.partial.add_(shard)
        return None
    return shard.div_((divide or lane.mesh.size) / predivisor(lane.mesh, lane.dtypes.reduce))


def finish_partial(lane: Lane, divide: float | None) -> torch.Tensor | None:
    """Sum over replicas what earlier backwards left in ``lane.partial``; return None if there is nothing."""
    if lane.partial is None:
        return None
    shard, lane.partial = lane.partial, None
    lane.mesh.replica_group.all_reduce(shard).wait()
    return shard.div_((divide or lane.mesh.size) / predivisor(lane.mesh, lane.dtypes.reduce))


class Keep(Enum):
    """Reasons to keep a unit gathered that the schedule would free. ``Runtime.release`` reads them."""

    CONTEXT = "context"
    """Inside ``unsharded(model)``: the modules keep showing the full parameters."""
    GENERATION = "generation"
    """Inside ``root_unsharded(model)``: the same for the root, between the forwards of a generation loop."""
    OUTPUT = "output"
    """Until backward is over: an output has no tensors, so nothing shows when backward has passed the unit."""
    NEXT_PASS = "next pass"
    """Until the next pass, unless a shard changes before: after ``unshard()`` or with reshard_after_backward off."""


UNSHARDED = frozenset({Keep.CONTEXT, Keep.GENERATION})
"""Reasons for which the modules also keep showing the full parameters."""


@dataclass(frozen=True)
class UnitOptions:
    """Settings of one unit that may change between steps; set them with ``Runtime.configure``.

    Attributes:
        reduce_gradients: Whether backward reduces gradients; if not, they stay unsharded and are summed.
        all_reduce: Whether the reduction includes the all-reduce across replicas.
        divide: Divisor of summed gradients; None: the number of ranks.
        reshard_after_forward: Whether the unit is freed between forward and backward; None: as its strategy says.
        reshard_after_backward: Whether the unit is freed after backward; if not, it is kept until a shard changes.
        forward_prefetch: Units to gather when its forward starts; None: those that followed it in the last pass.
        backward_prefetch: Units to gather when its backward starts; None: the next ones of the plan.
        casts_output: Whether outputs are cast to the policy's output dtype; True for roots of ``fully_shard`` calls.
        on_reduced: Called with each lane's reduced gradient, (shard_numel,), which it may change in place.
    """

    reduce_gradients: bool = True
    all_reduce: bool = True
    divide: float | None = None
    reshard_after_forward: bool | None = None
    reshard_after_backward: bool = True
    forward_prefetch: tuple[Unit, ...] | None = None
    backward_prefetch: tuple[Unit, ...] | None = None
    casts_output: bool = False
    on_reduced: Callable[[torch.Tensor], object] | None = None


@dataclass(frozen=True)
class Summoned:
    """State of a unit whose modules show full parameters in the shards' dtype and run as plain modules.

    Attributes:
        here: True if this rank shows them; otherwise only rank 0 does.
    """

    here: bool

    def require_here(self) -> None:
        """Raise an error if this rank does not have the full parameters.

        Raises:
            ShardingError: Only rank 0 has them.
        """
        if not self.here:
            raise ShardingError(
                "Only rank 0 has the full parameters here (rank0_only=True), so other ranks can neither run the model "
                "nor read its state. Do that on rank 0 only, or on every rank with rank0_only=False."
            )


class Unit:
    """Parameters that are gathered and reduced together, their lanes and their modules.

    The gathered state belongs to the lanes (:class:`Lane`). The unit adds whether its modules show the full parameters
    or the shards.

    Attributes:
        index: Position in the model's list of units; the root is 0.
        runtime: The runtime of the sharded model it belongs to.
        hooks: Its ``UnitHooks``.
        name: Qualified name of its module when it was sharded.
        modules: The modules whose forwards need the parameters, in the order they run in; nearly always one.
        params: Its parameters.
        lanes: Its lanes.
        policy: Its policy from ``fully_shard``.
        options: Settings that may change between steps.
        unsharded: Whether the modules' attributes are the full parameters.
        keep: Reasons to stay gathered.
        summoned: Set while the modules show full parameters that were not gathered into the lanes.
        open_calls: Number of forward calls that are running.
        recomputed: Number of forward calls of a reentrant checkpoint whose backward is not over.
        group_call: For a unit of several modules, the call that spans them while it is open.
        group_needs_backward: Whether an output of that call requires grad.
        recorder: Notified while a step is recorded.
    """

    def __init__(
        self,
        name: str,
        modules: tuple[nn.Module, ...],
        params: list[ShardedParam],
        lanes: list[Lane],
        policy: UnitPolicy,
    ) -> None:
        """Take over parameters and lanes whose shards are filled; the gathered buffers are released."""
        self.index = 0
        self.runtime: Any = None  # types of higher floors
        self.hooks: Any = None
        self.name = name
        self.modules = modules
        self.params = params
        self.lanes = lanes
        self.policy = policy
        self.options = UnitOptions(divide=policy.precision.divide)
        self.unsharded = False
        self.keep: set[Keep] = set()
        self.summoned: Summoned | None = None
        self.open_calls = 0
        self.recomputed = 0
        self.group_call: Call | None = None
        self.group_needs_backward = False
        self.recorder = StepRecorder()
        self._pending: list[PendingReduce] = []
        self._final = False  # no further gradients follow the reduce under way
        self._complete = 0  # parameters with a complete gradient that is not reduced yet
        self._hooks_due = False  # gradient hooks to be called when backward is over
        self.count_trainable()
        for param in params:
            param.sharded.shard_unit = weakref.ref(self)  # type: ignore[attr-defined]
            param.to_sharded()
        for lane in lanes:
            lane.release()

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
        """Count the gradients that complete the unit; called again after parameters were frozen or unfrozen."""
        self._expected = sum(p.trainable for p in self.params)
        self.trainable = self._expected > 0
        for lane in self.lanes:
            lane.trainable = any(p.trainable for p in self.params_of(lane))

    def params_of(self, lane: Lane) -> list[ShardedParam]:
        """Return the parameters in ``lane``."""
        return [param for param in self.params if param.lane is lane]

    # Parameters

    @property
    def state(self) -> LaneState:
        """SHARDED while a lane still has to be gathered, else GATHERING while one is under way, else GATHERED."""
        states = {lane.state for lane in self.lanes}
        return next((s for s in (LaneState.SHARDED, LaneState.GATHERING) if s in states), LaneState.GATHERED)

    @property
    def stays_unsharded(self) -> bool:
        """True if a context keeps the full parameters visible."""
        return not self.keep.isdisjoint(UNSHARDED)

    def version(self) -> int:
        """Return a number that grows with each in-place change of a shard."""
        with plain_functions():  # a guarded shard need not be asked
            return sum(param.sharded._version for param in self.params)

    def has_changed(self) -> bool:
        """Return whether this rank's gathered part differs from its shards; True if a lane is not gathered.

        Values are compared: fused optimizers and ``param.data`` do not raise a tensor's version.
        """
        gathered = (LaneState.GATHERING, LaneState.GATHERED)
        if any(lane.state not in gathered for lane in self.lanes) or any(param.moved for param in self.params):
            return True
        self._await_gather()
        return any(lane.has_changed() for lane in self.lanes)

    def issue_gather(self) -> None:
        """Start the all-gather of sharded lanes; do nothing if there are none."""
        due = [lane for lane in self.lanes if lane.state is LaneState.SHARDED]
        if not due:
            return
        self.recorder.begin(self.name, "gather")
        self.to_sharded()  # some lanes may be gathered: finish_gather shows all of them
        for lane in due:
            lane.issue_gather()
        self.recorder.issued(self.name, "gather", self._gathers())

    def reclaim(self) -> None:
        """Make the next gather include lanes that were freed early in this backward."""
        for lane in self.lanes:
            lane.reclaim()

    def free_early(self, param: ShardedParam) -> None:
        """Free the gathered memory of ``param``, which is alone in its lane, before the rest of the unit."""
        if param.lane.state is LaneState.GATHERED and self.state is LaneState.GATHERED:
            self.settle()
            param.to_sharded()
            param.lane.free_early()

    def finish_gather(self) -> None:
        """Wait for the all-gather and show the full parameters; do nothing if that is done."""
        if self.state is LaneState.SHARDED:
            raise InvariantError(f"unit {self.name}: finish_gather in state {self.state}")
        self._await_gather()
        if not self.unsharded:
            self.unsharded = True
            for param in self.params:
                if param.lane.state is not LaneState.SPENT:
                    param.to_unsharded()

    def refuse_writes(self) -> None:
        """Refuse writes of forward to full parameters: their memory is freed, and the change would be lost.

        Raises:
            ShardingError: A parameter was written to.
        """
        for lane in self.lanes:
            if lane.full.tensor._version != lane.full.version and not self.stays_unsharded:
                lane.full.version = lane.full.tensor._version
                names = ", ".join(param.meta.name for param in self.params_of(lane)[:3])
                raise ShardingError(
                    f"The forward of unit {self.name} changed a parameter in place, one of {names}…: its gathered "
                    "memory is freed after forward, so the change would be lost. Change the parameters after the "
                    "step (`with torch.no_grad(): p.clamp_(…)`); in place of nn.Embedding(max_norm=…), scale the rows."
                )

    def settle(self) -> None:
        """Wait until other ranks have read this rank's part of the all-gather: only then may it change or be freed."""
        self._wait("gather", [lane.unsettled for lane in self.lanes if lane.unsettled is not None], settle)
        for lane in self.lanes:
            lane.unsettled = None

    def to_sharded(self) -> None:
        """Show the shards but keep the gathered memory: between forward and backward only autograd looks at it."""
        if self.unsharded:
            self.unsharded = False
            for param in self.params:
                param.to_sharded()

    def reshard(self) -> None:
        """Show the shards and free the gathered parameters; wait for a gather under way."""
        if all(lane.state is LaneState.SHARDED for lane in self.lanes) and not self.unsharded:
            return
        self._await_gather()
        self.settle()
        self.to_sharded()
        for lane in self.lanes:
            lane.release()

    def _gathers(self) -> list[Work]:
        return [lane.gather_work for lane in self.lanes if lane.gather_work is not None]

    def _await_gather(self) -> None:
        self._wait("gather", self._gathers(), lambda work: work.wait())
        for lane in self.lanes:
            if lane.state is LaneState.GATHERING:
                lane.finish_gather()

    def _wait(self, kind: Transfer, works: Sequence[Work], how: Callable[[Work], None]) -> None:
        """Apply ``how``, which waits, to ``works``."""
        if works:
            self.recorder.wait(self.name, kind, works, how)

    # Gradients

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
        """Record that every use of ``param`` has given its gradient; return True if that completes the unit."""
        if param.arrived and not param.waiting:
            param.waiting = True
            self._complete += 1
        if self._complete == self._expected:
            self.copy_held()
        return self._complete == self._expected

    def copy_held(self) -> None:
        """Bring the gradients that wait for others into the lanes."""
        for lane in self.lanes:
            lane.copy_held()

    @property
    def reducing(self) -> bool:
        """True if a reduce-scatter is under way: the lanes' gradients must not be written."""
        return bool(self._pending)

    @property
    def holds_gradient(self) -> bool:
        """True if an unsharded gradient waits to be reduced (one under way does not count)."""
        return not self._pending and any(lane.holds_gradient for lane in self.lanes)

    def issue_reduce(self, *, across: bool, final: bool) -> None:
        """Start the reduce-scatter, with zeros where no gradient arrived.

        Args:
            across: Whether to sum over replicas too.
            final: Whether no more gradients of the unit follow in this backward.
        """
        self.finish_reduce()
        self._final = final
        self.recorder.begin(self.name, "reduce")
        self._pending = start_reduce(self.lanes, across=across)
        self.recorder.issued(self.name, "reduce", [one.work for one in self._pending])
        self._complete = 0
        for param in self.params:
            param.waiting = False

    def finish_reduce(self) -> None:
        """Wait for the reduce-scatter and assign the gradients of the shards; do nothing if none is under way."""
        pending, self._pending = self._pending, []
        self._wait("reduce", [one.work for one in pending], lambda work: work.wait())
        for one in pending:
            self._assign(one.lane, finish_reduce(one, self.options.divide))
        self.record_gradients()

    def finish_partial(self) -> None:
        """Sum over replicas what backwards without the all-reduce have left; do nothing if there is nothing."""
        for lane in self.lanes:
            self._assign(lane, finish_partial(lane, self.options.divide))

    @on_rows
    def gradient_bytes(self) -> int:
        """Return the bytes of the shards' gradients on the device that the unit computes on."""
        own = (param.sharded.grad for param in self.params if not param.lane.offloaded)
        return sum(gradient.nbytes for gradient in own if gradient is not None)

    def record_gradients(self) -> None:
        """Record the size of the shards' gradients."""
        self.recorder.gradients_take(self.name, self.gradient_bytes)

    def _assign(self, lane: Lane, shard: torch.Tensor | None) -> None:
        """Assign a lane's reduced gradient to its parameters, and call the hooks of those that are complete."""
        if shard is None:
            return
        if self.options.on_reduced is not None:
            self.options.on_reduced(shard)
        members = self.params_of(lane)
        hooked = [param for param in members if param.has_gradient_hooks]
        if lane.offloaded:
            shard = lane.to_host(shard)
            if hooked or any(param.sharded.grad is not None for param in members):
                lane.device.host_ready()  # the CPU reads it now; otherwise the end of backward waits
        for param in members:
            param.take_gradient(shard)
        if hooked and self._final:
            self._call_hooks(hooked)
        elif hooked:
            self._hooks_due = True

    def _call_hooks(self, params: list[ShardedParam]) -> None:
        """Call the gradient hooks of ``params``; for those without a gradient here, the end of backward decides."""
        for param in params:
            if param.arrived:
                param.stepped = True
                param.call_gradient_hooks()

    def call_due_hooks(self) -> None:
        """Call the hooks of gradients that came in several parts: backward is over, so they are complete."""
        if self._hooks_due:
            self._call_hooks([param for param in self.params if param.has_gradient_hooks and not param.stepped])

    def begin_backward(self) -> None:
        """Forget the last backward, and decide whether the unit stays gathered after this one."""
        for param in self.params:
            param.assigned = None
        if not self.options.reshard_after_backward:
            self.keep.add(Keep.NEXT_PASS)

    def end_backward(self, *, synced: bool) -> None:
        """Reset the counts of this backward; gradients that arrived without being reduced keep their flag."""
        self.copy_held()
        self._complete = 0
        self._hooks_due = False
        self.recomputed = 0
        self.keep -= {Keep.OUTPUT, Keep.NEXT_PASS}
        if not self.options.reshard_after_backward:
            self.keep.add(Keep.NEXT_PASS)
        for param in self.params:
            param.waiting = param.stepped = False
            param.reads = 0
            param.arrived = param.arrived and (not synced or param.lane.partial is not None)

    def drop_gradients(self) -> None:
        """Discard the unsharded gradients of a backward that was abandoned."""
        for one in self._pending:
            one.work.wait()
            settle(one.sent)
        self._pending = []
        for lane in self.lanes:
            lane.drop_gradient()
            lane.partial = None
        self.end_backward(synced=True)
        self.keep.discard(Keep.NEXT_PASS)
