"""Options of ``accelerate launch`` that correspond to keys of a configuration file; they override the file's."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fullshard.compat.accelerate_config.file import AccelerateFile, read_accelerate_file
from fullshard.compat.accelerate_config.keys import SECTIONS, TOP, Key, integer

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
