"""Sharding of a wrapped module: one call of the engine for all units with the same settings, and FSDP1's hooks.

The hooks return views of parameters as copies, and keep modules that are added later on this rank.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from fullshard.compat.torch_fsdp import arguments
from fullshard.compat.torch_fsdp.arguments import UnitSettings
from fullshard.compat.torch_fsdp.optimizer_hooks import describe_state_for_getters
from fullshard.compat.torch_fsdp.wrap import RepeatedBlocks, is_wrapper, modules_to_wrap
from fullshard.core import policy
from fullshard.core.comm import as_mesh
from fullshard.core.engine import FirstValues, Unit, fully_shard
from fullshard.core.engine.registry import runtime_of
from fullshard.core.engine.step.runtime import Runtime
from fullshard.core.shards.shard import untraced

Ignored = tuple[set[nn.Module], set[nn.Parameter]]


@dataclass(frozen=True)
class Sharding:
    """Result of :func:`shard`.

    Attributes:
        wrapped: The modules to put a wrapper around, each with the wrapper's arguments.
        ignored: Ignored modules and parameters.
        is_sharded: Whether there was anything to shard.
        rank: This rank's number.
        world_size: Number of ranks.
        device: The device that the units compute on.
    """

    wrapped: dict[nn.Module, dict[str, Any]]
    ignored: Ignored
    is_sharded: bool
    rank: int
    world_size: int
    device: torch.device


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
        UserError: Errors of the engine.
    """
    mixed = kwargs["mixed_precision"]
    fp32 = tuple(mixed._module_classes_to_ignore) if wrap_policy is not None and mixed is not None else ()
    own = arguments.unit_settings(kwargs, fp32)
    device = arguments.device_of_id(kwargs["device_id"])
    mesh = as_mesh(own.ranks, own.strategy, device)
    wrapped = modules_to_wrap(root, wrap_policy, kwargs, ignored, always=fp32)
    model = _Model(
        {module: arguments.own_settings(module, theirs, kwargs, own) for module, theirs in wrapped.items()},
        device,
        arguments.prefetch(kwargs["backward_prefetch"], forward=kwargs["forward_prefetch"]),
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
    if torch._C._are_functorch_transforms_active():  # their tensors have no storage
        return None
    memory = {lane.full.tensor.untyped_storage().data_ptr() for lane in unit.lanes} - {0}

    def is_view(tensor: Any) -> bool:
        plain = isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided and not tensor.is_meta
        return plain and tensor.untyped_storage().data_ptr() in memory

    if not any(map(is_view, tree_leaves(output))):
        return None
    return tree_map_only(torch.Tensor, lambda tensor: tensor.clone() if is_view(tensor) else tensor, output)


def _keep_added_local(runtime: Runtime, added: dict[str, nn.Parameter]) -> None:
    """Leave parameters of modules that were added after wrapping to this rank, with a warning."""
    runtime.ignored |= frozenset(map(id, added.values()))
    warnings.warn(
        f"{next(iter(added))} and {len(added) - 1} other parameters were added after the model was "
        f"wrapped: they stay on each rank, are not sharded, and their gradients are not reduced over "
        f"{runtime.mesh.size} ranks. Add modules before wrapping.",
        stacklevel=2,
    )
