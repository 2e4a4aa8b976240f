"""``FullyShardedDataParallelPlugin``: the fields, defaults and environment variables of Accelerate's."""

from __future__ import annotations

import dataclasses
import functools
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

import accelerate
import torch
from torch import nn

from fullshard.compat.torch_fsdp.api import (
    BackwardPrefetch,
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    MixedPrecision,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
)
from fullshard.compat.torch_fsdp.fsdp2 import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from fullshard.compat.torch_fsdp.wrap import RepeatedBlocks, size_based_auto_wrap_policy, transformer_auto_wrap_policy
from fullshard.core.transformers_private import block_classes
from fullshard.errors import ConfigError, WrapError

E = TypeVar("E", bound=Enum)
_library: Any = accelerate  # untyped: the fields are words first and objects later

_DTYPES = {"fp8": torch.bfloat16, "fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
_POLICIES = {
    "TRANSFORMER_BASED_WRAP": transformer_auto_wrap_policy,
    "SIZE_BASED_WRAP": size_based_auto_wrap_policy,
    "NO_WRAP": None,
}
_CONFIGS = {
    StateDictType.FULL_STATE_DICT: (FullStateDictConfig, FullOptimStateDictConfig, {"rank0_only": True}),
    StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig, {}),
    StateDictType.LOCAL_STATE_DICT: (LocalStateDictConfig, LocalOptimStateDictConfig, {}),
}


