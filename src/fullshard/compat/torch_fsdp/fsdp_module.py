"""What FSDP2 adds to a module's class: methods that act on its unit, and on those below."""
# ruff: noqa: FBT001, FBT002 (torch's signatures)

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from fullshard import engine
from fullshard.compat.torch_fsdp.model_state import load_model_state_dict, model_state_dict
from fullshard.engine import Keep, LaneState, Unit
from fullshard.errors import ConfigError, ShardingError

_STATE = "_fullshard_fsdp2"


@dataclass(frozen=True)
class ModuleState:
    """What ``fully_shard`` made of one module.

    Attributes:
        unit: Its unit; None of a module without parameters to shard.
        ignored: Parameters that stay as they are.
    """

    unit: Unit | None
    ignored: frozenset[nn.Parameter]


class UnshardHandle:
    """What waits for ``unshard(async_op=True)``."""

    def __init__(self, unit: Unit | None) -> None:
        """Wait for the gather of ``unit``."""
        self._unit = unit

    def wait(self) -> None:
        """Wait until the full parameters are there, and show them; nothing where they were resharded since."""
        unit, self._unit = self._unit, None
        if unit is not None and unit.state is not LaneState.SHARDED:
            unit.finish_gather()


class FSDPModule:
    """The class that a module gets on top of its own when ``fully_shard`` is called on it.

    Every method is torch's; all ranks call them alike. Those without ``recurse`` act on the module's own unit.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make a plain module where code makes another of a module's class, as ``nn.Sequential`` does for a slice."""
        mro = cls.__mro__
        plain: Any = mro[mro.index(FSDPModule) + 1]
        return plain(*args, **kwargs)

    # Parameters

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather the module's parameters, in the compute dtype; kept until ``reshard()`` or its next pass.

        Args:
            async_op: Return at once with a handle to wait for; the module's forward waits by itself.

        Returns:
            The handle; None if it was waited for.
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
        """Free the module's gathered parameters; its attributes are this rank's rows again.

        Raises:
            ShardingError: Inside the module's own forward.
        """
        unit = unit_of(self)
        if unit is not None:
            engine.reshard(unit)

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Say whether parameters are freed between forward and backward.

        Raises:
            ConfigError: It is not a bool.
        """
        _require_bool("reshard_after_forward", reshard_after_forward)
        for unit in _units(self, recurse=recurse):
            unit.runtime.configure(unit, reshard_after_forward=reshard_after_forward)

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Say whether parameters are freed after backward; if not, a forward before the next step gathers nothing."""
        for unit in _units(self, recurse=recurse):
            unit.runtime.configure(unit, reshard_after_backward=reshard_after_backward)

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Gather ``modules`` ahead when this module's forward starts, instead of those that followed it last time."""
        self._set_ahead("forward_prefetch", modules)

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Gather ``modules`` ahead when this module's backward starts, instead of the one that comes next."""
        self._set_ahead("backward_prefetch", modules)

    def _set_ahead(self, option: str, modules: Iterable[FSDPModule]) -> None:
        listed = [unit_of(module) for module in require_fsdp_modules(modules)]
        unit = unit_of(self)
        if unit is not None:
            unit.runtime.configure(unit, **{option: tuple(one for one in listed if one is not None)})

    # Gradients

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Say whether backward reduces gradients; if not they stay unsharded and are added up (``no_sync``)."""
        for unit in _units(self, recurse=recurse):
            unit.runtime.configure(unit, reduce_gradients=requires_gradient_sync, all_reduce=requires_gradient_sync)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Say whether backward adds up gradients over replicas; without replicas it changes nothing."""
        for unit in _units(self, recurse=recurse):
            all_reduce = requires_all_reduce or unit.runtime.mesh.replica_group.size == 1
            unit.runtime.configure(unit, all_reduce=all_reduce)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide the sum of gradients by ``factor`` instead of the number of ranks.

        Raises:
            ConfigError: The factor is not above zero.
        """
        if not factor > 0:
            raise ConfigError(f"Gradients are divided by a number above zero; got {factor}.")
        unit = unit_of(self)
        if unit is not None:
            unit.runtime.configure(unit, divide=factor)

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """The old name of :meth:`set_gradient_divide_factor`."""
        warnings.warn("Use `set_gradient_divide_factor` instead", FutureWarning, stacklevel=2)
        self.set_gradient_divide_factor(factor)

    def set_all_reduce_hook(self, hook: Callable[[torch.Tensor], object], *, stream: Any = None) -> None:
        """Have ``hook`` change each reduced gradient of this unit in place, before it comes to ``.grad``.

        Args:
            hook: Called with 1-D tensors, this rank's slices of the mean over ranks (and replicas), in the dtype they
                were added up in: one call for each lane of the unit, of which it has one for each dtype and large
                embedding; in the same order on every rank.
            stream: None.

        Raises:
            ConfigError: A stream is given.
        """
        if stream is not None:
            raise ConfigError(
                "set_all_reduce_hook(stream=…): the hook runs in the stream that takes the reduced gradient, which it "
                "must come before. Leave stream out."
            )
        unit = unit_of(self)
        if unit is not None:
            unit.runtime.configure(unit, on_reduced=hook)

    def set_post_optim_event(self, event: Any) -> None:
        """Have the next gathers wait for ``event``, recorded after the optimizer's step on another stream."""
        unit = unit_of(self)
        if unit is not None and unit.runtime.device.device.type != "cpu":
            event.wait()  # the current stream does, and every gather waits for that

    # Steps

    def reset_iter_state(self) -> None:
        """Drop what a failed forward or backward left behind; the next forward does so by itself.

        Raises:
            ShardingError: The module is not the root.
        """
        unit = unit_of(self)
        if unit is None or unit.runtime.root is not unit:
            raise ShardingError(f"reset_iter_state() is for the root; call it there, not on {type(self).__name__}.")
        unit.runtime.reset()

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Nothing to do: every backward waits for its own reductions."""

    # Hints that change when things happen, never what is computed

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Nothing to do: units of plain embeddings are not gathered in backward, and others would be missed there."""

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Nothing to do: gradients are always added up and divided afterwards."""

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Nothing to do: zeros always travel for what this rank did not use; what no rank used has no gradient."""

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Nothing to do but look at the number: gradients of one unit exist unsharded at once.

        Raises:
            ConfigError: It is not an int of at least 1.
        """
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int) or max_input_buffers < 1:
            raise ConfigError(f"max_input_buffers is an int of at least 1; got {max_input_buffers!r}.")

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Nothing to do: gathers and reductions share the mesh's group."""

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Nothing to do: gathers run in place in the unit's own buffer."""

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Nothing to do: gathers run in place in the unit's own buffer."""

    # What cannot be done

    def set_custom_all_gather(self, comm: Any) -> None:
        """Refused.

        Raises:
            ConfigError: Always.
        """
        _refuse_custom("set_custom_all_gather")

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        """Refused.

        Raises:
            ConfigError: Always.
        """
        _refuse_custom("set_custom_reduce_scatter")

    # The module's own

    def to_empty(self, *, device: Any, recurse: bool = True) -> Any:
        """Keep the memory and the values that ``fully_shard`` gave to a module from the meta device.

        Raises:
            ShardingError: They are on a device of another type.
        """
        wanted = torch.device(device or "cpu").type
        others = {p.device.type for p in cast("nn.Module", self).parameters(recurse)} - {wanted}
        if others:
            raise ShardingError(
                f"to_empty(device={device!r}): fully_shard has put the shards on {', '.join(sorted(others))} already. "
                "Choose the device with its mesh=, or offload_policy=CPUOffloadPolicy() for host memory."
            )
        return self

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """Show the shards before ``to``, ``double`` and their like change them."""
        self.reshard()
        return super()._apply(fn, recurse)  # type: ignore[misc]

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """This rank's part of the module's parameters, for ``torch.distributed.checkpoint``; every rank calls it."""
        unit = unit_of(self)
        inside_another = bool(args) or kwargs.get("destination") is not None
        if unit is None or Keep.CONTEXT in unit.runtime.root.keep or inside_another:
            return super().state_dict(*args, **kwargs)  # type: ignore[misc]
        return model_state_dict(cast("nn.Module", self), **kwargs)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Take over what :meth:`state_dict` gave, or full tensors; every rank calls it."""
        if unit_of(self) is None:
            return super().load_state_dict(state_dict, strict, assign)  # type: ignore[misc]
        return load_model_state_dict(cast("nn.Module", self), state_dict, strict, assign)


def fsdp_class(cls: type[nn.Module]) -> type[nn.Module]:
    """``cls`` with :class:`FSDPModule` on top."""
    if cls not in _CLASSES:
        body = {"__module__": cls.__module__, "_fullshard_plain_type": cls}
        _CLASSES[cls] = type(f"FSDP{cls.__name__}", (FSDPModule, cls), body)
    return _CLASSES[cls]


_CLASSES: dict[type[nn.Module], type[nn.Module]] = {}


def set_state(module: nn.Module, state: ModuleState) -> None:
    """Remember what ``fully_shard`` made of ``module``."""
    module.__dict__[_STATE] = state


def state_of(module: Any) -> ModuleState:
    """What ``fully_shard`` made of ``module``."""
    return module.__dict__[_STATE]


def unit_of(module: Any) -> Unit | None:
    """The unit of a module that ``fully_shard`` was called on; None where it has no parameters of its own to shard."""
    return state_of(module).unit


def require_fsdp_modules(modules: Iterable[Any]) -> Sequence[Any]:
    """The same modules.

    Raises:
        ConfigError: ``fully_shard`` was not called on one of them.
    """
    modules = list(modules)
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ConfigError(f"Expected modules that fully_shard was called on; got {type(module).__name__}.")
    return modules


def _units(module: Any, *, recurse: bool) -> Iterator[Unit]:
    """The units of ``module`` and, with ``recurse``, of the modules in it."""
    for one in module.modules() if recurse else [module]:
        if isinstance(one, FSDPModule) and (unit := unit_of(one)) is not None:
            yield unit


def _require_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ConfigError(f"{name} is True or False; got {value!r}.")


def _refuse_custom(name: str) -> None:
    raise ConfigError(
        f"{name} is not supported: fullshard's collectives go through a Comm. To change how tensors travel, write a "
        "Comm (fullshard.comm.Comm) and pass it as fully_shard(module, mesh=comm); else leave the call out."
    )
