"""Keys of Accelerate's configuration files, for both versions of its FSDP, and parsers of their values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
PREFETCHES = ("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH")
DEFAULT_MIN_NUM_PARAMS = 100_000_000
"""Accelerate's default of ``fsdp_min_num_params`` with SIZE_BASED_WRAP."""


Parser = Callable[[Any], Any]
"""Function from what YAML returns to a value; its ``ValueError`` states what is expected."""

_YES = ("true", "yes", "on", "1")
_NO = ("false", "no", "off", "0")


def flag(value: Any) -> bool:
    """Parse a switch in any spelling that Accelerate accepts."""
    text = str(value).lower()
    if text not in (*_YES, *_NO):
        raise ValueError("true or false")
    return text in _YES


def integer(least: int) -> Parser:
    """Return a parser of integers of at least ``least``; ``1e8`` is one."""

    def parse(value: Any) -> int:
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = float("nan")
        if isinstance(value, bool) or number != number // 1 or number < least:
            raise ValueError(f"a whole number of at least {least}")
        return int(number)

    return parse


def word(*words: str, numbered: bool = False) -> Parser:
    """Return a parser of one of ``words`` in any case; with ``numbered`` also of its number, counted from 1."""

    def parse(value: Any) -> str:
        text = "no" if value is False else str(value).strip()  # YAML 1.1 reads a bare no as false
        if numbered and text.isdigit() and 1 <= int(text) <= len(words):
            return words[int(text) - 1]
        found = next((name for name in words if name.lower() == text.lower()), None)
        if found is None or value is True:
            shown = [f"{number} {name}" for number, name in enumerate(words, start=1)] if numbered else words
            raise ValueError("one of " + ", ".join(shown))
        return found

    return parse


def names(value: Any) -> tuple[str, ...]:
    """Parse a list of names, or names separated by commas."""
    items = value.split(",") if isinstance(value, str) else value
    if not isinstance(items, (list, tuple)) or not all(isinstance(item, str) for item in items):
        raise ValueError("class names separated by commas, such as T5Block or BertLayer,BertEmbeddings")
    return tuple(item.strip() for item in items if item.strip())


def text(value: Any) -> str:
    """Parse a string or number."""
    if isinstance(value, (bool, dict, list)):
        raise ValueError("a string")
    return str(value).strip()


def bare_no(value: Any) -> str:
    """Parse a string that may be a bare no, which YAML 1.1 reads as false."""
    return "NO" if value is False else text(value)


def reshard(value: Any) -> str:
    """Parse a strategy's word or number, or version 2's true and false, to a strategy."""
    if isinstance(value, bool) or str(value).lower() in ("true", "false", "yes", "no"):
        return "FULL_SHARD" if flag(value) else "SHARD_GRAD_OP"
    try:
        return word(*STRATEGIES, numbered=True)(value)
    except ValueError as error:
        raise ValueError(f"true, false or {error}") from None


def anything(value: Any) -> Any:
    """Return ``value``."""
    return value


def as_yaml(value: Any) -> str:
    """Return a value as YAML, on one line."""
    plain = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True)
    return plain.strip().removesuffix("...").strip()


@dataclass(frozen=True)
class Key:
    """A key of the file."""

    parse: Parser  # parser of its values
    default: Any = None  # Accelerate's default
    # reason why it has no effect in fullshard, for a warning if it is set to another value; None: it has an effect
    ignored: str | None = None


_SPLIT = "context and sequence parallelism are not used"
_TPU = "it is for TPUs; fullshard runs on GPUs and on the CPU"

TOP: Mapping[str, Key] = {
    "compute_environment": Key(word("LOCAL_MACHINE", "AMAZON_SAGEMAKER"), "LOCAL_MACHINE"),
    "distributed_type": Key(bare_no),
    "num_machines": Key(integer(1), 1),
    "num_processes": Key(integer(-1)),
    "machine_rank": Key(integer(0), 0),
    "main_process_ip": Key(text),
    "main_process_port": Key(integer(0)),
    "rdzv_backend": Key(text, "static"),
    "same_network": Key(flag, default=False),
    "use_cpu": Key(flag, default=False),
    "gpu_ids": Key(text),
    "mixed_precision": Key(word("no", "fp16", "bf16", "fp8")),
    "fp16": Key(flag, default=False),
    "debug": Key(flag, default=False),
    "enable_cpu_affinity": Key(flag, default=False),
    "dynamo_backend": Key(bare_no, "NO"),
    "main_training_function": Key(text, "main", _TPU),
    "downcast_bf16": Key(flag, default=False, ignored=_TPU),
    "tpu_name": Key(anything, None, _TPU),
    "tpu_zone": Key(anything, None, _TPU),
    "tpu_use_cluster": Key(flag, default=False, ignored=_TPU),
    "tpu_use_sudo": Key(flag, default=False, ignored=_TPU),
    "tpu_vm": Key(anything, None, _TPU),
    "tpu_env": Key(anything, None, _TPU),
    "tpu_cluster": Key(flag, default=False, ignored=_TPU),
    "commands": Key(anything, None, _TPU),
    "command_file": Key(anything, None, _TPU),
    "deepspeed_config": Key(anything, None, "distributed_type is not DEEPSPEED"),
    "megatron_lm_config": Key(anything, None, "distributed_type is not MEGATRON_LM"),
    "fp8_config": Key(anything, None, "mixed_precision is not fp8"),
    "ipex_config": Key(anything, None, "it is for Intel's extension, which is not used"),
    "mpirun_config": Key(anything, None, "ranks are started by fullshard or torchrun, not by mpirun"),
}
"""Top-level keys, except the sections in ``SECTIONS``."""

