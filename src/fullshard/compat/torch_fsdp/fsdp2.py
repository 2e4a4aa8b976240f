"""FSDP2's ``fully_shard`` on fullshard's engine, and ``FSDPModule``: the methods that it adds to a module's class."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.distributed import fsdp as _theirs
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from fullshard.compat.torch_fsdp.api import StateDictType, set_state_dict_type
from fullshard.compat.torch_fsdp.fsdp2_errors import (
    ConfigAssertionError,
    MeshValueError,
    ShardingAssertionError,
    WrapValueError,
)
from fullshard.compat.torch_fsdp.model_state import load_model_state_dict, model_state_dict
from fullshard.compat.torch_fsdp.optimizer_hooks import describe_state_of
from fullshard.compat.torch_fsdp.tensor import DeviceMesh, RaggedShard, Replicate, Shard
from fullshard.core import engine
from fullshard.core.comm import as_mesh, device_mesh_of
from fullshard.core.engine import Keep, LaneState, Unit
from fullshard.core.engine.full.model_class import refuse_pickling, shallow_copy
from fullshard.core.engine.parallel.parallel_lane import ParallelParam
from fullshard.core.engine.registry import runtime_of
from fullshard.core.engine.setup.initial import marked_like
from fullshard.core.engine.step.param import ShardedParam
from fullshard.core.policy import CPUOffload, MixedPrecision, ShardingStrategy
from fullshard.core.torch_private import composed, joined_mesh, note_composed
from fullshard.errors import ConfigError, ShardingError, WrapError

# ruff: noqa: FBT001, FBT002 (torch's signatures)


DataParallelMeshDims: Any = getattr(_theirs, "DataParallelMeshDims", None)  # torch 2.11 has none

_STATE = "_fullshard_fsdp2"


@dataclass(frozen=True, eq=False)
class ModuleState:
    """Result of ``fully_shard`` on one module; ``fully_shard.state(module)`` returns it."""

    unit: Unit | None  # None if it has no parameters to shard
    ignored: frozenset[nn.Parameter]  # parameters left unsharded


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
            ShardingError: Always; also an AssertionError, as in torch.
        """
        raise ShardingAssertionError(
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
        "(fullshard.Comm) and pass it as fully_shard(module, mesh=comm); otherwise leave out the call."
    )


__all__ = [
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "UnshardHandle",
    "fully_shard",
    "register_fsdp_forward_method",
    "share_comm_ctx",
]


