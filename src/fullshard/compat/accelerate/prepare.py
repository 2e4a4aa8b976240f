"""Preparation of models: sharding as the plugin sets, float32 master copies, Hugging Face's ``save_pretrained``."""

from __future__ import annotations

import functools
import inspect
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from fullshard.compat.accelerate.plugin import FullyShardedDataParallelPlugin
from fullshard.compat.torch_fsdp.api import ShardingStrategy
from fullshard.compat.torch_fsdp.checkpointing import (
    ActivationWrapper,
    apply_activation_checkpointing,
    checkpoint_wrapper,
    offload_wrapper,
)
from fullshard.compat.torch_fsdp.fsdp2 import class_names_kept, fully_shard
from fullshard.compat.torch_fsdp.fully_sharded_data_parallel import FullyShardedDataParallel
from fullshard.compat.torch_fsdp.wrap import modules_to_wrap
from fullshard.core.comm import Comm
from fullshard.core.engine import full_state_dict, plain_class, plain_name, sharded_roots
from fullshard.core.engine.setup.wrap import LARGE_NUMEL, candidate_classes
from fullshard.core.layout.names import WRAPPERS
from fullshard.core.transformers_private import generate_together
from fullshard.errors import ConfigError, MismatchError


def inside_wrappers(module: nn.Module) -> nn.Module:
    """Return ``module`` without the wrappers of version 1 and of activation checkpointing around it."""
    while isinstance(module, (FullyShardedDataParallel, ActivationWrapper)):
        module = next(child for name, child in module._modules.items() if name in WRAPPERS and child is not None)
    return module


@contextmanager
def plain_tree(model: nn.Module) -> Iterator[nn.Module]:
    """Take the wrappers out of ``model`` for a context, which gets the model itself; any rank, no communication.

    Its modules and parameters then have the names and classes of the unsharded model, however code looks them up: a
    wrapper hides its own name from ``named_parameters()`` and ``named_modules()``, but not from ``named_children()``.
    Nothing may run forward meanwhile, because version 1's wrappers take part in it.
    """
    replaced = [
        (parent, key, child)
        for parent in model.modules()
        if inside_wrappers(parent) is parent
        for key, child in parent._modules.items()
        if child is not None and inside_wrappers(child) is not child
    ]
    try:
        for parent, key, child in replaced:
            parent._modules[key] = inside_wrappers(child)
        yield inside_wrappers(model)
    finally:
        for parent, key, child in replaced:
            parent._modules[key] = child


def plain_copy(model: nn.Module, values: Mapping[str, torch.Tensor]) -> nn.Module:
    """Return a copy of ``model`` as it was before sharding, with the parameters ``values``; any rank, no communication.

    For code that one rank runs and that looks at modules or calls them, such as peft's ``save_pretrained``. It has the
    model's own classes, neither wrappers nor hooks, and shares everything that is no module or shard.

    Args:
        model: A sharded model, with or without wrappers.
        values: Full tensors by the unsharded model's names. A parameter that has none is on the meta device.
    """
    roots = sharded_roots(model)
    full: dict[int, nn.Parameter] = {}
    for name, param in inside_wrappers(model).named_parameters(remove_duplicate=False):
        if hasattr(param, "shard_meta"):
            value = values.get(plain_name(name))
            if value is not None or id(param) not in full:
                full[id(param)] = _parameter(param, value)
    made: dict[nn.Module, nn.Module] = {}

    def copied(module: nn.Module) -> nn.Module:
        module = inside_wrappers(module)
        if module not in made:
            cls = plain_class(type(module)) if any(module is root for root in roots) else type(module)
            cls = getattr(cls, "_fullshard_plain_type", cls)
            made[module] = object.__new__(cls)
            made[module].__dict__.update(_plain_state(module, cls))
            own = module._parameters.items()
            made[module]._parameters = {key: full.get(id(param), param) for key, param in own}
            made[module]._modules = {k: None if m is None else copied(m) for k, m in module._modules.items()}
        return made[module]

    return copied(model)


def _parameter(shard: nn.Parameter, value: torch.Tensor | None) -> nn.Parameter:
    if value is None:
        value = torch.empty(shard.shard_meta.global_shape, dtype=shard.dtype, device="meta")  # type: ignore[attr-defined]
    return nn.Parameter(value, requires_grad=shard.requires_grad and value.is_floating_point())


