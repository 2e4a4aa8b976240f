"""The two Parameters of one sharded parameter, and the places they take turns in."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node, get_gradient_edge

from fullshard.engine.lane import LaneState, Origin
from fullshard.engine.torch_private import can_take_data
from fullshard.errors import ShardingError
from fullshard.layout.sharded import ShardMeta

# Attributes that can be read without memory behind the tensor.
_HARMLESS = frozenset({"shape", "dtype", "device", "requires_grad", "grad", "is_leaf", "layout", "ndim", "is_cuda"})


COPY_REFUSED = (
    "A sharded model cannot be copied or pickled: the copy would take part in other ranks' collectives. Copy the model "
    "before fully_shard, or write it with fullshard.save(model, path)."
)

CREATE_GRAPH_REFUSED = (
    "backward(create_graph=True) is not supported on a sharded model: gradients are reduced at once. Compute second "
    "derivatives on the unsharded model."
)


class FreedParameter(nn.Parameter):
    """What a full parameter is while its memory is given back: any use raises instead of reading freed memory."""

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Let metadata through and refuse the rest.

        Raises:
            ShardingError: Always, but for metadata.
        """
        attribute = getattr(getattr(func, "__self__", None), "__name__", "")  # of a property's getter
        if attribute in _HARMLESS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise ShardingError(
            f"A full parameter was used ({attribute or getattr(func, '__name__', func)}) after its unit released it: "
            "its memory is gone outside forward and backward. Read it inside `with unsharded(model):` or clone it "
            "during forward."
        )


class ShardedParam:
    """One parameter of a unit.

    Attributes:
        meta: Name, shape and place.
        state: The lane that holds it.
        place: Index of its placement in the lane.
        slots: ``(module, key)`` where it is registered; all switch together, so ties hold.
        shard: What the optimizer sees: this rank's rows, a view of the lane's shard.
        full: What forward and backward see: a view of the lane's gathered buffer.
        accumulate: The node that accumulates the gradient of ``full``; a backward that leaves it out wants none.
        on_arrival: Called with this object when autograd has accumulated a gradient in ``full``.
        arrived: Whether a gradient arrived in this backward.
        waiting: Whether one is in the lane that has not gone out yet.
        had_gradient: Whether the shard had a gradient when this backward began.
        address: Where ``shard`` must have its data, for noticing that somebody moved it.
    """

    def __init__(self, meta: ShardMeta, state: LaneState, origin: Origin, *, trainable: bool) -> None:
        """Make both parameters; the lane's buffer must be held."""
        self.meta = meta
        self.state = state
        self.place = state.lane.placements.index(meta.placement)
        self.slots = origin.slots
        start, numel = meta.placement.start, meta.placement.numel
        full = state.full.tensor[start : start + numel].view(meta.global_shape)
        self.full = nn.Parameter(full, requires_grad=trainable)
        self.shard = self._make_shard(origin.param, trainable=trainable)
        self.address = self.shard.data_ptr()
        self.trainable = trainable
        self.numel = numel
        self.on_arrival: Callable[[ShardedParam], None] | None = None
        self.accumulate: Node | None = None
        if trainable:
            self.accumulate = get_gradient_edge(self.full).node
            self.full.register_post_accumulate_grad_hook(_Arrival(self))
        self.had_gradient = False
        self.arrived = False
        self.waiting = False

    def _make_shard(self, original: nn.Parameter, *, trainable: bool) -> nn.Parameter:
        """The user's own Parameter with this rank's rows for its data, so that optimizers built earlier know it."""
        local = self.local_view(self.state.shard)
        if can_take_data(original, local):
            original.data = local
            original.grad = None
        else:  # from or to the meta device
            original = nn.Parameter(local, requires_grad=trainable)
        original.shard_meta = self.meta  # type: ignore[attr-defined]
        return original

    @property
    def has_rows(self) -> bool:
        """Whether this rank holds any of it."""
        start, stop = self.meta.element_range
        return stop > start

    def local_view(self, shard: torch.Tensor) -> torch.Tensor:
        """This parameter's part of a lane shard, (shard_numel,), in its local shape."""
        start, stop = self.meta.element_range
        if stop == start:
            return shard[:0].view(self.meta.local_shape)
        low, _ = self.meta.lane.shard_bounds(self.meta.rank)
        offset = self.meta.placement.start + start - low
        return shard[offset : offset + stop - start].view(self.meta.local_shape)

    def show_full(self) -> None:
        """Put the full parameter into every slot; its memory must hold the gathered values."""
        self.full.__class__ = nn.Parameter
        for module, key in self.slots:
            module._parameters[key] = self.full

    def show_shard(self) -> None:
        """Put the shard back into every slot."""
        for module, key in self.slots:
            module._parameters[key] = self.shard
        self.full.__class__ = FreedParameter

    def take_gradient(self, shard: torch.Tensor) -> None:
        """Assign or add this parameter's part of a lane's reduced gradient, (shard_numel,)."""
        if not self.has_rows:
            return  # torch's Adafactor divides by the number of rows; a parameter without a gradient is left out
        part = self.local_view(shard)
        if part.dtype != self.shard.dtype:
            part = part.to(self.shard.dtype)
        if self.shard.grad is None:
            self.shard.grad = part
        else:
            self.shard.grad.add_(part)


class _Arrival:
    """The hook on one full parameter; an object, so that copying a sharded model reaches the unit and is refused."""

    def __init__(self, param: ShardedParam) -> None:
        # Python's garbage collector does not see through autograd's hooks: a strong reference would never be freed.
        self.param = weakref.ref(param)

    def __deepcopy__(self, memo: dict[int, object]) -> _Arrival:
        raise ShardingError(COPY_REFUSED)

    def __call__(self, _full: torch.Tensor) -> None:
        param = self.param()
        if param is not None and param.on_arrival is not None:
            param.on_arrival(param)
