"""Sharding of a wrapped module: its arguments as the engine's policies, one call of the engine, FSDP1's hooks.

The hooks return views of parameters as copies, and keep modules that are added later on this rank.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, TypeVar

import torch
from torch import nn

from fullshard.compat.torch_fsdp.api import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from fullshard.compat.torch_fsdp.errors import ArgumentError, UnsupportedError, WrappedError
from fullshard.compat.torch_fsdp.optimizer_hooks import describe_state_for_getters
from fullshard.compat.torch_fsdp.wrap import RepeatedBlocks, is_wrapper, modules_to_wrap
from fullshard.core import policy
from fullshard.core.comm import as_mesh, machines_of_world, named_ranks, same_ranks
from fullshard.core.engine import FirstValues, Unit, fully_shard
from fullshard.core.engine.registry import is_sharded, runtime_of
from fullshard.core.engine.setup.wrap import refuse_distributed
from fullshard.core.engine.step.runtime import Runtime
from fullshard.core.shards.shard import untraced
from fullshard.core.torch_private import in_functorch, tree_leaves, tree_map
from fullshard.errors import ShardingError

Member = TypeVar("Member", bound=Enum)

UNIT_ARGUMENTS = frozenset({"sharding_strategy", "cpu_offload", "mixed_precision", "process_group", "device_mesh"})
"""Arguments that may differ between units of one model; all others are the root's."""

WITHOUT_EFFECT = frozenset({"use_orig_params", "limit_all_gathers", "backward_prefetch", "forward_prefetch"})
"""Arguments of a unit that are accepted and ignored; prefetch is the root's."""


def member_of(kind: type[Member], value: object, argument: str) -> Member:
    """Return ``value`` if it is a member of ``kind``.

    Raises:
        ConfigError: It is not.
    """
    if isinstance(value, kind):
        return value
    raise ArgumentError(f"{argument} must be a {kind.__name__}: {', '.join(kind.__members__)}; got {value!r}.")


@dataclass(frozen=True)
class UnitSettings:
    """Settings of one unit."""

    strategy: policy.ShardingStrategy
    ranks: Any  # the ranks to shard over, as the engine's ``mesh`` argument takes them
    precision: policy.MixedPrecision
    offload: policy.CPUOffload | None  # None: shards stay on the device
    # classes whose modules compute in float32 even if the unit's dtype is narrower
    float32_classes: tuple[type[nn.Module], ...] = ()

    def precision_in(self, root: nn.Module) -> policy.MixedPrecision:
        """Return the precision of units in ``root``, with the names of the classes there that compute in float32."""
        if self.precision.param is None:
            return self.precision
        names = {type(module).__name__ for module in root.modules() if isinstance(module, self.float32_classes)}
        return replace(self.precision, keep_fp32=tuple(names))


def unit_settings(
    kwargs: Mapping[str, Any], float32_classes: tuple[type[nn.Module], ...], known: Any = None
) -> UnitSettings:
    """Convert the wrapper's arguments to settings of a unit; ``known``: its ranks, as the engine takes them, if known.

    Raises:
        ConfigError: An argument has the wrong type, or ranks do not fit the strategy.
        ProcessGroupError: There is no process group, or machines have different numbers of ranks.
    """
    strategy = _strategy(kwargs)
    if known is None:
        device = device_of_id(kwargs["device_id"])
        known = ranks(kwargs["process_group"], kwargs["device_mesh"], strategy, device)
    return UnitSettings(
        strategy, known, _precision(kwargs["mixed_precision"]), _offload(kwargs["cpu_offload"]), float32_classes
    )


def _strategy(kwargs: Mapping[str, Any]) -> policy.ShardingStrategy:
    strategy = kwargs["sharding_strategy"] or ShardingStrategy.FULL_SHARD
    return policy.ShardingStrategy[member_of(ShardingStrategy, strategy, "sharding_strategy").name.removeprefix("_")]


def own_settings(
    module: nn.Module, kwargs: Mapping[str, Any], root_kwargs: Mapping[str, Any], root: UnitSettings
) -> UnitSettings:
    """Convert the arguments with which a policy wraps ``module`` to settings of its unit; ``root``: the model's.

    Raises:
        ConfigError: An argument that all units share differs from the root's, or is unknown.
    """
    lacking = object()
    differing = {key for key, value in kwargs.items() if value is not root_kwargs.get(key, lacking)}
    refused = sorted(differing - UNIT_ARGUMENTS - WITHOUT_EFFECT)
    if refused:
        raise ArgumentError(
            f"The wrap policy sets {', '.join(refused)} of {type(module).__name__}. A unit may differ from the model "
            f"only in {', '.join(sorted(UNIT_ARGUMENTS))}; pass the rest to the outermost wrapper."
        )
    as_root = differing.isdisjoint({"process_group", "device_mesh"})
    as_root = as_root and _strategy(kwargs).needs_two_axes is root.strategy.needs_two_axes
    return unit_settings(kwargs, root.float32_classes, root.ranks if as_root else None)