def _plain_state(module: nn.Module, cls: type[nn.Module]) -> dict[str, Any]:
    """Return the attributes of ``module`` without hooks, and without methods that were replaced on the instance."""
    replaced = {key for key, value in vars(module).items() if callable(value) and callable(getattr(cls, key, None))}
    own = {key: value for key, value in vars(module).items() if key not in replaced}
    return own | {key: type(own[key])() for key in _HOOKS}


_HOOKS = [key for key in vars(nn.Module()) if key.startswith(("_forward", "_backward"))]


Axes = tuple[Comm, Comm]
"""The ranks that hold replicas of this rank's shards, and those that it shares shards with."""

_HYBRID = dict(zip(ShardingStrategy, ShardingStrategy, strict=True)) | {
    ShardingStrategy.FULL_SHARD: ShardingStrategy.HYBRID_SHARD,
    ShardingStrategy.SHARD_GRAD_OP: ShardingStrategy._HYBRID_SHARD_ZERO2,
}
"""The strategy that shards and replicates, of each strategy."""


def is_sharded(model: nn.Module) -> bool:
    """Return whether some parameter of ``model`` is a shard."""
    return any(hasattr(param, "shard_meta") for param in model.parameters())


def unwrapped(model: nn.Module) -> nn.Module:
    """Return ``model`` without the version 1 wrappers around it."""
    while isinstance(model, FullyShardedDataParallel):
        model = model.module
    return model


BY_PLUGIN = (
    'FullyShardedDataParallelPlugin(auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Class"])'
    ", or FSDP_AUTO_WRAP_POLICY=TRANSFORMER_BASED_WRAP and FSDP_TRANSFORMER_CLS_TO_WRAP=Class,Class"
)
"""How a script for Accelerate names the classes of units."""


def shard(
    model: nn.Module,
    plugin: FullyShardedDataParallelPlugin,
    ranks: Comm,
    mesh: Axes | None = None,
    by_class: str = BY_PLUGIN,
) -> nn.Module:
    """Shard ``model`` over ``ranks``, in place; every rank calls it.

    Args:
        model: A model on the CPU or the device; ranks other than 0 may have it on the meta device.
        plugin: The settings.
        ranks: All ranks.
        mesh: The same ranks on two axes, (replicate, shard); None: as the plugin says.
        by_class: How the script names the classes of units, for messages.

    Returns:
        The wrapper (version 1), or the model itself (version 2).
    """
    plugin.set_auto_wrap_policy(model)
    ignored = _ignored_modules(model, plugin.ignored_modules)
    if takes_rank_0s_values(plugin):
        _require_same_model(model, ranks)
        for module in ignored:
            _copy_from_rank_0(model, module, ranks)
    ignored = [module.to(ranks.device) for module in ignored]
    units = set(_units(model, plugin, ignored))
    numel = sum(param.numel() for param in model.parameters())
    if not units and numel >= LARGE_NUMEL and not plugin.asked_for_one_unit:
        warnings.warn(
            f"All {numel:,} parameters of {type(model).__name__} are one unit, which every rank gathers at once: no "
            "repeated blocks were found in it, nor others named. To gather parts of it one at a time, name their "
            f"classes: {by_class}. "
            f"Classes in this model: {', '.join(candidate_classes(model)) or 'none with submodules'}.",
            stacklevel=2,
        )
    wrap = _version_1 if plugin.fsdp_version == 1 else _version_2
    sharded = wrap(model, plugin, ignored, ranks, mesh)
    if plugin.activation_checkpointing:
        _checkpoint(sharded, units, offload=bool(plugin.activation_checkpointing_offload))
    return sharded


def blocks_of(model: nn.Module, plugin: FullyShardedDataParallelPlugin) -> list[nn.Module]:
    """Return the modules inside ``model`` that become units."""
    plugin.set_auto_wrap_policy(model)
    return _units(model, plugin, [])


def _units(model: nn.Module, plugin: FullyShardedDataParallelPlugin, ignored: list[nn.Module]) -> list[nn.Module]:
    inside = {module for one in ignored for module in one.modules()}
    params = {param for one in ignored for param in one.parameters()}
    return list(modules_to_wrap(model, plugin.auto_wrap_policy, {}, (inside, params)))


