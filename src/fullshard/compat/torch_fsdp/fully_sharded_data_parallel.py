"""``FullyShardedDataParallel``: torch's FSDP1 wrapper on fullshard's engine.

The tree of wrappers is torch's: one around the given module, and one around each module that the wrap policy chooses.
The engine shards the wrapped modules themselves; a wrapper forwards calls and provides torch's methods. Differences
from torch:

- Parameters are always the original ones, this rank's rows of each, under the unwrapped model's names.
  ``use_orig_params`` has no effect: frozen and trainable parameters may share a unit.
- A parameter registered at several places (``shared`` and ``lm_head`` of a T5) belongs to the innermost unit that
  contains all of them, whatever is wrapped.
- Ranks that hold different values take rank 0's, with a warning. torch would train a mixture of their values.
- A model on the meta device is initialized unit by unit, with the same values on every rank.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from fullshard.compat.torch_fsdp import api, optim_state
from fullshard.compat.torch_fsdp.api import *  # noqa: F403 (torch's module of this name exports them too)
from fullshard.compat.torch_fsdp.api import (
    BackwardPrefetch,
    CPUOffload,
    MixedPrecision,
    ShardingStrategy,
    TrainingState,
)
from fullshard.compat.torch_fsdp.errors import (
    ArgumentError,
    OrderError,
    RootError,
    StateError,
    SummonError,
    UnsupportedError,
)
from fullshard.compat.torch_fsdp.model_state import load_model_state_dict, model_state_dict
from fullshard.compat.torch_fsdp.sharding import Sharding, ignored_parts, install_hooks, shard
from fullshard.compat.torch_fsdp.wrap import CHECKPOINTED, WRAPPED
from fullshard.core.engine import no_sync, on_state_dict, plain_class, plain_name, sharded_roots, summoned_parameters
from fullshard.core.engine.registry import runtime_of
from fullshard.core.engine.step.agreement import DIFFERENT_UNITS
from fullshard.core.optim import clip_grad_norm_
from fullshard.core.torch_private import in_backward
from fullshard.errors import ConfigError, MismatchError


@contextmanager
def summon_full_params(
    module: nn.Module,
    recurse: bool = True,  # noqa: FBT001, FBT002 (torch's signature)
    writeback: bool = True,  # noqa: FBT001, FBT002
    rank0_only: bool = False,  # noqa: FBT001, FBT002
    offload_to_cpu: bool = False,  # noqa: FBT001, FBT002
    with_grads: bool = False,  # noqa: FBT001, FBT002
) -> Iterator[None]:
    """Register full parameters in the shards' dtype for a context; every rank enters it.

    Inside, the module is a plain module with plain Parameters: it can be called, initialized or changed in place.
    Gradients computed inside are dropped at the end, or written back with ``with_grads``. All these parameters are in
    memory at once.

    Args:
        module: A wrapped or sharded model, a module inside one, or one that contains some.
        recurse: Whether to include units inside ``module``; False: only the parameters of its own unit.
        writeback: Whether each rank copies its rows of the Parameters back at the end; False: changes are dropped,
            also with one rank.
        rank0_only: Whether only rank 0 gets full parameters; other ranks keep their shards.
        offload_to_cpu: Whether the full parameters are in host memory.
        with_grads: Whether ``.grad`` is the full gradient.

    Raises:
        ConfigError: ``rank0_only`` with ``writeback``.
        ShardingError: During forward or backward, in a nested context on the same parameters, or if a Parameter was
            replaced inside.
    """
    if writeback and rank0_only:
        raise UnsupportedError(
            "summon_full_params(rank0_only=True, writeback=True) is not supported: other ranks have no full parameters "
            "to write back. Add writeback=False, or leave out rank0_only."
        )
    if in_backward() or any(runtime_of(root).open_calls for root in sharded_roots(module)):
        raise SummonError(
            "Cannot manually unshard parameters during forward/backward, which gather and free units. Enter "
            "summon_full_params before or after."
        )
    modules = list(module.modules()) if recurse else _with_wrapped(module)
    with ExitStack() as stack:
        for root in sharded_roots(module):
            stack.enter_context(
                summoned_parameters(
                    root,
                    modules,
                    writeback=writeback,
                    rank0_only=rank0_only,
                    offload_to_cpu=offload_to_cpu,
                    with_grads=with_grads,
                )
            )
        yield


def _with_wrapped(module: nn.Module) -> list[nn.Module]:
    """Return ``module`` and, if it is a wrapper, the modules it wraps."""
    chain = [module]
    while inner := [child for key, child in chain[-1].named_children() if not plain_name(key)]:
        chain += inner
    return chain


__all__ = ["FullyShardedDataParallel"]
__all__ += api.__all__


class FullyShardedDataParallel(nn.Module):
    """A module whose parameters are sharded over ranks.

    Every rank creates it, from the same module with equal arguments. An outermost wrapper is a root: a model of its
    own, even inside modules that are not wrapped. Calling it gathers unit by unit; after ``backward()`` every shard's
    ``.grad`` is the mean over ranks.

    Args:
        module: The module to wrap; its parameters are replaced by shards in place. Modules inside that are wrapped
            already keep their units, dtypes, offload and ranks, which must be among this wrapper's.
        process_group: Ranks to shard over: a process group, or for the hybrid strategies a pair ``(shard, replicate)``.
            None: all ranks; the hybrid strategies then shard inside a machine of ``LOCAL_WORLD_SIZE`` ranks.
        sharding_strategy: What is sharded; None: FULL_SHARD.
        cpu_offload: Whether shards, gradients and thus the optimizer's state live in host memory.
        auto_wrap_policy: Which modules inside are wrapped, see :mod:`~fullshard.compat.torch_fsdp.wrap`. None: none;
            what is not wrapped already is gathered as one unit.
        backward_prefetch: When backward gathers the next unit; None: when it is needed. Only the root's has an effect.
        mixed_precision: Dtypes; None: the parameters' own.
        ignored_modules: Modules left unsharded, with everything inside except wrapped modules.
        param_init_fn: Called with each module of a unit on the meta device, outer ones first; must allocate and
            initialize the tensors that the module itself owns. None: ``reset_parameters()``, or the ``_init_weights``
            of a Hugging Face model.
        device_id: The device units compute on: an accelerator's number or a device; None: this rank's accelerator, or
            the CPU if there is none. The module need not be moved there first.
        sync_module_states: Whether all ranks use rank 0's values; other ranks may be on the meta device. Without it,
            only units and buffers that differ are sent, and rank 0 warns once for each group of ranks.
        forward_prefetch: Whether forward gathers ahead, in the order of the previous forward. Only the root's has an
            effect.
        limit_all_gathers: No effect: never more than one unit is gathered ahead.
        use_orig_params: No effect: parameters are always the original ones.
        ignored_states: Modules or parameters left unsharded.
        device_mesh: Instead of ``process_group``: 1 axis, or 2 for the hybrid strategies, ``(replicate, shard)``.
        fsdp_auto_wrap_policy: The name of ``auto_wrap_policy`` before torch 1.12; accepted with a warning.

    Raises:
        ConfigError: Arguments contradict each other.
        WrapError: A policy does not fit the module.
        ProcessGroupError: There is no process group, or it does not fit the strategy.
        MismatchError: Ranks hold different modules.
    """

    def __init__(  # noqa: PLR0913 (torch's signature)
        self,
        module: nn.Module,
        process_group: Any = None,
        sharding_strategy: ShardingStrategy | None = None,
        cpu_offload: CPUOffload | None = None,
        auto_wrap_policy: Any = None,
        backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
        mixed_precision: MixedPrecision | None = None,
        ignored_modules: Iterable[nn.Module] | None = None,
        param_init_fn: Callable[[nn.Module], object] | None = None,
        device_id: int | torch.device | None = None,
        sync_module_states: bool = False,  # noqa: FBT001, FBT002
        forward_prefetch: bool = False,  # noqa: FBT001, FBT002
        limit_all_gathers: bool = True,  # noqa: FBT001, FBT002
        use_orig_params: bool = False,  # noqa: FBT001, FBT002
        ignored_states: Iterable[Any] | None = None,
        device_mesh: Any = None,
        *,
        fsdp_auto_wrap_policy: Any = None,
    ) -> None:
        super().__init__()
        kwargs = {
            "process_group": process_group,
            "sharding_strategy": sharding_strategy,
            "cpu_offload": cpu_offload,
            "backward_prefetch": backward_prefetch,
            "mixed_precision": mixed_precision,
            "param_init_fn": param_init_fn,
            "device_id": device_id,
            "sync_module_states": sync_module_states,
            "forward_prefetch": forward_prefetch,
            "limit_all_gathers": limit_all_gathers,
            "use_orig_params": use_orig_params,
            "device_mesh": device_mesh,
        }
        _warn_of_container(module)
        policy = _policy_of(auto_wrap_policy, fsdp_auto_wrap_policy)
        result = shard(module, policy, kwargs, ignored_parts(module, ignored_modules, ignored_states))
        _insert_wrappers(module, result)
        self._wrap(module, kwargs, result, is_root=True)
        for inner in self.fsdp_modules(module):
            inner._is_root = False
        if result.is_sharded:
            install_hooks(module)
            on_state_dict(module, model_state_dict, load_model_state_dict)

    def _wrap(self, module: nn.Module, kwargs: Mapping[str, Any], result: Sharding, *, is_root: bool) -> None:
        """Register ``module`` as the wrapped one, and set the attributes that torch's wrapper has."""
        self.sharding_strategy = kwargs["sharding_strategy"] or ShardingStrategy.FULL_SHARD
        self.mixed_precision = kwargs["mixed_precision"] or MixedPrecision()
        self.cpu_offload = kwargs["cpu_offload"] or CPUOffload()
        self.process_group = kwargs["process_group"]
        self.backward_prefetch = kwargs["backward_prefetch"]
        self.forward_prefetch = kwargs["forward_prefetch"]
        self.limit_all_gathers = kwargs["limit_all_gathers"]
        self.rank, self.world_size, self.compute_device = result.rank, result.world_size, result.device
        self._ignored_params = result.ignored[1]
        self._is_sharded = result.is_sharded
        self._is_root = is_root
        setattr(self, WRAPPED, module)

    # As the wrapped module

    @property
    def module(self) -> nn.Module:
        """The wrapped module, without a checkpoint wrapper that was put around it later."""
        inner = self._fsdp_wrapped_module
        return inner._modules.get(CHECKPOINTED) or inner

    def __getattr__(self, name: str) -> Any:
        """Look up attributes that this wrapper lacks in the wrapped module."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            inner = self.__dict__.get("_modules", {}).get(WRAPPED)
            if inner is None:
                raise
            return getattr(inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set a module or parameter on the wrapped module, whose forward uses it (in torch: without effect)."""
        inner = self.__dict__.get("_modules", {}).get(WRAPPED)
        registers = isinstance(value, (nn.Module, nn.Parameter))
        if (
            inner is not None
            and name not in self._modules
            and (registers or name in {**inner._modules, **inner._parameters})
        ):
            setattr(inner, name, value)
        else:
            super().__setattr__(name, value)

    def __getitem__(self, key: Any) -> Any:
        """Return the wrapped module's item, such as of an ``nn.Sequential``."""
        return self._fsdp_wrapped_module[key]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped module.

        Raises:
            MismatchError: Ranks call modules in different orders; in the first pass also a RuntimeError.
        """
        try:
            return self._fsdp_wrapped_module(*args, **kwargs)
        except MismatchError as error:
            # Other differences are of any call, and other ranks raise the same error outside of forward.
            if isinstance(error, OrderError) or not str(error).startswith(DIFFERENT_UNITS):
                raise
            raise OrderError(f"Forward order differs across ranks. {error}") from error

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield parameters under the unwrapped model's names (in torch: only inside ``summon_full_params``)."""
        return ((plain_name(name), param) for name, param in super().named_parameters(*args, **kwargs))

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield buffers under the unwrapped model's names (in torch: only inside ``summon_full_params``)."""
        return ((plain_name(name), buffer) for name, buffer in super().named_buffers(*args, **kwargs))

    def named_modules(
        self,
        memo: set[nn.Module] | None = None,
        prefix: str = "",
        remove_duplicate: bool = True,  # noqa: FBT001, FBT002 (torch's signature)
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yield modules under the unwrapped model's names, which peft looks up in the state dict."""
        memo = set() if memo is None else memo
        if self not in memo:
            if remove_duplicate:
                memo.add(self)
            yield prefix, self
            yield from self._fsdp_wrapped_module.named_modules(memo, prefix, remove_duplicate)

    def __repr__(self) -> str:
        """Return the tree of modules as torch prints it, without the table of units that a sharded module prints."""
        inner = self._fsdp_wrapped_module
        cls: Any = plain_class(type(inner)) if self._is_root and self._is_sharded else type(inner)
        lines = cls.__repr__(inner).splitlines()
        return "\n  ".join([f"{type(self).__name__}(", f"({WRAPPED}): {lines[0]}", *lines[1:]]) + "\n)"

    # Which wrapper is which

    def check_is_root(self) -> bool:
        """Return whether no other wrapper is around this one."""
        return self._is_root

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[FullyShardedDataParallel]:  # noqa: FBT001, FBT002
        """Return the wrappers in ``module``, including itself, in tree order; with ``root_only`` only the roots."""
        found = [one for one in module.modules() if isinstance(one, FullyShardedDataParallel)]
        return [one for one in found if one._is_root or not root_only]

    def _require_root(self, method: str) -> None:
        if not self._is_root:
            raise RootError(
                f"{method}() should only be called on the root FSDP instance, the outermost wrapper; this one wraps a "
                f"{type(self.module).__name__} inside of it."
            )

    @property
    def training_state(self) -> TrainingState:
        """The current activity of the wrapper's model; the names are those of torch's enum."""
        units = [unit for root in sharded_roots(self._fsdp_wrapped_module) for unit in runtime_of(root).units]
        if any(unit.summoned for unit in units):
            return TrainingState.SUMMON_FULL_PARAMS
        computes = in_backward() or any(unit.runtime.open_calls for unit in units)
        return TrainingState.FORWARD_BACKWARD if computes else TrainingState.IDLE

    # A step

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate unsharded gradients without communication; the first backward outside reduces their sum.

        Also works with ``cpu_offload``. Accumulated gradients are not in ``.grad``: ``zero_grad()`` does not drop them.

        Raises:
            ShardingError: This is not a root.
        """
        self._require_root("no_sync")
        with ExitStack() as stack:
            # Not self.module: a checkpoint wrapper may be around it by now, and it may have nothing to shard.
            for root in sharded_roots(self):
                stack.enter_context(no_sync(root))
            yield

    def clip_grad_norm_(self, max_norm: float, norm_type: float | str = 2.0) -> torch.Tensor:
        """Scale gradients to a norm of at most ``max_norm`` over all ranks; every rank calls it.

        Returns:
            The norm before clipping, 0-d, the same on every rank, in the widest dtype of this rank's gradients; without
            gradients zero in torch's default dtype, with a warning.

        Raises:
            ShardingError: This is not a root.
            ConfigError: ``max_norm`` or ``norm_type`` is not above zero.
        """
        self._require_root("clip_grad_norm_")
        total = clip_grad_norm_(self, float(max_norm), float(norm_type))
        dtypes = {param.grad.dtype for param in self.parameters() if param.grad is not None}
        if not dtypes:
            warnings.warn(
                f"clip_grad_norm_() was called on rank {self.rank} with no gradients -- returning the total norm in "
                f"the default dtype {torch.get_default_dtype()}.",
                stacklevel=2,
            )
        return total.to(functools.reduce(torch.promote_types, dtypes or {torch.get_default_dtype()}))

    def register_comm_hook(self, state: object, hook: Callable[..., object]) -> None:
        """Raise a ConfigError: custom communication hooks are not supported."""
        raise ConfigError(
            "register_comm_hook is not supported: the engine reduces gradients in place, one lane at a time, not as "
            "one flat gradient. To reduce in 16 bits pass MixedPrecision(reduce_dtype=torch.bfloat16); to run a "
            "backward without communication use no_sync()."
        )

    def apply(self, fn: Callable[[nn.Module], object]) -> FullyShardedDataParallel:
        """Call ``fn`` on every module inside and on this one, inner ones first, with full parameters.

        Every rank calls it and keeps its rows of what ``fn`` wrote, so ``fn`` must write the same on every rank. All
        parameters are full at once (in torch: one unit at a time).
        """
        if self.training_state is TrainingState.SUMMON_FULL_PARAMS:
            raise StateError(
                "apply() shows full parameters itself: the wrapper is expected to be in states IDLE, not "
                "SUMMON_FULL_PARAMS. Call it outside of summon_full_params."
            )
        with summon_full_params(self):
            _apply_inside_out(self, fn)
        return self

    # State

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """See :func:`~fullshard.compat.torch_fsdp.model_state.model_state_dict`; a plain module's if all is ignored."""
        if not self._is_sharded:
            return self._fsdp_wrapped_module.state_dict(*args, **kwargs)
        return model_state_dict(self, *args, **kwargs)

    def load_state_dict(
        self,
        state_dict: Mapping[str, Any],
        strict: bool = True,  # noqa: FBT001, FBT002 (torch's signature)
        assign: bool = False,  # noqa: FBT001, FBT002
    ) -> Any:
        """See :func:`~fullshard.compat.torch_fsdp.model_state.load_model_state_dict`."""
        if not self._is_sharded:
            return super().load_state_dict(state_dict, strict, assign)
        return load_model_state_dict(self, state_dict, strict, assign)

    def _fqn_modifiers(self) -> dict[str, str]:
        """Tell torch's getters and setters of state dicts that this wrapper is not part of names."""
        return {"": WRAPPED}

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,  # noqa: FBT001
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Load a root when ``load_state_dict`` was called on an enclosing module that is not wrapped.

        Where all is ignored, torch loads the wrapped module next.
        """
        if not self._is_sharded:
            _add_to_names(state_dict, prefix)
        if not (self._is_root and self._is_sharded):
            return
        own = {name.removeprefix(prefix): value for name, value in state_dict.items() if name.startswith(prefix)}
        missing, unexpected = load_model_state_dict(self, own, strict=False)
        missing_keys += [prefix + name for name in missing]
        unexpected_keys += [prefix + name for name in unexpected]
        # torch loads the wrapped module next, and must find the values that are loaded already.
        state_dict |= _by_attribute(self, prefix)

    summon_full_params = staticmethod(summon_full_params)
    set_state_dict_type = staticmethod(api.set_state_dict_type)
    get_state_dict_type = staticmethod(api.get_state_dict_type)
    state_dict_type = staticmethod(api.state_dict_type)
    optim_state_dict = staticmethod(optim_state.optim_state_dict)
    optim_state_dict_to_load = staticmethod(optim_state.optim_state_dict_to_load)
    full_optim_state_dict = staticmethod(optim_state.full_optim_state_dict)
    sharded_optim_state_dict = staticmethod(optim_state.sharded_optim_state_dict)
    shard_full_optim_state_dict = staticmethod(optim_state.shard_full_optim_state_dict)
    flatten_sharded_optim_state_dict = staticmethod(optim_state.flatten_sharded_optim_state_dict)
    scatter_full_optim_state_dict = staticmethod(optim_state.scatter_full_optim_state_dict)
    rekey_optim_state_dict = staticmethod(optim_state.rekey_optim_state_dict)


def _warn_of_container(module: nn.Module) -> None:
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        warnings.warn(
            "FSDP will not all-gather parameters for containers that do not implement forward, such as this "
            f"{type(module).__name__}: wrap the modules in it instead.",
            stacklevel=3,
        )


def _policy_of(policy: Any, former: Any) -> Any:
    """Return the wrap policy, given as ``auto_wrap_policy`` or under its former name.

    Raises:
        ConfigError: Both are given.
    """
    if former is None:
        return policy
    if policy is not None:
        raise ArgumentError("fsdp_auto_wrap_policy is the old name of auto_wrap_policy; pass only auto_wrap_policy.")
    warnings.warn(
        "fsdp_auto_wrap_policy was renamed to auto_wrap_policy in torch 1.12; write FSDP(model, auto_wrap_policy=…).",
        FutureWarning,
        stacklevel=3,
    )
    return former


def _insert_wrappers(module: nn.Module, result: Sharding) -> None:
    """Put wrappers around the modules inside ``module`` that the wrap policy chose, at every place they have."""
    wrappers: dict[nn.Module | None, FullyShardedDataParallel] = {}
    for child, kwargs in result.wrapped.items():
        mixed = kwargs["mixed_precision"]
        if mixed is not None and isinstance(child, tuple(mixed._module_classes_to_ignore)):
            kwargs = {**kwargs, "mixed_precision": None}
        wrapper = FullyShardedDataParallel.__new__(FullyShardedDataParallel)  # __init__ would shard it again
        nn.Module.__init__(wrapper)
        wrapper._wrap(child, kwargs, result, is_root=False)
        wrappers[child] = wrapper
    for parent in list(module.modules()):
        for name, child in parent._modules.items():
            if child in wrappers:
                parent._modules[name] = wrappers[child]


def _by_attribute(module: nn.Module, prefix: str) -> dict[str, Any]:
    """Return the tensors of ``module`` under the names that ``nn.Module.load_state_dict`` uses, wrappers included.

    Checkpoint wrappers add their own part of a name when they load.
    """
    own = [*module._parameters.items(), *module._buffers.items()]
    found: dict[str, Any] = {f"{prefix}{key}": tensor.detach() for key, tensor in own if tensor is not None}
    for key, child in module._modules.items():
        inner = prefix if key == CHECKPOINTED else f"{prefix}{key}."
        found |= {} if child is None else _by_attribute(child, inner)
    return found


def _add_to_names(state_dict: dict[str, Any], prefix: str) -> None:
    """Give values of the unwrapped module's names those of the wrapped one, as checkpoint wrappers do."""
    for key in [one for one in state_dict if one.startswith(prefix) and not one.startswith(f"{prefix}{WRAPPED}.")]:
        state_dict[f"{prefix}{WRAPPED}.{key.removeprefix(prefix)}"] = state_dict.pop(key)


def _apply_inside_out(module: nn.Module, fn: Callable[[nn.Module], object]) -> None:
    for child in module.children():
        _apply_inside_out(child, fn)
    fn(module)
