"""One sharded parameter: its sharded and its full Parameter, and the classes that guard them."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node, get_gradient_edge

from fullshard.engine.step.buffers import ReusableBuffer
from fullshard.engine.step.lane import Lane
from fullshard.engine.step.torch_private import can_take_data
from fullshard.errors import ShardingError
from fullshard.layout.sharded import ShardMeta

# Attributes that can be read without memory behind the tensor.
_HARMLESS = frozenset({"shape", "dtype", "device", "requires_grad", "grad", "is_leaf", "layout", "ndim", "is_cuda"})

# Attributes and methods of a shard allowed while the model computes: none reads or writes its elements.
_ABOUT_SHARDS = (
    _HARMLESS
    | {"size", "dim", "numel", "nelement", "stride", "storage_offset", "data_ptr", "element_size", "itemsize", "nbytes"}
    | {"is_contiguous", "is_floating_point", "is_complex", "is_meta", "is_cpu", "is_sparse", "is_quantized"}
    | {"is_nested", "is_inference", "is_pinned", "is_shared", "get_device", "grad_fn", "grad_dtype", "retains_grad"}
    | {"names", "requires_grad_", "_version", "_backward_hooks", "_post_accumulate_grad_hooks", "__len__"}
    | {"new_zeros", "new_ones", "new_empty", "new_full", "new_tensor", "result_type"}
)

COPY_REFUSED = (
    "A sharded model cannot be copied or pickled: the copy would take part in other ranks' collectives. Copy the model "
    "before fully_shard, or write it with fullshard.save(model, path)."
)

CREATE_GRAPH_REFUSED = (
    "backward(create_graph=True) is not supported on a sharded model: gradients are reduced at once. Compute second "
    "derivatives on the unsharded model."
)


def _attribute_of(func: Any) -> str:
    """Return the name of the attribute that ``func`` reads, if it is the getter of a property."""
    return getattr(getattr(func, "__self__", None), "__name__", "")


class FreedParameter(nn.Parameter):
    """The class of a full parameter whose memory is free: any use raises an error instead of reading freed memory."""

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Allow metadata and refuse the rest.

        Raises:
            ShardingError: Anything but metadata is used.
        """
        attribute = _attribute_of(func)
        if attribute in _HARMLESS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise ShardingError(
            f"A full parameter was used ({attribute or getattr(func, '__name__', func)}) after its unit released it: "
            "its memory is free outside forward and backward. Read it inside `with unsharded(model):` or clone it "
            "during forward."
        )


