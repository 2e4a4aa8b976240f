"""Hooks of FSDP1's sharded modules: views of parameters are returned as copies, and modules added later stay local."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from fullshard.engine import Unit
from fullshard.engine.registry import runtime_of
from fullshard.engine.step.runtime import Runtime
from fullshard.shards.untraced import untraced


def install(root: nn.Module) -> None:
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