def _precision(mixed: MixedPrecision | None) -> policy.MixedPrecision:
    if mixed is None:
        return policy.MixedPrecision()
    if not isinstance(mixed, MixedPrecision):
        raise ArgumentError(
            f"mixed_precision must be a MixedPrecision or None; got {mixed!r}. (MixedPrecisionPolicy is for "
            "fully_shard.)"
        )
    if os.environ.get("FSDP_USE_FULL_PREC_IN_EVAL") == "1":
        raise UnsupportedError(
            "FSDP_USE_FULL_PREC_IN_EVAL=1 is not supported: a model in eval() computes in param_dtype, as in training. "
            "Unset it. Inside FSDP.summon_full_params(model, writeback=False) it computes in the parameters' own dtype."
        )
    return policy.MixedPrecision(
        param=mixed.param_dtype,
        reduce=mixed.reduce_dtype or mixed.param_dtype,
        buffer=mixed.buffer_dtype,
        cast_forward_inputs=mixed.cast_forward_inputs,
        cast_root_forward_inputs=mixed.cast_root_forward_inputs,
        keep_low_precision_grads=mixed.keep_low_precision_grads,
    )


def _offload(offload: CPUOffload | None) -> policy.CPUOffload | None:
    if offload is None:
        return None
    if not isinstance(offload, CPUOffload):
        raise ArgumentError(f"cpu_offload must be CPUOffload(offload_params=…) or None; got {offload!r}.")
    return policy.CPUOffload() if offload.offload_params else None


def prefetch(backward: BackwardPrefetch | None, *, forward: bool) -> policy.Prefetch:
    """Convert ``backward_prefetch`` and ``forward_prefetch``."""
    if backward is None:
        return policy.Prefetch(policy.BackwardPrefetch.NONE, forward=forward)
    name = member_of(BackwardPrefetch, backward, "backward_prefetch").name
    return policy.Prefetch(policy.BackwardPrefetch[name], forward=forward)


def device_of_id(device_id: int | torch.device | None) -> torch.device | None:
    """Return the device that units compute on; None: this rank's accelerator, or the CPU if there is none.

    A number is an accelerator's; on a machine without accelerators it means the CPU.
    """
    if device_id is None or isinstance(device_id, torch.device):
        return device_id
    kind = accelerator_type()
    return torch.device("cpu") if kind is None else torch.device(kind, device_id)