def fully_shard(  # noqa: PLR0913 (torch's signature)
    module: nn.Module | Sequence[nn.Module],
    *,
    mesh: Any = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: Any = MixedPrecisionPolicy(),  # noqa: B008 (frozen)
    offload_policy: Any = OffloadPolicy(),  # noqa: B008 (without fields)
    ignored_params: Iterable[nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
) -> Any:
    """Shard the parameters of ``module`` that no earlier call took, as one unit; every rank calls it.

    Call it bottom up: on the blocks first, then on the root. ``module`` becomes an :class:`FSDPModule` in place. Its
    parameters and gradients are :class:`fullshard.Shard` (in torch: DTensors); parameters have ``device_mesh`` and
    ``placements``, of :class:`~fullshard.compat.torch_fsdp.tensor.RaggedShard`. Where ranks hold different values
    all take rank 0's, and rank 0 warns once for each group of ranks.

    Args:
        module: A module, or a list of modules that form one unit.
        mesh: A DeviceMesh with 1 axis (shard) or 2 (replicate, shard), or anything else that ``fullshard.fully_shard``
            takes; None: all ranks.
        reshard_after_forward: Whether to free parameters between forward and backward; None: all but the root's.
            An int must divide the number of ranks that shard: 1 is False, others are taken for True, with a warning.
        shard_placement_fn: Called with each parameter; must return None or ``Shard(dim)``. Parameters are cut by rows
            all the same; another dimension than 0 gives a warning.
        mp_policy: A :class:`MixedPrecisionPolicy`, or torch's.
        offload_policy: :class:`OffloadPolicy` or :class:`CPUOffloadPolicy`, or torch's.
        ignored_params: Parameters left unsharded, here and by later calls on enclosing modules.
        dp_mesh_dims: Must be None.

    Returns:
        ``module``.

    Raises:
        ConfigError: An argument has an unsupported value.
        WrapError: A module has no forward of its own, or a parameter is tied to one in a module sharded earlier.
        ShardingError: The module is sharded already.
        ProcessGroupError: There is no process group, or the mesh does not fit.
        ValueError, AssertionError: One of these errors where torch raises that class.
        MismatchError: Ranks hold different models; raised on every rank.
    """
    members = [module] if isinstance(module, nn.Module) else list(module)
    _check_modules(members)
    _check_mesh(mesh)
    inside = frozenset(_left_out(members))
    ignored = frozenset(ignored_params or ()) | inside
    params = list(dict.fromkeys(p for member in members for p in member.parameters() if p not in ignored))
    _check_parameters(members, params, shard_placement_fn)
    if dp_mesh_dims is not None:
        raise ConfigError("dp_mesh_dims is not supported: pass only the data parallel axes, mesh=mesh[names].")
    device = torch.device("cpu") if getattr(mesh, "device_type", None) == "cpu" else None
    reshard = _reshard(reshard_after_forward, mesh, device)
    options = {
        "strategy": _strategy(mesh, keep=reshard is False),
        "mp_policy": _precision(mp_policy),
        "offload_policy": _offload(offload_policy),
        "ignored_params": ignored,
        "device": device,
    }
    with _real_memory():
        unit = _shard(module, members, mesh, options, has_parameters=bool(params))
    for member in members:
        member.__dict__[_STATE] = ModuleState(unit, ignored)
        note_composed(member, "fully_shard")  # torch's replicate then leaves it out
    if unit is not None:
        _present_as_fsdp2(members, unit.params, mesh)
        if reshard is True:  # an explicit True also applies to a root, which otherwise keeps its parameters
            unit.runtime.configure(unit, reshard_after_forward=True)
    return module


def _state_or_none(module: nn.Module) -> ModuleState | None:
    """Return the result of ``fully_shard`` on ``module``; None if it was not called on it."""
    return module.__dict__.get(_STATE)


fully_shard.state = _state_or_none  # type: ignore[attr-defined]  # pyright: ignore[reportFunctionMemberAccess]


def _shard(
    module: Any, members: Sequence[nn.Module], mesh: Any, options: Mapping[str, Any], *, has_parameters: bool
) -> Unit | None:
    """Give ``members`` their new classes, and make one unit of their parameters; None if there are none."""
    with _fsdp_classes(members):
        if not has_parameters:
            return None
        first = engine.FirstValues(from_rank0_if_different=True, rest_later=True)
        engine.fully_shard(module, mesh, wrap=None, first_values=first, **options)
    return runtime_of(members[0]).root


def _real_memory() -> AbstractContextManager[Any]:
    """Allocate in memory also where the caller's context is ``with torch.device("meta")``, as a script's often is."""
    return torch.device("cpu") if torch.get_default_device().type == "meta" else nullcontext()


@contextmanager
def _fsdp_classes(members: Sequence[nn.Module]) -> Iterator[None]:
    """Give ``members`` their :class:`FSDPModule` classes; restore their own if the block raises."""
    plain = [type(member) for member in members]
    for member, cls in zip(members, plain, strict=True):
        member.__class__ = fsdp_class(cls)
    try:
        yield
    except BaseException:
        for member, cls in zip(members, plain, strict=True):
            member.__class__ = cls
        raise


def _present_as_fsdp2(members: Sequence[nn.Module], params: Sequence[ShardedParam], mesh: Any) -> None:
    """Add to a new unit what users of torch's FSDP2 expect: its state dicts, and the placement of each shard."""
    for member in members:
        engine.on_state_dict(member, model_state_dict, load_model_state_dict)
    set_state_dict_type(members[0], StateDictType.SHARDED_STATE_DICT)
    device_mesh = device_mesh_of(mesh, params[0].sharded.device) if params else None
    replicas = (Replicate(),) if _strategy(mesh, keep=False).needs_two_axes else ()
    divided = next((param for param in params if isinstance(param, ParallelParam)), None)
    joined = None if divided is None or device_mesh is None else joined_mesh(device_mesh, divided.parallel.mesh)
    for param in params:
        axes = device_mesh
        placements = (*replicas, RaggedShard(param.lane.mesh, param.meta.element_range, block=param.meta.block))
        if isinstance(param, ParallelParam) and joined is not None:
            axes, placements = joined, (*placements, *param.parallel.placements)
        vars(param.sharded).update(device_mesh=axes, placements=placements)
        describe_state_of(param.sharded)


def _precision(policy: Any) -> MixedPrecision:
    policy = MixedPrecisionPolicy() if policy is None else policy
    if not isinstance(policy, MixedPrecisionPolicy):
        raise ConfigError(
            f"mp_policy must be a MixedPrecisionPolicy({', '.join(MixedPrecisionPolicy.__dataclass_fields__)}); got "
            f"{type(policy).__name__}. FSDP1's MixedPrecision is for FullyShardedDataParallel, fullshard's own for "
            "fullshard.fully_shard."
        )
    return MixedPrecision(
        param=policy.param_dtype,
        reduce=policy.reduce_dtype or policy.param_dtype,
        output=policy.output_dtype,
        cast_forward_inputs=policy.cast_forward_inputs,
    )


def _offload(policy: Any) -> CPUOffload | None:
    if policy is not None and not isinstance(policy, OffloadPolicy):
        raise ConfigError(
            f"offload_policy must be OffloadPolicy() or CPUOffloadPolicy(pin_memory=…); got {type(policy).__name__}."
        )
    return CPUOffload(pin_memory=policy.pin_memory) if isinstance(policy, CPUOffloadPolicy) else None


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Make a method other than ``forward`` compute with full parameters; no effect on a module that is not sharded.

    Raises:
        ShardingError: There is no such method.
    """
    if not isinstance(module, FSDPModule):
        return
    unit = unit_of(module)
    if unit is not None:
        engine.wrap_forward_method(unit.hooks, module, method_name)


def share_comm_ctx(modules: list[Any]) -> None:
    """Only validate ``modules``: side streams belong to the device, so all models share them already.

    Raises:
        ConfigError: ``fully_shard`` was not called on one of ``modules``.
    """
    require_fsdp_modules(modules)


def _check_modules(members: Sequence[nn.Module]) -> None:
    if not members:
        raise ConfigError("fully_shard got an empty list of modules.")
    for member in members:
        if not isinstance(member, nn.Module):
            raise ConfigError(f"fully_shard takes a module or a list of modules; got {type(member).__name__}.")
        if isinstance(member, (nn.ModuleList, nn.ModuleDict)) and type(member).forward is nn.Module.forward:
            raise WrapValueError(
                "fully_shard does not support containers that do not implement forward, here a "
                f"{type(member).__name__}: before that it would gather. Call it on each of its modules, or once on "
                "list(modules) to make them one unit."
            )
        if getattr(member, "is_distributed_loading_by_transformers", False):
            raise ConfigError(
                f"from_pretrained(distributed_config=…) of {type(member).__name__} reads the file into DTensors of "
                "torch, not into shards. Leave out distributed_config and call fully_shard after from_pretrained; to "
                "read only each rank's rows use fullshard.fully_shard(model, weights=fullshard.Pretrained(path))."
            )
        if isinstance(member, FSDPModule):
            raise ShardingAssertionError(
                "Each distinct composable distributed API can only be applied to a module once; fully_shard was called "
                f"on this {type(member).__name__} already."
            )


def _check_mesh(mesh: Any) -> None:
    if isinstance(mesh, DeviceMesh) and mesh.ndim not in (1, 2):
        raise MeshValueError(
            f"fully_shard expects a 1D or 2D DeviceMesh but got {mesh}: the axis that shards, or the axes (replicate, "
            "shard). Of a mesh with more axes pass the data parallel ones, mesh[names]."
        )


def _left_out(members: Sequence[nn.Module]) -> Iterator[nn.Parameter]:
    """Yield the parameters that earlier calls left unsharded, and those of modules that torch's replicate takes."""
    for part in dict.fromkeys(part for member in members for part in member.modules()):
        if isinstance(part, FSDPModule):
            yield from state_of(part).ignored
        if "replicate" in composed(part):
            yield from part.parameters()


def _check_parameters(
    members: Sequence[nn.Module], params: Sequence[nn.Parameter], placement: Callable[[nn.Parameter], Any] | None
) -> None:
    inside = {part for member in members for part in member.modules()}
    for param in params:
        unit = vars(param)["shard_unit"]() if "shard_unit" in vars(param) else None
        if unit is not None and inside.isdisjoint(unit.modules):
            raise WrapError(
                f"A parameter of {type(members[0]).__name__} was sharded by an earlier call on another module, "
                f"{type(unit.modules[0]).__name__}: it is tied, and belongs to one unit. Call fully_shard once on the "
                "list of both modules, or only on a module around both."
            )
    if placement is not None:
        _check_placements([param for param in params if not hasattr(param, "shard_meta")], placement)


def _check_placements(params: Sequence[nn.Parameter], placement: Callable[[nn.Parameter], Any]) -> None:
    """Check the requested placements, which are only hints: all parameters are cut by rows, with the same results.

    Raises:
        ConfigError: It is not a ``Shard``, or not of a dimension that the parameter has.
    """
    chosen = [(param, placement(param)) for param in params]
    for param, one in chosen:
        if one is not None and not isinstance(one, Shard):
            raise ConfigError(
                f"shard_placement_fn returned {one!r} for a parameter of shape {tuple(param.shape)}. It must return "
                "None or Shard(dim); other placements and other meshes for single parameters are not supported."
            )
        if one is not None and not -param.ndim <= one.dim < param.ndim:
            raise ConfigAssertionError(
                f"Shard dim {one.dim} is invalid for {param.ndim}D tensor, here of shape {tuple(param.shape)}: "
                "shard_placement_fn must return None or Shard(dim) of a dimension that the parameter has."
            )
    others = [(param, one) for param, one in chosen if one is not None and one.dim % param.ndim != 0]
    if others:
        param, one = others[0]
        warnings.warn(
            f"shard_placement_fn returned {one!r} for a parameter of shape {tuple(param.shape)}, and a dimension other "
            f"than 0 for {len(others) - 1} more: fullshard cuts all parameters by rows. What is computed is the same; "
            "to_local() differs from torch's. Return None or Shard(0) to silence this warning.",
            stacklevel=4,
        )


def _reshard(after_forward: Any, mesh: Any, device: torch.device | None) -> bool | None:
    """Return ``reshard_after_forward`` as a bool or None, also where it is an int.

    Raises:
        ConfigError: It is an int that does not divide the number of ranks that shard.
    """
    if after_forward is None or isinstance(after_forward, bool):
        return after_forward
    size = as_mesh(mesh, _strategy(mesh, keep=False), device).shard_group.size
    if not isinstance(after_forward, int) or after_forward < 1 or size % after_forward:
        raise ConfigError(
            f"reshard_after_forward={after_forward!r}: it must be True, False or a number that divides the {size} "
            "ranks which share the parameters."
        )
    if 1 < after_forward < size:
        warnings.warn(
            f"reshard_after_forward={after_forward} is taken for True: after forward, parameters are freed down to the "
            f"shards of all {size} ranks, not kept in groups of {after_forward}. What is computed is the same; "
            "backward gathers over more ranks, and less memory is held. To gather inside smaller groups only, shard "
            "inside them: a mesh of 2 axes, (replicate, shard).",
            stacklevel=3,
        )
    return after_forward > 1


def _strategy(mesh: Any, *, keep: bool) -> ShardingStrategy:
    if isinstance(mesh, tuple) or getattr(mesh, "ndim", 1) == 2:
        return ShardingStrategy.HYBRID_SHARD_ZERO2 if keep else ShardingStrategy.HYBRID_SHARD
    return ShardingStrategy.SHARD_GRAD_OP if keep else ShardingStrategy.FULL_SHARD