@dataclass
class FullyShardedDataParallelPlugin(_library.FullyShardedDataParallelPlugin):
    """Settings of how ``Accelerator.prepare`` shards models: the fields of Accelerate's plugin.

    A field that is None is read from its environment variable (``FSDP_`` and its name), which ``accelerate launch`` and
    ``fullshard launch`` set, and otherwise has Accelerate's default. Enum fields take a number, a word or a member.
    Different from Accelerate's:

    - ``auto_wrap_policy`` is by default the blocks that ``fullshard.fully_shard`` finds (in Accelerate: no_wrap), also
      where ``transformer_based_wrap`` is given no class names and the model names none.
    - ``reshard_after_forward`` counts in version 1 too, as a sharding strategy, if ``sharding_strategy`` is None.
    - ``limit_all_gathers`` and ``use_orig_params`` have no effect: gathered memory is always bounded, parameters are
      always the original ones. In version 2 neither have ``sharding_strategy``, ``backward_prefetch``,
      ``param_init_fn``, ``sync_module_states`` and ``forward_prefetch``; a warning says so.
    - ``param_init_fn`` must also allocate the tensors of its module.
    - Values that are not supported are a ``ConfigError`` with those that are.
    """

    cpu_offload: Any = None
    activation_checkpointing_offload: Any = None  # which Accelerate has from 1.15 on

    def __post_init__(self) -> None:
        """Read the environment and convert words and numbers.

        Raises:
            ConfigError: A field has an unsupported value; the message lists the supported ones.
        """
        self.fsdp_version = _integer("fsdp_version", self.fsdp_version, "FSDP_VERSION", 1)
        if self.fsdp_version not in (1, 2):
            raise ConfigError(f"fsdp_version must be 1 or 2; got {self.fsdp_version}.")
        if self.fsdp_version == 1:
            self._read_version_1()
        else:
            self._read_version_2()
        self.set_cpu_offload()
        self.set_state_dict_type()
        self._read_wrapping()
        self._read_loading_and_checkpointing()
        if self.mixed_precision_policy is not None:
            policy = self.mixed_precision_policy
            if isinstance(policy, (str, Mapping)):
                self.set_mixed_precision(policy, override=isinstance(policy, str))
            self.validate_mixed_precision_policy()
        if not self.limit_all_gathers:
            _without_effect("limit_all_gathers=False", "gathered memory is always bounded")

    @classmethod
    def of(cls, given: Any) -> FullyShardedDataParallelPlugin:
        """Convert Accelerate's own plugin.

        Raises:
            ConfigError: A field has an unsupported value.
        """
        return cls(**{f.name: getattr(given, f.name) for f in dataclasses.fields(cls) if hasattr(given, f.name)})

    @property
    def _mixed_precision_class(self) -> type[Any]:
        return MixedPrecision if self.fsdp_version == 1 else MixedPrecisionPolicy

    def _read_flags(self, *fields: str) -> None:
        for field in fields:
            setattr(self, field, _flag(field, getattr(self, field), f"FSDP_{field.upper()}"))

    def _read_version_1(self) -> None:
        strategy = self.sharding_strategy
        if strategy is None:  # Accelerate ignores reshard_after_forward in version 1; an explicit one counts here
            strategy = self.reshard_after_forward
        if isinstance(strategy, bool):
            raise ConfigError(
                f"reshard_after_forward={strategy} needs fsdp_version=2. With version 1 use sharding_strategy="
                f"{'FULL_SHARD' if strategy else 'SHARD_GRAD_OP'}."
            )
        strategy = os.environ.get("FSDP_SHARDING_STRATEGY", "FULL_SHARD") if strategy is None else strategy
        self.sharding_strategy = _member("sharding_strategy", ShardingStrategy, strategy)
        if self.reshard_after_forward is not None:
            self.reshard_after_forward = self.sharding_strategy
        prefetch = _or_env(self.backward_prefetch, "FSDP_BACKWARD_PREFETCH", None)
        none = prefetch is None or str(prefetch).upper() in ("NO_PREFETCH", "NONE", "3")
        self.backward_prefetch = None if none else _member("backward_prefetch", BackwardPrefetch, prefetch)
        self._read_flags("use_orig_params", "sync_module_states", "forward_prefetch")

    def _read_version_2(self) -> None:
        for field, why in (
            ("sharding_strategy", "use reshard_after_forward"),
            ("backward_prefetch", "the next unit is always gathered before the current one's backward"),
            ("use_orig_params", "parameters are always the original ones"),
            ("param_init_fn", "modules on the meta device initialize themselves when they are sharded"),
            ("sync_module_states", "ranks that hold different values take rank 0's in any case"),
            ("forward_prefetch", "the next unit is always gathered ahead in forward"),
        ):
            if getattr(self, field) is not None:
                _without_effect(f"{field} with fsdp_version=2", why)
                setattr(self, field, None)
        value = _or_env(self.reshard_after_forward, "FSDP_RESHARD_AFTER_FORWARD", "true")
        self.reshard_after_forward = _flag("reshard_after_forward", value, "")

    def _read_wrapping(self) -> None:
        policy = _or_env(self.auto_wrap_policy, "FSDP_AUTO_WRAP_POLICY", "")
        self.asked_for_one_unit = str(policy).upper() == "NO_WRAP"
        self._finds_blocks = not policy
        policy = policy or "NO_WRAP"
        if isinstance(policy, str):
            if policy.upper() not in _POLICIES:
                raise ConfigError(
                    f"auto_wrap_policy must be {', '.join(map(str.lower, _POLICIES))} or a policy; got {policy!r}."
                )
            policy = _POLICIES[policy.upper()]
        self.auto_wrap_policy = policy
        if policy is transformer_auto_wrap_policy:
            names = _or_env(self.transformer_cls_names_to_wrap, "FSDP_TRANSFORMER_CLS_TO_WRAP", None)
            names = names.split(",") if isinstance(names, str) else names
            self.transformer_cls_names_to_wrap = None if names is None else [n.strip() for n in names if n.strip()]
        elif policy is size_based_auto_wrap_policy:
            self.min_num_params = _integer("min_num_params", self.min_num_params, "FSDP_MIN_NUM_PARAMS", 0)
        self.ignored_modules = _or_env(self.ignored_modules, "FSDP_IGNORED_MODULES", None)

    def _read_loading_and_checkpointing(self) -> None:
        given = self.cpu_ram_efficient_loading
        self._read_flags("activation_checkpointing", "activation_checkpointing_offload", "cpu_ram_efficient_loading")
        if self.activation_checkpointing_offload and not (self.activation_checkpointing and self.fsdp_version == 2):
            raise ConfigError(
                "activation_checkpointing_offload=True needs activation_checkpointing=True and fsdp_version=2."
            )
        if given is not None:  # transformers' from_pretrained reads this variable
            os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = str(self.cpu_ram_efficient_loading)
        if self.fsdp_version == 1 and self.cpu_ram_efficient_loading:
            self.sync_module_states = True

    def set_state_dict_type(self, state_dict_type: Any = None) -> None:
        """Set the kind of ``state_dict()`` and ``save_state``, such as ``"FULL_STATE_DICT"`` before the last save.

        Settings that are None, or another type's, become the type's defaults.

        Raises:
            ConfigError: ``state_dict_type`` is not a type, or is LOCAL_STATE_DICT with version 2.
        """
        default = "FULL_STATE_DICT" if self.fsdp_version == 1 else "SHARDED_STATE_DICT"
        value = _or_env(state_dict_type or self.state_dict_type, "FSDP_STATE_DICT_TYPE", default)
        self.state_dict_type = _member("state_dict_type", StateDictType, value)
        if self.fsdp_version == 2 and self.state_dict_type is StateDictType.LOCAL_STATE_DICT:
            raise ConfigError("fsdp_version=2 supports FULL_STATE_DICT and SHARDED_STATE_DICT, not LOCAL_STATE_DICT.")
        model, optim, rank0 = _CONFIGS[self.state_dict_type]
        local = self.state_dict_type is StateDictType.LOCAL_STATE_DICT
        for field, kind in (("state_dict_config", model), ("optim_state_dict_config", optim)):
            if not isinstance(getattr(self, field), kind):
                setattr(self, field, kind(offload_to_cpu=not local, **rank0))

    def set_auto_wrap_policy(self, model: nn.Module) -> None:
        """Complete a policy given as a word with the classes of the blocks of ``model`` or the smallest size.

        Without a policy, and for a model that names no classes, it is the one that finds repeated blocks.

        Raises:
            WrapError: The model has no module of one of the classes; the message lists its repeated classes.
        """
        if self.auto_wrap_policy is None and self._finds_blocks:
            self.auto_wrap_policy = RepeatedBlocks()
        elif self.auto_wrap_policy is transformer_auto_wrap_policy:
            if self.transformer_cls_names_to_wrap is None:
                own = {type(module).__name__ for module in model.modules()}
                self.transformer_cls_names_to_wrap = sorted(block_classes(model) & own)
            if not self.transformer_cls_names_to_wrap:
                self.auto_wrap_policy = RepeatedBlocks()
                return
            classes = {self.get_module_class_from_name(model, name) for name in self.transformer_cls_names_to_wrap}
            self.auto_wrap_policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=classes)
        elif self.auto_wrap_policy is size_based_auto_wrap_policy:
            size = self.min_num_params or 0
            self.auto_wrap_policy = (
                functools.partial(size_based_auto_wrap_policy, min_num_params=size) if size > 0 else None
            )

    @staticmethod
    def get_module_class_from_name(module: nn.Module, name: str) -> type[nn.Module]:
        """Return the class named ``name`` of a module inside ``module``.

        Raises:
            WrapError: There is no such module.
        """
        classes = [type(inner) for inner in module.modules()]
        found = next((cls for cls in classes if cls.__name__ == name), None)
        if found is None:
            repeated = sorted(
                {c.__name__ for c in classes if classes.count(c) > 1 and not c.__module__.startswith("torch.")}
            )
            raise WrapError(
                f"transformer_cls_names_to_wrap has {name}, but {type(module).__name__} has no such module. "
                f"Classes that it has more than once: {', '.join(repeated) or 'only those of torch'}."
            )
        return found

    def set_mixed_precision(
        self,
        mixed_precision: Any,
        buffer_autocast: bool = False,  # noqa: FBT001, FBT002 (Accelerate's signature)
        override: bool = False,  # noqa: FBT001, FBT002
    ) -> None:
        """Set the dtypes of parameters, gradients and buffers (version 1) or outputs (2).

        Args:
            mixed_precision: ``"fp16"``, ``"bf16"``, ``"fp32"`` or a dtype; ignored if ``mixed_precision_policy`` is a
                dict, whose dtypes are used.
            buffer_autocast: Keep buffers in float32.
            override: Replace a policy that is already set.

        Raises:
            ConfigError: ``mixed_precision`` or the dict has another value.
        """
        policy = self.mixed_precision_policy
        last = "buffer_dtype" if self.fsdp_version == 1 else "output_dtype"
        if isinstance(policy, Mapping) and not override:
            keys = ["param_dtype", "reduce_dtype", last]
            wrong = [f"{key}={value}" for key, value in policy.items() if value not in _DTYPES.values()]
            wrong += [f"no {key}" for key in keys if key not in policy] + [key for key in policy if key not in keys]
            if wrong:
                raise ConfigError(
                    f"A mixed_precision_policy dict must have {', '.join(keys)}, each torch.float16, torch.bfloat16 or "
                    f"torch.float32; this one has {', '.join(wrong)}."
                )
            self.mixed_precision_policy = self._mixed_precision_class(**policy)
            return
        dtype = _DTYPES.get(mixed_precision, mixed_precision) if isinstance(mixed_precision, str) else mixed_precision
        if dtype not in _DTYPES.values():
            raise ConfigError(f"mixed_precision must be one of {', '.join(_DTYPES)}; got {mixed_precision!r}.")
        if override or policy is None:
            third = torch.float32 if buffer_autocast and self.fsdp_version == 1 else dtype
            self.mixed_precision_policy = self._mixed_precision_class(
                param_dtype=dtype, reduce_dtype=dtype, **{last: third}
            )

    def validate_mixed_precision_policy(self) -> None:
        """Raise a ConfigError if the policy's class is not the version's."""
        if not isinstance(self.mixed_precision_policy, self._mixed_precision_class):
            raise ConfigError(
                f"mixed_precision_policy must be a {self._mixed_precision_class.__name__} with fsdp_version="
                f"{self.fsdp_version}; got {self.mixed_precision_policy!r}."
            )

    def set_cpu_offload(self) -> None:
        """Convert ``cpu_offload``, a bool or one of torch's or our policies, to the version's policy.

        Raises:
            ConfigError: It is something else.
        """
        value = self.cpu_offload
        if value is None or isinstance(value, (bool, str)):
            value = _flag("cpu_offload", value, "FSDP_OFFLOAD_PARAMS")
        if not isinstance(value, (bool, CPUOffload, OffloadPolicy)):
            raise ConfigError(f"cpu_offload must be True, False, a CPUOffload or an OffloadPolicy; got {value!r}.")
        offloads = value is True or isinstance(value, CPUOffloadPolicy) or getattr(value, "offload_params", False)
        if self.fsdp_version == 1:
            self.cpu_offload = CPUOffload(offload_params=offloads)
        elif not isinstance(value, OffloadPolicy):
            self.cpu_offload = CPUOffloadPolicy() if offloads else OffloadPolicy()