def accelerator_type() -> str | None:
    """Return the type of this machine's accelerator, such as ``"cuda"``, or None."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return None if accelerator is None else accelerator.type


def ranks(process_group: Any, device_mesh: Any, strategy: policy.ShardingStrategy, device: torch.device | None) -> Any:
    """Return the ranks to shard over, as the engine's ``mesh`` argument takes them.

    A pair of groups is ``(shard, replicate)`` in torch and ``(replicate, shard)`` in the engine.

    Raises:
        ConfigError: Both are given, or one does not fit the strategy.
        ProcessGroupError: There is no process group, or machines have different numbers of ranks.
    """
    if process_group is not None and device_mesh is not None:
        raise ArgumentError("process_group and device_mesh both set the ranks to shard over; pass only one.")
    hybrid = strategy.needs_two_axes
    if device_mesh is not None:
        if device_mesh.ndim != (2 if hybrid else 1):
            raise ArgumentError(
                f"{strategy.name} needs a device_mesh with {2 if hybrid else 1} axes; this one has {device_mesh.ndim}. "
                "HYBRID_SHARD shards over the second axis and replicates over the first. Tensor parallelism is not "
                "supported."
            )
        return device_mesh
    if isinstance(process_group, tuple) and hybrid and len(process_group) == 2:
        return process_group[1], process_group[0]
    if isinstance(process_group, tuple) or (hybrid and process_group is not None):
        kind = "a pair of groups (shard, replicate)" if hybrid else "one group"
        raise ArgumentError(
            f"Expected process_group to be passed in as {kind} or None for {strategy.name}; got {process_group!r}."
        )
    return machines_of_world(device) if hybrid else named_ranks(process_group, device)


def ignored_parts(
    root: nn.Module, modules: Iterable[nn.Module] | None, states: Iterable[Any] | None
) -> tuple[set[nn.Module], set[nn.Parameter]]:
    """Return the modules and parameters that are not sharded, including those that wrappers inside ignore.

    Args:
        root: The module to wrap.
        modules: ``ignored_modules``.
        states: ``ignored_states``: modules, or parameters.

    Raises:
        ConfigError: Both are given, or one contains something else.
        WrapError: A module to ignore is wrapped itself.
    """
    if modules is not None and states is not None:
        raise ArgumentError(
            "Cannot pass both ignored_modules and ignored_states at the same time: ignored_states also takes modules."
        )
    given = list(states if states is not None else modules or ())
    params = {one for one in given if isinstance(one, nn.Parameter)}
    tops = [one for one in given if isinstance(one, nn.Module)]
    if len(params) + len(tops) < len(given) or (params and (tops or modules is not None)):
        expected = "all nn.Parameter or all nn.Module" if modules is None else "nn.Module"
        raise ArgumentError(
            f"ignored_{'states' if modules is None else 'modules'} expects {expected} list elements but got types "
            f"{sorted({type(one) for one in given}, key=repr)}."
        )
    if any(map(is_wrapper, tops)):
        raise WrappedError("A module to ignore is already wrapped. Remove its wrapper, or do not ignore it.")
    if root in tops:
        warnings.warn(
            "Trying to ignore the top-level module passed into the FSDP constructor itself will result in all "
            "parameters being ignored: nothing is sharded.",
            stacklevel=3,
        )
    kept = {part for top in tops for module in top.modules() if is_wrapper(module) for part in module.modules()}
    inside = {module for top in tops for module in top.modules()} - kept
    for module in root.modules():
        if is_wrapper(module):
            params |= module._ignored_params  # pyright: ignore[reportOperatorIssue]
    params |= {param for module in inside for param in module._parameters.values() if param is not None}
    return inside, params


Ignored = tuple[set[nn.Module], set[nn.Parameter]]


@dataclass(frozen=True)
class Sharding:
    """Result of :func:`shard`."""

    wrapped: dict[nn.Module, dict[str, Any]]  # the modules to put a wrapper around, with the wrapper's arguments
    ignored: Ignored
    is_sharded: bool  # whether there was anything to shard
    rank: int
    world_size: int
    device: torch.device  # that the units compute on


@dataclass(frozen=True)
class _Model:
    """Settings shared by all units of one model, and the settings of single units."""

    settings: dict[nn.Module, UnitSettings]
    device: torch.device | None
    prefetch: policy.Prefetch
    first: FirstValues
    ignored: frozenset[nn.Parameter]

    def shard(self, top: nn.Module, settings: UnitSettings) -> bool:
        """Shard the modules in ``top`` that have other settings, then ``top``; return whether anything was sharded."""
        if is_sharded(top):  # wrapped again, such as to infer after training
            self._require_same(top, settings)
            return True
        units: set[nn.Module] = set()
        self._visit(top, settings, units, set())
        if all(param in self.ignored for param in top.parameters()):
            return False
        fully_shard(
            top,
            settings.ranks,
            wrap=units.__contains__ if units else None,
            strategy=settings.strategy,
            mp_policy=settings.precision_in(top),
            prefetch=self.prefetch,
            offload_policy=settings.offload,
            ignored_params=self.ignored,
            device=self.device,
            first_values=self.first,
        )
        return True

    def _require_same(self, top: nn.Module, settings: UnitSettings) -> None:
        """Refuse to wrap a sharded module again with other settings than it has.

        Raises:
            ShardingError: They differ.
        """
        runtime = runtime_of(top)
        held, mesh = runtime.root.policy, as_mesh(settings.ranks, settings.strategy, self.device)
        device = self.device or mesh.device
        equal = {
            "sharding_strategy": held.strategy is settings.strategy,
            "mixed_precision": held.precision == settings.precision_in(top),
            "cpu_offload": held.offload == settings.offload,
            "process_group or device_mesh": same_ranks(runtime.mesh, mesh),
            "backward_prefetch or forward_prefetch": runtime.prefetch == self.prefetch,
            "device_id": runtime.device.device.type == device.type,
            "ignored_modules or ignored_states": runtime.ignored == frozenset(map(id, self.ignored)),
            "auto_wrap_policy": not self.settings,
        }
        if differing := [name for name, is_equal in equal.items() if not is_equal]:
            raise ShardingError(
                f"{type(top).__name__} is sharded already, with other {', '.join(differing)}. "
                "Wrap it once, or again with equal arguments and without auto_wrap_policy."
            )

    def _visit(self, module: nn.Module, settings: UnitSettings, units: set[nn.Module], seen: set[nn.Module]) -> None:
        """Add the chosen modules inside ``module`` to ``units``, but shard those with other settings right away."""
        for child in module.children():
            if child in seen or is_wrapper(child):
                continue
            seen.add(child)
            own = self.settings.get(child, settings)
            if own != settings:
                self.shard(child, own)
                continue
            if child in self.settings:
                units.add(child)
            self._visit(child, settings, units, seen)


def shard(root: nn.Module, wrap_policy: Any, kwargs: dict[str, Any], ignored: Ignored) -> Sharding:
    """Shard ``root`` in place, with units chosen by the policy, without inserting wrappers; every rank calls it.

    Args:
        root: The module to wrap; modules inside may be wrapped already.
        wrap_policy: ``auto_wrap_policy``.
        kwargs: The other arguments of the wrapper, by name.
        ignored: Modules and parameters to ignore.

    Raises:
        ConfigError: Arguments contradict each other.
        ShardingError: ``root`` is sharded already with other settings.
        UserError: Errors of the engine.
    """
    if kwargs["param_init_fn"] is not None and not callable(kwargs["param_init_fn"]):
        raise ArgumentError(
            f"Expected param_init_fn to be callable, a function of a module; got {kwargs['param_init_fn']!r}."
        )
    refuse_distributed(named for named in root.named_parameters() if named[1] not in ignored[1])
    mixed = kwargs["mixed_precision"]
    fp32 = tuple(mixed._module_classes_to_ignore) if wrap_policy is not None and mixed is not None else ()
    _warn_of_float32(root, mixed, fp32)
    own = unit_settings(kwargs, fp32)
    device = device_of_id(kwargs["device_id"])
    mesh = as_mesh(own.ranks, own.strategy, device)
    wrapped = modules_to_wrap(root, wrap_policy, kwargs, ignored, always=fp32)
    model = _Model(
        {module: own_settings(module, theirs, kwargs, own) for module, theirs in wrapped.items()},
        device,
        prefetch(kwargs["backward_prefetch"], forward=kwargs["forward_prefetch"]),
        FirstValues(kwargs["param_init_fn"], from_rank0=kwargs["sync_module_states"], from_rank0_if_different=True),
        frozenset(ignored[1]),
    )
    with _without_buffers(ignored[0]):
        is_sharded = model.shard(root, own)
    for param in root.parameters():
        if hasattr(param, "shard_meta"):
            describe_state_for_getters(param)
    if isinstance(wrap_policy, RepeatedBlocks):
        wrapped = {}
    return Sharding(wrapped, ignored, is_sharded, mesh.rank, mesh.size, device or mesh.device)


def _warn_of_float32(root: nn.Module, mixed: MixedPrecision | None, classes: tuple[type[nn.Module], ...]) -> None:
    found = sorted({type(module).__name__ for module in root.modules() if isinstance(module, classes)})
    if found and mixed is not None and (mixed.param_dtype or mixed.reduce_dtype or mixed.buffer_dtype):
        warnings.warn(
            f"mixed_precision leaves out modules of the classes {', '.join(found)}. These modules will be wrapped as "
            "separate FSDP instances that compute in float32.",
            stacklevel=4,
        )


@contextmanager
def _without_buffers(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Hide the buffers of ignored modules: the engine ignores parameters only, and would move, cast and share these."""
    buffers = [(module, key, buffer) for module in modules for key, buffer in module._buffers.items()]
    for module, key, _ in buffers:
        module._buffers[key] = None
    try:
        yield
    finally:
        for module, key, buffer in buffers:
            module._buffers[key] = buffer


