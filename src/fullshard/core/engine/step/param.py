"""One sharded parameter: its sharded and its full Parameter."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.autograd.graph import Node

from fullshard.core.engine.step.lane import Lane, PermanentBuffer, ReusableBuffer
from fullshard.core.layout.sharded import ShardMeta
from fullshard.core.shards import (
    FreedParameter,
    FullParameter,
    GuardedShard,
    ShardParameter,
    WatchedParameter,
    as_shard,
    on_rows,
    parameter_class,
    row_split_of,
    rows_of,
)
from fullshard.core.torch_private import can_take_data
from fullshard.errors import ShardingError

COPY_REFUSED = (
    "A sharded model cannot be copied or pickled: the copy would take part in other ranks' collectives. Copy the model "
    "before fully_shard, or write it with fullshard.save(model, path)."
)

CREATE_GRAPH_REFUSED = (
    "backward(create_graph=True) is not supported on a sharded model: gradients are reduced at once. Compute second "
    "derivatives on the unsharded model."
)


class ShardedParam:
    """One parameter of a unit: a sharded and a full Parameter, which take turns in the modules' slots.

    Attributes:
        meta: Name, shape and place.
        lane: The lane that holds it.
        place: Index of its placement in the lane.
        slots: ``(module, key)`` pairs where it is registered; all switch together, so ties hold.
        numel: Elements of the full parameter.
        sharded: The Parameter for the optimizer: this rank's rows, a view of the lane's shard.
        full: The Parameter for forward and backward: a view of the lane's gathered buffer.
        trainable: Whether ``full`` requires a gradient.
        watched: True if uses outside linear and embedding modules are noted: it is a table, freed early in backward.
        plain_use: True if there ever was such a use; its autograd graph may still be alive.
        reads: Uses by linear modules whose backward has yet to read it.
        accumulate: The autograd node that accumulates the gradient of ``full``; None while frozen.
        on_arrival: Called with this object when autograd has accumulated a gradient in ``full``.
        on_complete: Called with this object when every use of ``full`` in this backward has given its gradient.
        arrived: True if a gradient arrived in this backward.
        waiting: True if the complete gradient is in the lane and not reduced yet.
        stepped: True if gradient hooks of the sharded Parameter were called in this backward.
        inspected: True if a container looks at its class in forward, without computing with it.
        assigned: Version of the gradient that this backward assigned to the sharded Parameter; None if it had one.
        address: Where the data of ``sharded`` must be; another address means that a user replaced it.
        shard_class: The class of ``sharded`` between passes.
    """

    plain_class: type = nn.Parameter  # of ``full``: where it may be changed,
    shown_class: type = FullParameter  # while it is shown,
    freed_class: type = FreedParameter  # and while its memory is free

    def __init__(
        self, meta: ShardMeta, lane: Lane, original: nn.Parameter, slots: list[tuple[nn.Module, str]], *, is_table: bool
    ) -> None:
        """Make both Parameters of ``original``, the user's; the lane's gathered buffer must be held."""
        self.meta = meta
        self.lane = lane
        self.place = lane.layout.placements.index(meta.placement)
        self.slots = slots
        self.numel = meta.placement.numel
        self.sharded = self._make_sharded(original)
        self.on_arrival: Callable[[ShardedParam], None] | None = None
        self.on_complete: Callable[[ShardedParam], None] | None = None
        self.inspected = False
        self.assigned: int | None = None
        self.arrived = False
        self.waiting = False
        self.stepped = False
        self.watched = is_table and isinstance(lane.full, ReusableBuffer)
        self.plain_use = False
        self.reads = 0
        self.bind(trainable=lane.trainable)

    @on_rows
    def bind(self, *, trainable: bool) -> None:
        """Point both Parameters at the lane's current memory; the full one is recreated."""
        self.full = nn.Parameter(self.lane.full_view(self.place), requires_grad=False)
        self.full.watcher = weakref.ref(self)  # type: ignore[attr-defined]
        self.sharded.full_parameter = weakref.ref(self.full)  # type: ignore[attr-defined]
        local = self.local_view(self.lane.shard)
        if self.sharded.data_ptr() != local.data_ptr() or self.sharded.dtype != local.dtype:
            self.sharded.data = local
        if self.lane.dtypes.grad is not None and self.sharded.requires_grad:
            self.sharded.grad_dtype = self.lane.dtypes.grad
        self.address = self.sharded.data_ptr()
        self.accumulate: Node | None = None
        self.set_trainable(trainable=trainable)

    def set_trainable(self, *, trainable: bool) -> None:
        """Set whether autograd computes gradients of the full parameter; no unit may show it."""
        shown_as, self.full.__class__ = self.full.__class__, self.plain_class
        self.full.requires_grad_(trainable)
        self.trainable = trainable
        if trainable and self.accumulate is None:
            self.accumulate = _accumulator(self.full)
            self.full.register_post_accumulate_grad_hook(_Arrival(self))
            # The node runs once, after all uses, even if they wrote their gradients elsewhere and passed None. Counting
            # uses instead misses modules that the engine does not know, such as BART's own embedding class.
            self.accumulate.register_hook(_Complete(self))
        self.full.__class__ = shown_as

    def _make_sharded(self, original: nn.Parameter) -> nn.Parameter:
        """Give the user's own Parameter this rank's rows as data, so that optimizers built before still hold it."""
        local = self.local_view(self.lane.shard)
        if can_take_data(original, local):
            original.data = local
            original.grad = None
        else:  # from or to the meta device
            original = nn.Parameter(local, requires_grad=self.lane.trainable)
        self.shard_class = parameter_class(type(original))
        self._mark(original)
        original.__class__ = self.shard_class
        return original

    def _mark(self, shard: nn.Parameter) -> None:
        """Attach to a shard the metadata of its parameter."""
        group = self.lane.mesh.shard_group
        vars(shard).update(shard_meta=self.meta, shard_comm=group, row_split=row_split_of(self.meta, group))

    def rename(self, names: Sequence[str]) -> None:
        """Change the names to ``names``, the first one first; the lane may have got another mesh."""
        self.meta = dataclasses.replace(self.meta, name=names[0], aliases=tuple(names[1:]))
        self._mark(self.sharded)

    def guard_shard(self, *, on: bool) -> None:
        """Start or stop refusing computation with the shard."""
        if self.shard_class is ShardParameter:  # a subclass of the user's stays
            replica = on and not self.trainable and isinstance(self.lane.full, PermanentBuffer)
            in_forward = nn.Parameter if self.inspected or replica else GuardedShard
            self.sharded.__class__ = in_forward if on else ShardParameter

    @property
    def has_rows(self) -> bool:
        """True if this rank holds any elements."""
        start, stop = self.meta.element_range
        return stop > start

    @property
    def moved(self) -> bool:
        """True if the sharded Parameter was given other memory, by ``.data`` or a cast."""
        return rows_of(self.sharded).data_ptr() != self.address

    def local_view(self, shard: torch.Tensor) -> torch.Tensor:
        """Return this parameter's part of a lane shard, (shard_numel,), in its local shape."""
        start, stop = self.meta.element_range
        if stop == start:
            return shard[:0].view(self.meta.local_shape)
        low, _ = self.meta.layout.shard_bounds(self.meta.rank)
        offset = self.meta.placement.start + start - low
        return shard[offset : offset + stop - start].view(self.meta.local_shape)

    def to_unsharded(self) -> None:
        """Register the full Parameter in every slot; its memory must hold the gathered values."""
        self.full.__class__ = WatchedParameter if self.watched else self.shown_class
        for module, key in self.slots:
            module._parameters[key] = self.full

    def to_sharded(self) -> None:
        """Register the sharded Parameter in every slot."""
        for module, key in self.slots:
            module._parameters[key] = self.sharded
        self.full.__class__ = self.freed_class

    @on_rows
    def take_gradient(self, shard: torch.Tensor) -> None:
        """Assign this parameter's part of a lane's reduced gradient, (shard_numel,), or add it.

        Raises:
            ShardingError: An optimizer has stepped the parameter in this backward already.
        """
        if self.stepped:
            raise ShardingError(
                f"A gradient of {self.meta.name} arrived after its optimizer had stepped in this backward. Step in "
                "backward does not work with this mix of checkpointed and plain calls of one module; step after it."
            )
        if not self.trainable or not self.sharded.requires_grad:
            return
        part = self.local_view(shard)
        part = part.to(self.lane.dtypes.grad or self.sharded.dtype)
        if self.sharded.grad is None:
            self.sharded.grad = as_shard(part, self.sharded.row_split)  # type: ignore[attr-defined]
            self.assigned = part._version
        else:
            self.sharded.grad.add_(part)

    @on_rows
    def drop_zeros(self) -> None:
        """Set the gradient to None if all of it is the zeros that this backward assigned."""
        if self.sharded.grad is not None and self.sharded.grad._version == self.assigned:
            self.sharded.grad = None

    @property
    def has_gradient_hooks(self) -> bool:
        """True if hooks wait for the gradient of the sharded Parameter (an optimizer that steps in backward)."""
        return bool(self.sharded._post_accumulate_grad_hooks)  # type: ignore[attr-defined]

    def call_gradient_hooks(self) -> None:
        """Call the hooks from ``register_post_accumulate_grad_hook`` on the sharded Parameter, if it has a gradient."""
        if self.sharded.grad is not None:
            for hook in tuple((self.sharded._post_accumulate_grad_hooks or {}).values()):  # type: ignore[attr-defined]
                hook(self.sharded)