def _version_1(
    model: nn.Module, plugin: FullyShardedDataParallelPlugin, ignored: list[nn.Module], ranks: Comm, mesh: Axes | None
) -> nn.Module:
    return FullyShardedDataParallel(
        model,
        process_group=None if mesh is None else mesh[::-1],  # torch's order
        sharding_strategy=plugin.sharding_strategy if mesh is None else _HYBRID[plugin.sharding_strategy],
        cpu_offload=plugin.cpu_offload,
        auto_wrap_policy=plugin.auto_wrap_policy,
        backward_prefetch=plugin.backward_prefetch,
        mixed_precision=plugin.mixed_precision_policy,
        ignored_modules=ignored or None,
        param_init_fn=plugin.param_init_fn,
        device_id=ranks.device,
        sync_module_states=takes_rank_0s_values(plugin),  # a unit at a time
        forward_prefetch=bool(plugin.forward_prefetch),
        use_orig_params=bool(plugin.use_orig_params),
    )


def _version_2(
    model: nn.Module, plugin: FullyShardedDataParallelPlugin, ignored: list[nn.Module], ranks: Comm, mesh: Axes | None
) -> nn.Module:
    options: dict[str, Any] = {
        "mesh": ranks if mesh is None else mesh,
        "reshard_after_forward": plugin.reshard_after_forward,
        "offload_policy": plugin.cpu_offload,
        "ignored_params": {param for module in ignored for param in module.parameters()},
    }
    if plugin.mixed_precision_policy is not None:
        options["mp_policy"] = plugin.mixed_precision_policy
    with class_names_kept():  # Accelerate promises MyModel of unwrap_model(prepare(MyModel()))
        for module in _units(model, plugin, ignored):
            if not _is_tied(model, module):
                _fill_and_shard(model, module, plugin, ranks, options)
        return _fill_and_shard(model, model, plugin, ranks, options)


def _fill_and_shard(
    model: nn.Module, module: nn.Module, plugin: FullyShardedDataParallelPlugin, ranks: Comm, options: dict[str, Any]
) -> nn.Module:
    """Shard ``module``, a part of ``model``, as one unit, after copying rank 0's values if the plugin asks for it.

    One unit at a time, so that other ranks never hold more than one unit's full values.
    """
    if takes_rank_0s_values(plugin):
        _copy_from_rank_0(model, module, ranks)
    return fully_shard(module, **options)


def takes_rank_0s_values(plugin: FullyShardedDataParallelPlugin) -> bool:
    """Return whether all ranks use rank 0's values."""
    return bool(plugin.sync_module_states or plugin.cpu_ram_efficient_loading)


def _is_tied(model: nn.Module, module: nn.Module) -> bool:
    """Return whether a parameter of ``module`` is also registered outside of it; then an outer unit must contain it."""
    params, inside = set(module.parameters()), set(module.modules())
    return any(
        param in params for other in model.modules() if other not in inside for param in other._parameters.values()
    )


def _require_same_model(model: nn.Module, ranks: Comm) -> None:
    """Raise if ranks hold different models; values may differ or be on the meta device. Every rank calls it.

    Raises:
        MismatchError: Names, shapes or dtypes differ; raised on every rank.
    """
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    everyone = ranks.all_gather_object({name: (tuple(t.shape), str(t.dtype)) for name, t in tensors.items()})
    differing = sorted({name for other in everyone for name, _ in other.items() ^ everyone[0].items()})
    if differing:
        raise MismatchError(
            f"Ranks cannot use rank 0's values because they hold different models: {len(differing)} tensors differ in "
            f"name, shape or dtype, or are tied on some ranks only ({', '.join(differing[:3])}). Build the same model "
            "on every rank; model.to('meta') unties weights, building under torch.device('meta') does not."
        )