def install_hooks(root: nn.Module) -> None:
    """Register the hooks on a model that was just sharded; units included from earlier calls have theirs."""
    runtime = runtime_of(root)
    runtime.on_added = functools.partial(_keep_added_local, runtime)
    for unit in runtime.units:
        for module in unit.modules:
            if "_fullshard_copies_views" not in module.__dict__:
                module.__dict__["_fullshard_copies_views"] = True
                # Before the engine's own hook, which refuses views.
                module.register_forward_hook(functools.partial(_copy_views, unit), prepend=True)


@untraced
def _copy_views(unit: Unit, _module: nn.Module, _args: tuple[Any, ...], output: Any) -> Any:
    """Replace what lies in the memory of gathered parameters, which is freed after forward, by copies with gradient."""
    if in_functorch():  # their tensors have no storage
        return None
    memory = {lane.full.tensor.untyped_storage().data_ptr() for lane in unit.lanes} - {0}

    def is_view(tensor: Any) -> bool:
        plain = isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided and not tensor.is_meta
        return plain and tensor.untyped_storage().data_ptr() in memory

    if not any(map(is_view, tree_leaves(output))):
        return None
    return tree_map(lambda value: value.clone() if is_view(value) else value, output)


def _keep_added_local(runtime: Runtime, added: dict[str, nn.Parameter]) -> None:
    """Leave parameters of modules that were added after wrapping to this rank, with a warning."""
    runtime.ignored |= frozenset(map(id, added.values()))
    warnings.warn(
        f"{next(iter(added))} and {len(added) - 1} other parameters were added after the model was "
        f"wrapped: they stay on each rank, are not sharded, and their gradients are not reduced over "
        f"{runtime.mesh.size} ranks. Add modules before wrapping.",
        stacklevel=2,
    )
