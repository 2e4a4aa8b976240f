"""The environment variables in which Accelerate's launcher passes a configuration file's settings to a script."""

from __future__ import annotations

from collections.abc import Mapping

from fullshard.compat.accelerate_config.file import AccelerateFile
from fullshard.compat.accelerate_config.keys import DEFAULT_MIN_NUM_PARAMS


def launch_environment(file: AccelerateFile) -> dict[str, str]:
    """Return the variables that ``accelerate launch`` sets for a file, except torchrun's own and thread counts.

    Where Accelerate's launcher loses a setting (the older name of the prefetch policy, a version 1 strategy under its
    newer name, numbers that its plugin does not accept), the variables still have the file's value.
    """
    variables = {"ACCELERATE_MIXED_PRECISION": file.mixed_precision or "no", **_dynamo(file.dynamo)}
    if file.debug:
        variables["ACCELERATE_DEBUG_MODE"] = "true"
    if file.gpu_ids is not None:
        variables["CUDA_VISIBLE_DEVICES"] = file.gpu_ids
    if file.enable_cpu_affinity:
        variables["ACCELERATE_CPU_AFFINITY"] = "1"
    if file.use_cpu or file.distributed_type in ("MULTI_CPU", "NO"):
        variables["ACCELERATE_USE_CPU"] = str(file.use_cpu)
    if file.is_sharded:
        variables |= _fsdp(file)
    if file.parallelism:
        variables |= _parallelism(file)
    return variables


def bare_environment(given: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a launch without a file sets, except those that are ``given`` in the environment.

    They are those of ``accelerate launch`` without options, and ``FSDP_SYNC_MODULE_STATES``: there an ``Accelerator``
    gives all ranks rank 0's values, as DDP does. ``ACCELERATE_USE_FSDP`` and ``FSDP_CPU_RAM_EFFICIENT_LOADING`` stay
    unset: with these, ``from_pretrained`` loads no weights on other ranks, also in scripts without an Accelerator.
    """
    defaults = {"ACCELERATE_MIXED_PRECISION": "no", **_dynamo({}), "FSDP_SYNC_MODULE_STATES": "true"}
    return {name: value for name, value in defaults.items() if name not in given}


def launch_warnings(file: AccelerateFile) -> list[str]:
    """Return warnings about a strategy that version 2's variable, which only sets resharding, cannot express."""
    if file.fsdp.get("fsdp_version", 1) != 2 or file.strategy not in ("NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"):
        return []
    key = file.key_of("fsdp_reshard_after_forward", "fsdp_sharding_strategy")
    return [
        f"{file.as_written(key)} in {file.where(key)}, becomes full sharding in the script: with fsdp_version: 2 its "
        "Accelerator only receives whether parameters are freed after forward. Write fsdp_version: 1 and "
        f"fsdp_sharding_strategy: {file.strategy}"
    ]


def _dynamo(given: Mapping[str, object]) -> dict[str, str]:
    return {
        "ACCELERATE_DYNAMO_BACKEND": str(given.get("dynamo_backend", "NO")),
        "ACCELERATE_DYNAMO_MODE": str(given.get("dynamo_mode", "default")),
        "ACCELERATE_DYNAMO_USE_FULLGRAPH": str(given.get("dynamo_use_fullgraph", False)),
        "ACCELERATE_DYNAMO_USE_DYNAMIC": str(given.get("dynamo_use_dynamic", False)),
        "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": str(given.get("dynamo_use_regional_compilation", False)),
    }


def _fsdp(file: AccelerateFile) -> dict[str, str]:
    given = file.fsdp

    def switch(name: str, *, default: bool) -> str:
        return str(given.get(name, default)).lower()

    variables = {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": str(given.get("fsdp_version", 1)),
        "FSDP_SHARDING_STRATEGY": _strategy(file),
        "FSDP_RESHARD_AFTER_FORWARD": _reshard(file),
        "FSDP_OFFLOAD_PARAMS": switch("fsdp_offload_params", default=False),
        "FSDP_MIN_NUM_PARAMS": str(given.get("fsdp_min_num_params", DEFAULT_MIN_NUM_PARAMS)),
        "FSDP_FORWARD_PREFETCH": switch("fsdp_forward_prefetch", default=False),
        "FSDP_USE_ORIG_PARAMS": switch("fsdp_use_orig_params", default=True),
        "FSDP_CPU_RAM_EFFICIENT_LOADING": switch("fsdp_cpu_ram_efficient_loading", default=True),
        "FSDP_SYNC_MODULE_STATES": switch("fsdp_sync_module_states", default=True),
        "FSDP_ACTIVATION_CHECKPOINTING": switch("fsdp_activation_checkpointing", default=False),
        "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": switch("fsdp_activation_checkpointing_offload", default=False),
    }
    optional = {
        "FSDP_AUTO_WRAP_POLICY": _given(file, "fsdp_auto_wrap_policy", numbers=False),
        "FSDP_TRANSFORMER_CLS_TO_WRAP": ",".join(given.get("fsdp_transformer_layer_cls_to_wrap", ())) or None,
        "FSDP_BACKWARD_PREFETCH": _prefetch(file),
        "FSDP_STATE_DICT_TYPE": _given(file, "fsdp_state_dict_type"),
        "FSDP_IGNORED_MODULES": given.get("fsdp_ignored_modules"),
    }
    return variables | {name: value for name, value in optional.items() if value is not None}


def _given(file: AccelerateFile, key: str, *, numbers: bool = True) -> str | None:
    """Return a key's word, or with ``numbers`` its number if the file has one; None if the key is not set."""
    raw, parsed = file.raw.get(f"fsdp_config.{key}"), file.fsdp.get(key)
    is_word = isinstance(raw, str) and not raw.isdigit()
    return str(raw) if is_word or (numbers and raw is not None) else parsed


def _prefetch(file: AccelerateFile) -> str | None:
    """Return the prefetch policy as given, but NO_PREFETCH as a word: torch's enum does not have its number."""
    if file.backward_prefetch == "NO_PREFETCH":
        return file.backward_prefetch
    return _given(file, "fsdp_backward_prefetch") or file.backward_prefetch


def _strategy(file: AccelerateFile) -> str:
    by_other_name = file.strategy if file.fsdp.get("fsdp_version", 1) == 1 else None
    return _given(file, "fsdp_sharding_strategy") or by_other_name or "FULL_SHARD"


def _reshard(file: AccelerateFile) -> str:
    raw = file.raw.get("fsdp_config.fsdp_reshard_after_forward")
    if file.fsdp.get("fsdp_version", 1) == 1:
        return "true" if raw is None else str(raw).lower()
    return str(file.strategy not in ("SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD_ZERO2")).lower()


def _parallelism(file: AccelerateFile) -> dict[str, str]:
    sizes = ("DP_REPLICATE_SIZE", "DP_SHARD_SIZE", "TP_SIZE", "CP_SIZE", "SP_SIZE")
    given = {name: file.parallelism.get(f"parallelism_config_{name.lower()}", 1) for name in sizes}
    return {
        "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
        **{f"PARALLELISM_CONFIG_{name}": str(size) for name, size in given.items()},
        "PARALLELISM_CONFIG_CP_BACKEND": "torch",
        "PARALLELISM_CONFIG_SP_BACKEND": "deepspeed",
    }
