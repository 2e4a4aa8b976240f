"""Hooks of FSDP1's sharded modules: views of parameters are returned as copies, and modules added later stay local."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from fullshard.engine import Unit, plain_name
from fullshard.engine.registry import is_sharded, runtime_of
from fullshard.shards.untraced import untraced


def install(root: nn.Module) -> None:
    """Register the hooks on a model that was just sharded; units included from earlier calls have theirs."""
    root.register_forward_pre_hook(_keep_added_local, prepend=True)
    for unit in runtime_of(root).units:
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


@untraced
def _keep_added_local(root: nn.Module, _args: tuple[Any, ...]) -> None:
    """Leave parameters of modules that were added after wrapping to this rank, with a warning."""
    if not is_sharded(root) or any(unit.summoned for unit in runtime_of(root).units):
        return  # included in a larger model, or it runs with full parameters
    runtime = runtime_of(root)
    held = {(id(module), key) for _, param in runtime.all_params() for module, key in param.slots}
    added = {
        f"{path}.{key}" if path else key: param
        for path, module in root.named_modules()
        for key, param in module._parameters.items()
        if param is not None and id(param) not in runtime.ignored and (id(module), key) not in held
    }
    if added:
        runtime.ignored |= frozenset(map(id, added.values()))
        warnings.warn(
            f"{plain_name(next(iter(added)))} and {len(added) - 1} other parameters were added after the model was "
            f"wrapped: they stay on each rank, are not sharded, and their gradients are not reduced over "
            f"{runtime.mesh.size} ranks. Add modules before wrapping.",
            stacklevel=2,
        )
