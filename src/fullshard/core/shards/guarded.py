"""Classes of a model's Parameters while their elements must not be used, or while their use is recorded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from fullshard.core.layout import ShardMeta
from fullshard.core.shards.shard import ShardParameter, tensors_in
from fullshard.core.torch_private import plain_functions, plain_subclass
from fullshard.errors import ShardingError

# Attributes that can be read without memory behind the tensor.
_HARMLESS = frozenset({"shape", "dtype", "device", "requires_grad", "grad", "is_leaf", "layout", "ndim", "is_cuda"})

# Attributes and methods of a shard that are allowed while the model computes: none accesses its elements.
_ABOUT_SHARDS = (
    _HARMLESS
    | {"size", "dim", "numel", "nelement", "stride", "storage_offset", "data_ptr", "element_size", "itemsize", "nbytes"}
    | {"is_contiguous", "is_floating_point", "is_complex", "is_meta", "is_cpu", "is_sparse", "is_quantized"}
    | {"is_nested", "is_inference", "is_pinned", "is_shared", "get_device", "grad_fn", "grad_dtype", "retains_grad"}
    | {"names", "requires_grad_", "_version", "_backward_hooks", "_post_accumulate_grad_hooks", "__len__"}
    | {"new_zeros", "new_ones", "new_empty", "new_full", "new_tensor", "result_type"}
)


def _attribute_of(func: Any) -> str:
    """Return the name of the attribute that ``func`` reads, if it is the getter of a property."""
    return getattr(getattr(func, "__self__", None), "__name__", "")


def reads_metadata(func: Any) -> bool:
    """Return True if a function of torch reads only a parameter's metadata, not its elements."""
    name = getattr(func, "__name__", "")
    name = _attribute_of(func) if name in ("__get__", "__set__", "__delete__") else name
    return name in _ABOUT_SHARDS - {"data_ptr", "_version", "new_tensor"}


class FreedParameter(nn.Parameter):
    """The class of a full parameter whose memory is free: any use raises an error instead of reading freed memory."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Allow metadata and refuse the rest.

        Raises:
            ShardingError: Anything but metadata is used.
        """
        attribute = _attribute_of(func)
        if attribute in _HARMLESS:
            with plain_functions():
                return func(*args, **(kwargs or {}))
        raise ShardingError(
            f"A full parameter was used ({attribute or getattr(func, '__name__', func)}) after its unit released it: "
            "its memory is free outside forward and backward. Read it inside `with unsharded(model):` or clone it "
            "during forward."
        )


class FullParameter(nn.Parameter):
    """The class of a full parameter while it is shown: a write through ``data`` is not lost silently.

    Attributes:
        watcher: Returns the engine's object for the parameter.
    """

    watcher: Callable[[], Any]
    __torch_function__ = plain_subclass  # pyright: ignore[reportAssignmentType]

    @property
    def data(self) -> torch.Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The values, detached; unlike torch's, with the parameter's version, by which the engine notices a write."""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if _is_same(self, value):
            return  # module.to(dtype) in forward, if it has that dtype already
        name = self.watcher().meta.name
        raise ShardingError(
            f"{name}.data was assigned during forward ({self.dtype} to {value.dtype}): the gathered memory is freed "
            "after it, so the change would be lost. Assign it after the step, or compute with a new tensor in forward. "
            "If the module casts itself, keep it in its dtype: MixedPrecision(keep_fp32=(name of its class,))."
        )

    def set_(self, *args: Any, **kwargs: Any) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Do nothing if it is set to itself: torch's would count as a write.

        ``parametrize`` does so when forward registers a parametrization, as peft's ``target_parameters`` do.
        """
        if len(args) == 1 and isinstance(args[0], torch.Tensor) and _is_same(self, args[0]):
            return self
        return super().set_(*args, **kwargs)


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (one.data_ptr(), one.dtype, one.shape, one.stride()) == (
        other.data_ptr(),
        other.dtype,
        other.shape,
        other.stride(),
    )


class WatchedParameter(FullParameter):
    """The class of a table while it is shown: records any use outside linear and embedding modules."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Record the use, unless it only reads metadata."""
        kwargs = kwargs or {}
        with plain_functions():
            if _attribute_of(func) not in _HARMLESS:
                for one in tensors_in((args, kwargs)):
                    if isinstance(one, WatchedParameter):
                        one.watcher().plain_use = True
            return func(*args, **kwargs)


class GuardedShard(ShardParameter):
    """The class of a shard while its model's forward runs: it must not be used as if it were the full parameter.

    It appears if a root uses a block's weight outside the block, or a module keeps a Parameter in a list or a
    closure: the full parameter is only shown inside the call of its unit.
    """

    shard_meta: ShardMeta
    shard_unit: Callable[[], Any]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
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
            with plain_functions():
                return func(*args, **kwargs)
        shard = next(one for one in tensors_in((args, kwargs)) if isinstance(one, cls))
        unit = shard.shard_unit()
        raise ShardingError(
            f"{shard.shard_meta.name}, of shape {shard.shard_meta.global_shape}, was used ({name}) during the model's "
            f"forward but outside the forward of its unit {'?' if unit is None else unit.name}, where only this rank's "
            "rows of it are available. Call the module that owns it (`self.block.linear(x)`); or use a wrap policy "
            "that puts its uses into that unit, or it into the root; or exclude it with ignored_params."
        )


def table_of(weight: torch.Tensor) -> Any:
    """Return the engine's object for a weight of a sharded model if its rows may stay home; else None."""
    full = weight.full_parameter() if isinstance(weight, ShardParameter) else weight  # type: ignore[attr-defined]
    watcher = getattr(full, "watcher", None)
    table = None if watcher is None else watcher()
    return table if hasattr(table, "is_home") else None