def _copy_from_rank_0(model: nn.Module, part: nn.Module, ranks: Comm) -> None:
    """Copy rank 0's values to the unsharded tensors in ``part`` of ``model``; every rank calls it.

    Tensors on the meta device are allocated first.
    """
    for module in part.modules():
        own: dict[str, Any] = {**module._parameters, **module._buffers}
        for name, tensor in own.items():
            if tensor is not None and tensor.is_meta:
                _set(model, tensor, torch.empty_like(tensor, device=ranks.device), module, name)
    ranks.announce("values of rank 0")
    for tensor in [*part.parameters(), *part.buffers()]:
        if hasattr(tensor, "shard_meta"):
            continue
        value = tensor.detach().to(ranks.device).contiguous()
        ranks.broadcast(value).wait()
        with torch.no_grad():
            tensor.copy_(value)


def _set(model: nn.Module, old: torch.Tensor, value: torch.Tensor, module: nn.Module, name: str) -> None:
    """Replace ``old``, a tensor on the meta device, with ``value``, at all places of a tied parameter."""
    if isinstance(old, nn.Parameter):
        new = nn.Parameter(value, requires_grad=old.requires_grad)
        for other in model.modules():
            for key, param in other._parameters.items():
                if param is old:
                    other._parameters[key] = new
    else:
        module._buffers[name] = value


def _ignored_modules(model: nn.Module, given: Iterable[nn.Module] | str | None) -> list[nn.Module]:
    """Return ``given`` as a list; modules whose full name matches, if it is a regular expression."""
    if not isinstance(given, str):
        return list(given or ())
    try:
        pattern = re.compile(given)
    except re.error as error:
        raise ConfigError(f"ignored_modules={given!r} is not a regular expression: {error}.") from error
    found = [module for name, module in model.named_modules() if pattern.fullmatch(plain_name(name))]
    if not found:
        raise ConfigError(f"ignored_modules={given!r} matches no module of {type(model).__name__}.")
    return found


def _checkpoint(model: nn.Module, units: set[nn.Module], *, offload: bool) -> None:
    def wrapped(module: nn.Module) -> nn.Module:
        module = checkpoint_wrapper(module)
        return offload_wrapper(module) if offload else module

    apply_activation_checkpointing(model, checkpoint_wrapper_fn=wrapped, check_fn=units.__contains__)


def upcast_trainable(model: nn.Module, *, warn: bool, values: bool) -> None:
    """Convert trainable 16-bit parameters to float32, as Accelerate does with mixed precision; before sharding.

    Args:
        model: The model.
        warn: Whether this rank issues a warning about it.
        values: Whether to convert the values; False: they will be overwritten, so memory is only allocated.
    """
    narrow = [
        (name, param)
        for name, param in model.named_parameters()
        if param.requires_grad and param.dtype in (torch.float16, torch.bfloat16)
    ]
    for _, param in narrow:
        param.data = param.data.float() if values else torch.empty_like(param.data, dtype=torch.float32)
    if narrow and warn:
        warnings.warn(
            f"{len(narrow)} trainable parameters ({narrow[0][0]}, …) were converted from 16 bits to float32 because "
            "mixed precision is on. Checkpoints will be in float32.",
            stacklevel=4,
        )


def make_collective(model: Any, *, writes: bool) -> None:
    """Make ``save_pretrained`` and ``generate`` of a sharded Hugging Face model work when every rank calls them.

    ``save_pretrained`` gathers the weights to rank 0, which writes them; it may also be called on rank 0 alone with the
    full ``state_dict``. ``generate`` continues until all ranks have finished, because each step gathers units.
    """
    generate_together(model)
    if hasattr(model, "save_pretrained"):
        model.save_pretrained = _saving_once(model, model.save_pretrained, writes=writes)


def _saving_once(model: nn.Module, original: Callable[..., Any], *, writes: bool) -> Callable[..., Any]:
    parameters = inspect.signature(original).parameters
    takes_all = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
    method = getattr(original, "__func__", None)

    @functools.wraps(original)
    def save_pretrained(*args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(parameters, args, strict=False)), **kwargs}
        if given.get("state_dict") is None:
            given["state_dict"] = full_state_dict(model)
        if not given.setdefault("is_main_process", writes):
            return None
        if method is None:  # a function on the instance, to which no other model can be passed
            return original(**given)
        plain = plain_copy(model, given["state_dict"])
        given = {key: value for key, value in given.items() if takes_all or key in parameters}
        # Not of the model itself: peft asks modules for their state and runs prompt encoders, on this rank alone.
        return method(plain, **given)

    return save_pretrained