FSDP: Mapping[str, Key] = {
    "fsdp_version": Key(integer(1), 1),
    "fsdp_sharding_strategy": Key(word(*STRATEGIES, numbered=True)),
    "fsdp_reshard_after_forward": Key(reshard),
    "fsdp_offload_params": Key(flag, default=False),
    "fsdp_auto_wrap_policy": Key(word("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP", numbered=True)),
    "fsdp_transformer_layer_cls_to_wrap": Key(names),
    "fsdp_min_num_params": Key(integer(0)),
    "fsdp_backward_prefetch": Key(word(*PREFETCHES, numbered=True)),
    "fsdp_backward_prefetch_policy": Key(word(*PREFETCHES, numbered=True)),
    "fsdp_state_dict_type": Key(word("FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT", numbered=True)),
    "fsdp_forward_prefetch": Key(flag, default=False),
    "fsdp_use_orig_params": Key(flag, default=True, ignored="parameters are always the original ones"),
    "fsdp_cpu_ram_efficient_loading": Key(
        flag, default=True, ignored="each rank reads its own part of the model's files, or the script loads the model"
    ),
    "fsdp_sync_module_states": Key(
        flag, default=True, ignored="ranks that hold different weights would train different models"
    ),
    "fsdp_activation_checkpointing": Key(flag, default=False),
    "fsdp_activation_checkpointing_offload": Key(flag, default=False),
    "fsdp_mixed_precision_policy": Key(
        anything, None, "mixed_precision counts, as with accelerate launch, which does not pass on this key"
    ),
    "fsdp_ignored_modules": Key(text),
    "fsdp_limit_all_gathers": Key(flag, default=True, ignored="gathers ahead are always limited"),
}
"""Keys of ``fsdp_config``; the prefix ``fsdp_`` may be left out."""

DYNAMO: Mapping[str, Key] = {
    "dynamo_backend": Key(bare_no, "NO"),
    "dynamo_mode": Key(word("default", "reduce-overhead", "max-autotune"), "default"),
    "dynamo_use_fullgraph": Key(flag, default=False),
    "dynamo_use_dynamic": Key(flag, default=False),
    "dynamo_use_regional_compilation": Key(flag, default=False),
}
"""Keys of ``dynamo_config``."""

PARALLELISM: Mapping[str, Key] = {
    "parallelism_config_dp_replicate_size": Key(integer(1), 1),
    "parallelism_config_dp_shard_size": Key(integer(1), 1),
    "parallelism_config_tp_size": Key(integer(1), 1),
    "parallelism_config_cp_size": Key(integer(1), 1),
    "parallelism_config_sp_size": Key(integer(1), 1),
    "parallelism_config_cp_backend": Key(text, "torch", _SPLIT),
    "parallelism_config_cp_comm_strategy": Key(text, "allgather", _SPLIT),
    "parallelism_config_sp_backend": Key(text, "deepspeed", _SPLIT),
    "parallelism_config_sp_seq_length": Key(anything, None, _SPLIT),
    "parallelism_config_sp_seq_length_is_variable": Key(flag, default=True, ignored=_SPLIT),
    "parallelism_config_sp_attn_implementation": Key(text, "sdpa", _SPLIT),
}
"""Keys of ``parallelism_config``; sizes of tensor, context and sequence parallelism above 1 are an error."""

SECTIONS: Mapping[str, tuple[str, Mapping[str, Key]]] = {
    "fsdp_config": ("fsdp_", FSDP),
    "dynamo_config": ("dynamo_", DYNAMO),
    "parallelism_config": ("parallelism_config_", PARALLELISM),
}
"""Sections that are read: the prefix of their keys, which may be left out in the file, and the keys."""