class WatchedParameter(nn.Parameter):
    """The class of a table while it is shown: notes any use outside linear and embedding modules."""

    watcher: Callable[[], Any]

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Note the use, unless it only reads metadata."""
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if _attribute_of(func) not in _HARMLESS:
                for value in (*args, *kwargs.values()):
                    for one in value if isinstance(value, (tuple, list)) else (value,):
                        if isinstance(one, WatchedParameter):
                            one.watcher().plain_use = True
            return func(*args, **kwargs)


class GuardedShard(nn.Parameter):
    """The class of a shard while its model's forward runs: it must not be used as if it were the full parameter.

    A root that uses a block's weight outside the block meets it, or a module that keeps a Parameter in a list or a
    closure: slots show the full parameter only inside the call of its unit.
    """

    shard_meta: ShardMeta
    shard_unit: Callable[[], Any]

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Allow metadata of the shard and refuse the rest.

        Raises:
            ShardingError: Anything but metadata is used.
        """
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        name = _attribute_of(func) if name in ("__get__", "__set__", "__delete__") else name
        cast_like_it = name in ("to", "type_as") and not isinstance(args[0], cls)
        if name in _ABOUT_SHARDS or cast_like_it or (name == "type" and len(args) == 1 and not kwargs):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        values = [one for v in (*args, *kwargs.values()) for one in (v if isinstance(v, (tuple, list)) else (v,))]
        shard = next(value for value in values if isinstance(value, cls))
        unit = shard.shard_unit()
        raise ShardingError(
            f"{shard.shard_meta.name}, of shape {shard.shard_meta.global_shape}, was used ({name}) during the model's "
            f"forward but outside the forward of its unit {'?' if unit is None else unit.name}, where only this rank's "
            "rows of it are available. Call the module that owns it (`self.block.linear(x)`); or use a wrap policy "
            "that puts its uses into that unit, or it into the root; or exclude it with ignored_params."
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
        watched: Whether uses outside linear and embedding modules are noted: it is a table, freed early in backward.
        plain_use: Whether there ever was such a use; its autograd graph may still be alive.
        reads: Uses by linear modules whose backward has yet to read it.
        accumulate: The autograd node that accumulates the gradient of ``full``; None while frozen.
        on_arrival: Called with this object when autograd has accumulated a gradient in ``full``.
        on_complete: Called with this object when every use of ``full`` in this backward has given its gradient.
        arrived: Whether a gradient arrived in this backward.
        waiting: Whether the complete gradient is in the lane and not reduced yet.
        stepped: Whether gradient hooks of the sharded Parameter were called in this backward.
        had_gradient: Whether the sharded Parameter had a gradient when this backward began.
        address: Where the data of ``sharded`` must be; another address means that a user replaced it.
        as_gradient: Makes ``sharded.grad`` from reduced rows, if set; a rank without rows then gets an empty gradient.
    """

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
        self.as_gradient: Callable[[ShardedParam, torch.Tensor], torch.Tensor] | None = None
        self.had_gradient = False
        self.arrived = False
        self.waiting = False
        self.stepped = False
        self.watched = is_table and isinstance(lane.full, ReusableBuffer)
        self.plain_use = False
        self.reads = 0
        self.bind(trainable=lane.trainable)

    def bind(self, *, trainable: bool) -> None:
        """Point both Parameters at the lane's current memory; the full one is recreated."""
        start = self.meta.placement.start
        full = self.lane.full.tensor[start : start + self.numel].view(self.meta.global_shape)
        self.full = nn.Parameter(full, requires_grad=False)
        self.full.watcher = weakref.ref(self)  # type: ignore[attr-defined]
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
        shown_as, self.full.__class__ = self.full.__class__, nn.Parameter
        self.full.requires_grad_(trainable)
        self.trainable = trainable
        if trainable and self.accumulate is None:
            self.accumulate = get_gradient_edge(self.full).node
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
        original.shard_meta = self.meta  # type: ignore[attr-defined]
        original.shard_comm = self.lane.mesh.shard_group  # type: ignore[attr-defined]
        return original

    def rename(self, names: Sequence[str]) -> None:
        """Change the names to ``names``, the first one first."""
        self.meta = dataclasses.replace(self.meta, name=names[0], aliases=tuple(names[1:]))
        self.sharded.shard_meta = self.meta  # type: ignore[attr-defined]

    def guard_shard(self, *, on: bool) -> None:
        """Start or stop refusing computation with the shard."""
        before, after = (nn.Parameter, GuardedShard) if on else (GuardedShard, nn.Parameter)
        guarded = self.trainable or isinstance(self.lane.full, ReusableBuffer)  # a frozen replica is safe to use
        if self.sharded.__class__ is before and (guarded or not on):  # a subclass of the user's stays
            self.sharded.__class__ = after

    @property
    def has_rows(self) -> bool:
        """Whether this rank holds any elements."""
        start, stop = self.meta.element_range
        return stop > start

    @property
    def moved(self) -> bool:
        """Whether the sharded Parameter was given other memory, by ``.data`` or a cast."""
        return self.sharded.data_ptr() != self.address

    def local_view(self, shard: torch.Tensor) -> torch.Tensor:
        """Return this parameter's part of a lane shard, (shard_numel,), in its local shape."""
        start, stop = self.meta.element_range
        if stop == start:
            return shard[:0].view(self.meta.local_shape)
        low, _ = self.meta.layout.shard_bounds(self.meta.rank)
        offset = self.meta.placement.start + start - low
        return shard[offset : offset + stop - start].view(self.meta.local_shape)

    def show_full(self) -> None:
        """Register the full Parameter in every slot; its memory must hold the gathered values."""
        self.full.__class__ = WatchedParameter if self.watched else nn.Parameter
        for module, key in self.slots:
            module._parameters[key] = self.full

    def show_shard(self) -> None:
        """Register the sharded Parameter in every slot."""
        for module, key in self.slots:
            module._parameters[key] = self.sharded
        self.full.__class__ = FreedParameter

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
        if not self.has_rows and self.as_gradient is None:
            return  # no gradient: torch's Adafactor would divide by the number of rows, zero
        part = self.local_view(shard)
        part = part.to(self.lane.dtypes.grad or self.sharded.dtype)
        if self.sharded.grad is None:
            self.sharded.grad = part if self.as_gradient is None else self.as_gradient(self, part)
        else:
            self.sharded.grad.add_(part)

    @property
    def has_gradient_hooks(self) -> bool:
        """Whether hooks wait for the gradient of the sharded Parameter (an optimizer that steps in backward)."""
        return bool(self.sharded._post_accumulate_grad_hooks)  # type: ignore[attr-defined]

    def call_gradient_hooks(self) -> None:
        """Call the hooks from ``register_post_accumulate_grad_hook`` on the sharded Parameter, if it has a gradient."""
        if self.sharded.grad is not None:
            for hook in tuple((self.sharded._post_accumulate_grad_hooks or {}).values()):  # type: ignore[attr-defined]
                hook(self.sharded)


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
