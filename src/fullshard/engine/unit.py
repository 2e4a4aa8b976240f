"""A unit: the parameters that are gathered and reduced together, and their state."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from functools import partial

import torch
from torch import nn

from fullshard.comm import Mesh, Work
from fullshard.engine.gather import start_gather
from fullshard.engine.lane import LaneState
from fullshard.engine.param import COPY_REFUSED, CREATE_GRAPH_REFUSED, ShardedParam
from fullshard.engine.reduce import PendingReduce, finish_reduce, start_reduce
from fullshard.errors import InvariantError, ShardingError


class State(Enum):
    """Where a unit's parameters are."""

    SHARDED = "sharded"
    GATHERING = "gathering"
    GATHERED = "gathered"


class Unit:
    """The state machine of one unit; it owns the buffers, and its verbs are the only ones that move them.

    ::

        SHARDED --issue_gather--> GATHERING --finish_gather--> GATHERED --reshard--> SHARDED

    Attributes:
        index: Place in the model's list of units; the root is 0.
        name: Qualified name of its module.
        module: The module whose forward needs the parameters.
        params: Its parameters.
        lanes: Its buffers.
        state: Where the parameters are.
        expected_uses: Forward uses that will write their weight's gradient into the lane themselves.
        shown: Whether the modules' attributes are the full parameters.
        pinned: Whether the unit stays gathered until backward is over (nothing tells when it is done with them).
        held: Number of contexts that want the unit gathered.
        open_calls: Forward calls that run right now.
    """

    def __init__(
        self, index: int, name: str, module: nn.Module, params: list[ShardedParam], lanes: list[LaneState], mesh: Mesh
    ) -> None:
        """Take over parameters and lanes whose shards are filled; the lanes' buffers are released."""
        self.index = index
        self.name = name
        self.module = module
        self.params = params
        self.lanes = lanes
        self.mesh = mesh
        self.state = State.SHARDED
        self.pinned = False
        self._works: list[Work] = []
        self._pending: list[PendingReduce] = []
        self._waiting_for = sum(p.trainable for p in params)
        self.trainable = self._waiting_for > 0
        self._arrived = 0
        self.expected_uses = 0
        self.shown = False
        self.held = 0
        self.open_calls = 0
        for param in params:
            param.show_shard()
        for lane in lanes:
            lane.full.release()

    def __deepcopy__(self, memo: dict[int, object]) -> Unit:
        """Refuse: a copy would share this rank's buffers and join other ranks' collectives.

        Raises:
            ShardingError: Always.
        """
        raise ShardingError(COPY_REFUSED)

    def __reduce__(self) -> str:
        """Refuse to be pickled, as ``__deepcopy__`` does."""
        return str(self.__deepcopy__({}))

    # Parameters

    def issue_gather(self) -> None:
        """Start the all-gather; nothing when it is under way or done."""
        if self.state is not State.SHARDED:
            return
        self._works = start_gather(self.mesh.shard, self.lanes)
        self.state = State.GATHERING

    def finish_gather(self) -> None:
        """Wait for the all-gather and show the full parameters; nothing when that is done."""
        if self.state is State.SHARDED:
            raise InvariantError(f"unit {self.name}: finish_gather in state {self.state}")
        for work in self._works:
            work.wait()
        self._works = []
        self.state = State.GATHERED
        if not self.shown:
            self.shown = True
            for param in self.params:
                param.show_full()

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
        for work in self._works:
            work.wait()
        self._works = []
        self.hide()
        for lane in self.lanes:
            lane.full.release()
        self.state = State.SHARDED

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
            low, high = lane.lane.shard_bounds(self.mesh.shard.rank)
            mine = lane.full.alias[low:high]
            # Only where it differs: a shard is wider than the compute dtype, and what nobody touched keeps its bits.
            changed = mine != lane.shard.to(mine.dtype)
            lane.shard[changed] = mine[changed].to(lane.shard.dtype)

    # Gradients

    def watch_gradients(self, on_arrival: Callable[[Unit, ShardedParam], None]) -> None:
        """Have ``on_arrival(unit, param)`` called whenever autograd has accumulated a gradient."""
        for param in self.params:
            param.on_arrival = partial(on_arrival, self)

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
        param.state.add_gradient(param.place, gradient)
        param.full.grad = None

    def note_arrival(self, param: ShardedParam, *, fused: bool) -> bool:
        """A gradient of ``param`` is in the lane.

        Args:
            param: The parameter.
            fused: It was written by one of the expected uses, not by autograd.

        Returns:
            Whether every trainable parameter of the unit has its gradient now.
        """
        if fused:
            self.expected_uses = max(0, self.expected_uses - 1)
        param.arrived = True
        if not param.waiting:
            param.waiting = True
            self._arrived += 1
        return self._arrived == self._waiting_for and self.expected_uses == 0

    @property
    def reducing(self) -> bool:
        """Whether a reduce-scatter is under way: the lanes' gradients must not be written."""
        return bool(self._pending)

    @property
    def holds_gradient(self) -> bool:
        """Whether an unsharded gradient waits to be reduced (one under way does not count)."""
        return not self._pending and any(lane.gradient is not None for lane in self.lanes)

    def issue_reduce(self) -> None:
        """Start the reduce-scatter, with zeros where no gradient arrived."""
        self.finish_reduce()
        self._pending = start_reduce(self.mesh, self.lanes)
        self._arrived = 0
        for param in self.params:
            param.waiting = False

    def finish_reduce(self) -> None:
        """Wait for the reduce-scatter and assign the gradients of the shards; nothing when none is under way."""
        pending, self._pending = self._pending, []
        for one in pending:
            shard = finish_reduce(self.mesh, one)
            for param in self.params:
                if param.state is one.state:
                    param.take_gradient(shard)

    def arrivals(self) -> list[bool]:
        """For each trainable parameter, whether a gradient arrived since the last backward that was reduced."""
        return [param.arrived for param in self.params if param.trainable]

    def begin_backward(self) -> None:
        """Remember which shards have a gradient already."""
        for param in self.params:
            param.had_gradient = param.shard.grad is not None

    def end_backward(self, *, synced: bool) -> None:
        """Begin a new count of arrivals; what arrived without being reduced is remembered for the flags."""
        self._arrived = 0
        self.expected_uses = 0
        for param in self.params:
            param.waiting = False
            param.arrived = param.arrived and not synced

    def drop_gradients(self) -> None:
        """Throw away unsharded gradients of a backward that was given up."""
        for one in self._pending:
            one.work.wait()
        self._pending = []
        for lane in self.lanes:
            lane.drop_gradient()
        self.end_backward(synced=True)