class _Leaf(torch.autograd.Function):
    """An operation on a leaf that calls none of its class, which may lack the view that torch's own way takes."""

    @staticmethod
    def forward(ctx: object, _full: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return torch.empty(0)


@torch.enable_grad()
def _accumulator(full: torch.Tensor) -> Node:
    """Return the autograd node that accumulates the gradient of ``full``."""
    output = _Leaf.apply(full)  # torch 2.11 forgets a function's inputs when its output is freed
    return output.grad_fn.next_functions[0][0]


class _Arrival:
    """The hook on a full parameter; an object, so that copying a sharded model reaches it and is refused."""

    def __init__(self, param: ShardedParam) -> None:
        # Weak: Python's garbage collector does not see through autograd's hooks, so a cycle would never be freed.
        self.param = weakref.ref(param)

    def __deepcopy__(self, memo: dict[int, object]) -> _Arrival:
        raise ShardingError(COPY_REFUSED)

    def __call__(self, _full: object, _outputs: object = None) -> None:
        param = self.param()
        if param is not None and param.on_arrival is not None:
            param.on_arrival(param)


class _Complete(_Arrival):
    """The hook on the autograd node that accumulates the gradient of a full parameter."""

    def __call__(self, _inputs: object, _outputs: object = None) -> None:
        param = self.param()
        if param is not None and param.on_complete is not None:
            param.on_complete(param)
