"""``FSDPModule``: the methods that FSDP2 adds to a sharded module's class."""
# ruff: noqa: FBT001, FBT002 (torch's signatures)

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from fullshard.compat.torch_fsdp.model_state import load_model_state_dict, model_state_dict
from fullshard.core import engine
from fullshard.core.engine import Keep, LaneState, Unit
from fullshard.core.engine.full.model_class import refuse_pickling, shallow_copy
from fullshard.core.engine.setup.initial import marked_like
from fullshard.errors import ConfigError, ShardingError

_STATE = "_fullshard_fsdp2"


@dataclass(frozen=True)
class ModuleState:
    """Result of ``fully_shard`` on one module.

    Attributes:
        unit: Its unit; None if it has no parameters to shard.
        ignored: Parameters left unsharded.
    """

    unit: Unit | None
    ignored: frozenset[nn.Parameter]


class UnshardHandle:
    """Handle of ``unshard(async_op=True)``."""

    def __init__(self, unit: Unit | None) -> None:
        """Create the handle of a gather of ``unit`` in progress."""
        self._unit = unit

    def wait(self) -> None:
        """Wait for the full parameters and register them; no effect if they were resharded in the meantime."""
        unit, self._unit = self._unit, None
        if unit is not None and unit.state is not LaneState.SHARDED:
            unit.finish_gather()


