"""``accelerate launch``: its options, which override a configuration file's keys, and the variables that it sets."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fullshard.compat.accelerate_config.file import (
    DEFAULT_MIN_NUM_PARAMS,
    DYNAMO,
    FSDP,
    SECTIONS,
    TOP,
    AccelerateFile,
    Key,
    integer,
    read_accelerate_file,
)

_TOP = ("mixed_precision", "gpu_ids", "debug", "enable_cpu_affinity", "same_network", "downcast_bf16")
_BARE = {
    *("debug", "enable_cpu_affinity", "same_network", "downcast_bf16"),
    *("dynamo_use_fullgraph", "dynamo_use_dynamic", "dynamo_use_regional_compilation"),
}
"""Keys whose option takes no value."""

_ONLY_DEEPSPEED = ("gradient_accumulation_steps", "gradient_clipping")
"""Options that ``accelerate launch`` passes to DeepSpeed only."""

_SWITCHES = (
    *("fsdp_offload_params", "fsdp_forward_prefetch", "fsdp_use_orig_params", "fsdp_cpu_ram_efficient_loading"),
    *("fsdp_sync_module_states", "fsdp_activation_checkpointing", "fsdp_activation_checkpointing_offload"),
)
"""Keys whose variables hold true or false."""

_DEST = "accelerate:"
"""Prefix of the options' attribute names, before the dotted key."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options to the parser of ``fullshard launch``; ``--help`` leaves them to the documentation."""
    dotted = {name: (name, TOP[name]) for name in (*_TOP, "main_training_function")}
    for section, (_, keys) in SECTIONS.items():
        dotted |= {name: (f"{section}.{name}", key) for name, key in keys.items()}
    for name, (dotted_name, key) in dotted.items():
        value: dict[str, Any] = {"action": "store_const", "const": "true"} if name in _BARE else {"type": _text(key)}
        parser.add_argument(*spellings(name), dest=f"{_DEST}{dotted_name}", help=argparse.SUPPRESS, **value)
    quiet: dict[str, Any] = {"help": argparse.SUPPRESS}
    parser.add_argument("--cpu", dest=f"{_DEST}use_cpu", action="store_const", const="true", **quiet)
    parser.add_argument(
        *spellings("use_fsdp"), dest=f"{_DEST}distributed_type", action="store_const", const="FSDP", **quiet
    )
    parser.add_argument(*spellings("num_cpu_threads_per_process"), type=_text(Key(integer(1))), **quiet)
    for name in _ONLY_DEEPSPEED:
        parser.add_argument(*spellings(name), **quiet)
    for name in ("multi_gpu", "use_parallelism_config", "standalone"):  # several ranks are the default here
        parser.add_argument(*spellings(name), action="store_true", **quiet)


def spellings(name: str) -> list[str]:
    """Return an option with underscores, and with hyphens."""
    return list(dict.fromkeys([f"--{name}", f"--{name.replace('_', '-')}"]))


def _text(key: Key) -> Callable[[str], str]:
    """Return a parser that checks a key's value and keeps it as written."""

    def check(text: str) -> str:
        try:
            key.parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"expected {error}; got {text!r}") from None
        return text

    return check


def read_settings(path: Path | None, options: argparse.Namespace) -> AccelerateFile | None:
    """Return the file's settings with those of the command line; None if there are neither.

    Raises:
        ConfigError: The file or an option is wrong.
    """
    given = {name.removeprefix(_DEST): value for name, value in vars(options).items() if name.startswith(_DEST)}
    given = {key: value for key, value in given.items() if value is not None}
    if path is None and not given:
        return None
    if path is None:
        given.setdefault("distributed_type", "MULTI_GPU")
    return read_accelerate_file(path, given)


def environment_of(options: argparse.Namespace) -> dict[str, str]:
    """Return the variables for options that have no key in a file."""
    threads = options.num_cpu_threads_per_process
    return {} if threads is None else {"OMP_NUM_THREADS": threads}


def warnings_of(options: argparse.Namespace) -> list[str]:
    """Return warnings about options without effect."""
    return [
        f"--{name} {getattr(options, name)} has no effect: Accelerate uses it with DeepSpeed only. Pass it to "
        "Accelerator in the script"
        for name in _ONLY_DEEPSPEED
        if getattr(options, name) is not None
    ]


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
    return {f"ACCELERATE_{name.upper()}": str(given.get(name, key.default)) for name, key in DYNAMO.items()}


def _fsdp(file: AccelerateFile) -> dict[str, str]:
    given = file.fsdp

    variables = {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": str(given.get("fsdp_version", 1)),
        "FSDP_SHARDING_STRATEGY": _strategy(file),
        "FSDP_RESHARD_AFTER_FORWARD": _reshard(file),
        "FSDP_MIN_NUM_PARAMS": str(given.get("fsdp_min_num_params", DEFAULT_MIN_NUM_PARAMS)),
        **{name.upper(): str(given.get(name, FSDP[name].default)).lower() for name in _SWITCHES},
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
