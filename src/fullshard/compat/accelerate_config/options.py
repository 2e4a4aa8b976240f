"""``accelerate launch``: its options, which override a configuration file's keys, and the variables that it sets."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from fullshard.compat.accelerate_config.file import (
    DYNAMO,
    SECTIONS,
    TOP,
    AccelerateFile,
    Key,
    integer,
    read_accelerate_file,
)
from fullshard.errors import ConfigError

_TOP = ("mixed_precision", "gpu_ids", "debug", "enable_cpu_affinity", "same_network", "downcast_bf16")
_BARE = {
    *("debug", "enable_cpu_affinity", "same_network", "downcast_bf16"),
    *("dynamo_use_fullgraph", "dynamo_use_dynamic", "dynamo_use_regional_compilation"),
}
"""Keys whose option takes no value."""

_ONLY_DEEPSPEED = ("gradient_accumulation_steps", "gradient_clipping")
"""Options that ``accelerate launch`` passes to DeepSpeed only."""

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
    """Return the variables that Accelerate's launcher builds for a file, except torchrun's own and thread counts.

    Its functions get what the file means: words for numbers, and a setting under either of its names. Where they lose a
    setting (use_cpu of a sharded script), the variables still have the file's value.

    Raises:
        ConfigError: Accelerate refuses a value.
    """
    parser = import_module("accelerate.commands.launch").launch_command_parser()
    prepare = import_module("accelerate.utils.launch")
    arguments = parser.parse_args(["script.py"])
    vars(arguments).update(_arguments(file))
    try:
        if file.distributed_type in ("MULTI_CPU", "NO"):
            found = prepare.prepare_simple_launcher_cmd_env(arguments)[1]
        else:
            found = prepare.prepare_multi_gpu_env(arguments)
    except (ValueError, RuntimeError) as error:
        raise ConfigError(f"{file.path}: {error}") from error
    variables = {name: value for name, value in found.items() if name.startswith(_PREFIXES)}
    if file.gpu_ids is not None:
        variables["CUDA_VISIBLE_DEVICES"] = file.gpu_ids
    return variables | ({"ACCELERATE_USE_CPU": "True"} if file.use_cpu else {})


_RESHARD = "fsdp_config.fsdp_reshard_after_forward"
_PREFIXES = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_")


def _arguments(file: AccelerateFile) -> dict[str, Any]:
    """Return the attributes of the parsed command line of ``accelerate launch`` that a file sets."""
    fsdp: dict[str, Any] = {
        name: str(value).lower() if isinstance(value, bool) else value for name, value in file.fsdp.items()
    }
    if file.is_sharded:
        layers = ",".join(file.fsdp.get("fsdp_transformer_layer_cls_to_wrap", ()))
        keeps = file.strategy in ("SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD_ZERO2")
        version = file.fsdp.get("fsdp_version", 1)
        fsdp |= {
            "fsdp_version": version,
            "fsdp_sharding_strategy": (version == 1 and file.strategy)
            or fsdp.get("fsdp_sharding_strategy", "FULL_SHARD"),
            "fsdp_reshard_after_forward": file.raw.get(_RESHARD, True) if version == 1 else not keeps,
            "fsdp_backward_prefetch": file.backward_prefetch,
            "fsdp_transformer_layer_cls_to_wrap": layers or None,
        }
    return {
        **{"dynamo_backend": "no", **file.dynamo, **fsdp, **file.parallelism},
        **{name: getattr(file, name) for name in ("use_cpu", "debug", "enable_cpu_affinity")},
        "mixed_precision": file.mixed_precision or "no",
        "gpu_ids": file.gpu_ids or "all",
        "use_fsdp": file.is_sharded,
        "use_parallelism_config": bool(file.parallelism),
        "num_machines": 1,
        "num_processes": 1,
        "main_process_port": 0,  # any free one: ranks get theirs from fullshard's launcher
    }


def bare_environment(given: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a launch without a file sets, except those that are ``given`` in the environment.

    They are those of ``accelerate launch`` without options, and ``FSDP_SYNC_MODULE_STATES``: there an ``Accelerator``
    gives all ranks rank 0's values, as DDP does. ``ACCELERATE_USE_FSDP`` and ``FSDP_CPU_RAM_EFFICIENT_LOADING`` stay
    unset: with these, ``from_pretrained`` loads no weights on other ranks, also in scripts without an Accelerator.
    """
    dynamo = {f"ACCELERATE_{name.upper()}": str(key.default) for name, key in DYNAMO.items()}
    defaults = {"ACCELERATE_MIXED_PRECISION": "no", **dynamo, "FSDP_SYNC_MODULE_STATES": "true"}
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