def _or_env(value: Any, name: str, default: Any) -> Any:
    """Return a field's value, or if it is None that of its environment variable."""
    return value if value is not None else os.environ.get(name, default)


def _flag(field: str, value: Any, name: str) -> bool:
    value = _or_env(value, name, "false")
    text = str(value).lower()
    if text not in ("y", "yes", "t", "true", "on", "1", "n", "no", "f", "false", "off", "0"):
        raise ConfigError(f"{field}{f' ({name})' if name else ''} must be true or false; got {value!r}.")
    return text in ("y", "yes", "t", "true", "on", "1")


def _integer(field: str, value: Any, name: str, default: int) -> int:
    value = _or_env(value, name, default)
    if isinstance(value, bool) or not str(value).isdigit():
        raise ConfigError(f"{field} ({name}) must be an integer of at least 0; got {value!r}.")
    return int(value)


def _member(field: str, kind: type[E], value: Any) -> E:
    """Return the member of ``kind`` with a number or word."""
    if isinstance(value, kind):
        return value
    word = str(value).upper()
    by_word = {member.name.removeprefix("_"): member for member in kind} | {str(m.value): m for m in kind}
    if word.removeprefix("_") not in by_word:
        raise ConfigError(f"{field} must be one of {', '.join(by_word)}; got {value!r}.")
    return by_word[word.removeprefix("_")]


def _without_effect(what: str, why: str) -> None:
    warnings.warn(f"{what} has no effect: {why}.", stacklevel=5)