class FSDPModule:
    """Mixin that ``fully_shard`` adds to a module's class, with torch's methods.

    All ranks make the same calls in the same order. Methods without ``recurse`` act on the module's own unit.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Return a plain module when code instantiates a module's class, as ``nn.Sequential`` does for a slice."""
        mro = cls.__mro__
        plain: Any = mro[mro.index(FSDPModule) + 1]
        return plain(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Refuse: a copy would share this rank's buffers and join other ranks' collectives.

        Raises:
            ShardingError: Always.
        """
        raise ShardingError(
            f"FSDP does not support deepcopy, here of a {type(self).__name__}: the copy would take part in the same "
            "collectives. Copy the model before fully_shard, or load its state dict into another one."
        )

    __copy__ = shallow_copy
    __reduce_ex__ = refuse_pickling

    # Parameters

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather the module's parameters in the compute dtype; they are kept until ``reshard()`` or its next forward.

        Args:
            async_op: Return a handle at once instead of waiting; the module's forward waits automatically.

        Returns:
            The handle, or None without ``async_op``.
        """
        unit = unit_of(self)
        if unit is not None:
            engine.unshard(unit)
        handle = UnshardHandle(unit)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Free the module's gathered parameters; its attributes become this rank's rows.

        Raises:
            ShardingError: Called inside the module's own forward.
        """
        unit = unit_of(self)
        if unit is not None:
            engine.reshard(unit)

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Set whether parameters are freed between forward and backward.

        Raises:
            ConfigError: ``reshard_after_forward`` is not a bool.
        """
        if not isinstance(reshard_after_forward, bool):
            raise ConfigError(f"reshard_after_forward must be True or False; got {reshard_after_forward!r}.")
        for unit in _units(self, recurse=recurse):
            unit.runtime.configure(unit, reshard_after_forward=reshard_after_forward)

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Set whether parameters are freed after backward; if not, a forward before the next step gathers nothing."""
        for unit in _units(self, recurse=recurse):
            unit.runtime.configure(unit, reshard_after_backward=reshard_after_backward)

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Set the modules to gather when this module's forward starts; default: those that followed it last time."""
        self._set_ahead("forward_prefetch", modules)

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Set the modules to gather when this module's backward starts; default: the one whose backward is next."""
        self._set_ahead("backward_prefetch", modules)

    def _set_ahead(self, option: str, modules: Iterable[FSDPModule]) -> None:
        listed = [unit_of(module) for module in require_fsdp_modules(modules)]
        unit = unit_of(self)
        if unit is not None:
            unit.runtime.configure(unit, **{option: tuple(one for one in listed if one is not None)})

    # Gradients

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Set whether backward reduces gradients; if not, they are accumulated unsharded, as in ``no_sync``."""
        for unit in _units(self, recurse=recurse):
            unit.runtime.configure(unit, reduce_gradients=requires_gradient_sync, all_reduce=requires_gradient_sync)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Set whether backward all-reduces gradients across replicas; no effect without replicas."""
        for unit in _units(self, recurse=recurse):
            all_reduce = requires_all_reduce or all(lane.mesh.replica_group.size == 1 for lane in unit.lanes)
            unit.runtime.configure(unit, all_reduce=all_reduce)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide summed gradients by ``factor`` instead of by the number of ranks.

        Raises:
            ConfigError: ``factor`` is not above zero.
        """
        if not factor > 0:
            raise ConfigError(f"The gradient divide factor must be above zero; got {factor}.")
        unit = unit_of(self)
        if unit is not None:
            unit.runtime.configure(unit, divide=factor)

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """Call :meth:`set_gradient_divide_factor`, whose former name this is."""
        warnings.warn("Use `set_gradient_divide_factor` instead", FutureWarning, stacklevel=2)
        self.set_gradient_divide_factor(factor)

    def set_all_reduce_hook(self, hook: Callable[[torch.Tensor], object], *, stream: Any = None) -> None:
        """Set a hook that may change each reduced gradient of this unit in place before it becomes ``.grad``.

        Args:
            hook: Called once per lane of the unit (one for each dtype and one for each large embedding), in the same
                order on every rank, with a 1-D tensor: this rank's slice of the mean over ranks and replicas, in the
                reduce dtype.
            stream: Must be None.

        Raises:
            ConfigError: A stream is given.
        """
        if stream is not None:
            raise ConfigError(
                "set_all_reduce_hook(stream=…) is not supported: the hook runs on the stream that consumes the reduced "
                "gradient. Leave out stream."
            )
        unit = unit_of(self)
        if unit is not None:
            unit.runtime.configure(unit, on_reduced=hook)

    def set_post_optim_event(self, event: Any) -> None:
        """Make the next gathers wait for ``event``, recorded after the optimizer's step on another stream."""
        unit = unit_of(self)
        if unit is not None and unit.runtime.device.device.type != "cpu":
            event.wait()  # makes the current stream wait, for which every gather waits

    # Steps

    def reset_iter_state(self) -> None:
        """Discard the state that a failed forward or backward left; the next forward does so automatically.

        Raises:
            ShardingError: The module is not the root.
        """
        unit = unit_of(self)
        if unit is None or unit.runtime.root is not unit:
            raise ShardingError(f"reset_iter_state() must be called on the root, not on {type(self).__name__}.")
        unit.runtime.reset()

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """No effect: every backward waits for its own reductions."""

    # Hints that would change when communication happens, but not the result

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """No effect: units of plain embeddings are not gathered in backward, and other units need their parameters."""

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """No effect: gradients are always summed and then divided."""

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """No effect: zeros are sent for parameters unused on this rank; those unused on all ranks get no gradient."""

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Only validate the number: one unit's gradients exist unsharded, on CUDA two units'.

        Raises:
            ConfigError: ``max_input_buffers`` is not an int of at least 1.
        """
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int) or max_input_buffers < 1:
            raise ConfigError(f"max_input_buffers must be an int of at least 1; got {max_input_buffers!r}.")

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """No effect: gathers and reductions share the mesh's group."""

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """No effect: gathers run in place in the unit's own buffer."""

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """No effect: gathers run in place in the unit's own buffer."""

    # Unsupported

    def set_custom_all_gather(self, comm: Any) -> None:
        """Raise a ConfigError: custom collectives are not supported."""
        _refuse_custom("set_custom_all_gather")

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        """Raise a ConfigError: custom collectives are not supported."""
        _refuse_custom("set_custom_reduce_scatter")

    # nn.Module's methods

    def to_empty(self, *, device: Any, recurse: bool = True) -> Any:
        """Keep the memory and values that ``fully_shard`` gave a module from the meta device; allocate other buffers.

        Those are the buffers that nothing initialized. They are NaN, or the lowest integer, until the caller sets them.

        Raises:
            ShardingError: They are on a device of another type.
        """
        requested = torch.device(device or "cpu").type
        others = {p.device.type for p in cast("nn.Module", self).parameters(recurse)} - {requested}
        if others:
            raise ShardingError(
                f"to_empty(device={device!r}): the shards are on {', '.join(sorted(others))} since fully_shard. Choose "
                "the device with its mesh=, or offload_policy=CPUOffloadPolicy() for host memory."
            )
        for module in cast("nn.Module", self).modules() if recurse else [cast("nn.Module", self)]:
            for key, buffer in module._buffers.items():
                if buffer is not None and buffer.is_meta:
                    module._buffers[key] = marked_like(buffer, torch.device(device or "cpu"))
        return self

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """Register the shards before ``to``, ``double`` and similar methods change them."""
        self.reshard()
        return super()._apply(fn, recurse)  # type: ignore[misc]

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return this rank's part of the parameters, for ``torch.distributed.checkpoint``; every rank calls it."""
        unit = unit_of(self)
        inside_another = bool(args) or kwargs.get("destination") is not None
        if unit is None or Keep.CONTEXT in unit.runtime.root.keep or inside_another:
            return super().state_dict(*args, **kwargs)  # type: ignore[misc]
        return model_state_dict(cast("nn.Module", self), **kwargs)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Load what :meth:`state_dict` returned, or full tensors; every rank calls it."""
        if unit_of(self) is None:
            return super().load_state_dict(state_dict, strict, assign)  # type: ignore[misc]
        return load_model_state_dict(cast("nn.Module", self), state_dict, strict, assign)


def fsdp_class(cls: type[nn.Module]) -> type[nn.Module]:
    """Return the subclass of :class:`FSDPModule` and ``cls``; one per ``cls`` and name.

    Its name is torch's, ``FSDP<Name>``, except that a model with ``save_pretrained`` keeps its own: libraries look such
    classes up by name (transformers to shift labels and to convert weights) and write it into what they save.
    """
    name = cls.__name__ if _keeps_names.get() or hasattr(cls, "save_pretrained") else f"FSDP{cls.__name__}"
    if (cls, name) not in _CLASSES:
        body = {"__module__": cls.__module__, "_fullshard_plain_type": cls}
        _CLASSES[cls, name] = type(name, (FSDPModule, cls), body)
    return _CLASSES[cls, name]


_CLASSES: dict[tuple[type[nn.Module], str], type[nn.Module]] = {}

_keeps_names: ContextVar[bool] = ContextVar("fullshard_keeps_class_names", default=False)
"""Whether all classes keep their names; per thread, because ranks may be threads of one process."""


@contextmanager
def class_names_kept() -> Iterator[None]:
    """Make ``fully_shard`` keep the names of all classes in this context, as wrappers of version 1 do."""
    token = _keeps_names.set(True)
    try:
        yield
    finally:
        _keeps_names.reset(token)


def set_state(module: nn.Module, state: ModuleState) -> None:
    """Store the result of ``fully_shard`` on ``module``."""
    module.__dict__[_STATE] = state


def state_of(module: Any) -> ModuleState:
    """Return the result of ``fully_shard`` on ``module``."""
    return module.__dict__[_STATE]


def unit_of(module: Any) -> Unit | None:
    """Return the unit of a module that ``fully_shard`` was called on; None if it has no parameters to shard."""
    return state_of(module).unit


def require_fsdp_modules(modules: Iterable[Any]) -> Sequence[Any]:
    """Return ``modules`` as a list.

    Raises:
        ConfigError: ``fully_shard`` was not called on one of them.
    """
    modules = list(modules)
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ConfigError(f"Expected modules that fully_shard was called on; got {type(module).__name__}.")
    return modules


def _units(module: Any, *, recurse: bool) -> Iterator[Unit]:
    """Yield the unit of ``module`` and, with ``recurse``, those of the modules inside it."""
    for one in module.modules() if recurse else [module]:
        if isinstance(one, FSDPModule) and (unit := unit_of(one)) is not None:
            yield unit


def _refuse_custom(name: str) -> None:
    raise ConfigError(
        f"{name} is not supported: fullshard's collectives go through a Comm. To replace them, write a Comm "
        "(fullshard.comm.Comm) and pass it as fully_shard(module, mesh=comm); otherwise leave out the call."
    )
