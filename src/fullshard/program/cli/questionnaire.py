"""``fullshard config`` without an action: Accelerate's own questions, and the file that they make, explained."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import yaml

from fullshard.compat.accelerate_config.file import read_accelerate_file
from fullshard.compat.accelerate_config.options import launch_warnings
from fullshard.compat.accelerate_config.translate import default_values, next_commands, summary
from fullshard.errors import CheckpointError, ConfigError
from fullshard.program.cli.common import ask, load_program, yes_or_no
from fullshard.program.launch import gpu_count
from fullshard.program.launch.messages import say

QUESTIONS = "accelerate.commands.config.config"
"""Accelerate's module that asks; its function is that of ``accelerate config``."""

DEFAULT_PATH = Path("fsdp_config.yaml")
"""Default path of the file: next to the user's script, not in Accelerate's cache."""


def run_questions(path: Path, *, asks: bool, as_json: bool) -> None:
    """Ask, write the file, check it, and print what it means; one process.

    Args:
        path: The file to write; JSON if its name ends in ``.json``, as Accelerate reads it, otherwise YAML.
        asks: Whether to ask; otherwise every answer is the default.
        as_json: Whether to print the result as JSON on standard output, and the questions on standard error.

    Raises:
        ConfigError: Standard input is not a terminal, it ended, the user keeps the file that exists, or Accelerate
            refuses the answers, or the file cannot be written: nothing is written. Or fullshard does not support what
            was answered: the file is written.
        KeyboardInterrupt: Ctrl-C; nothing is written.
    """
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        values = _ask(path) if asks else _defaults(path)
    text = json.dumps(values, indent=2) if path.suffix == ".json" else yaml.safe_dump(values, sort_keys=False)
    try:
        load_program("fullshard.state.storage").write_text(path, text)
    except CheckpointError as error:
        raise ConfigError(f"{path} cannot be written. {error}") from error
    file = read_accelerate_file(path)
    warnings = [*file.warnings, *launch_warnings(file)]
    for warning in warnings:
        say(f"warning: {warning}")
    if as_json:
        found = {"path": str(path), "config": values, "meaning": summary(file)}
        print(json.dumps({**found, "warnings": warnings, "next": next_commands(file)}))
        return
    print(f"\n{path}\n{text}\nWhat it means", *(f"- {sentence}" for sentence in summary(file)), sep="\n")
    print("\nNext", *(f"  {command}" for command in next_commands(file)), sep="\n")


def _ask(path: Path) -> dict[str, Any]:
    """Ask Accelerate's questions and return the values of its file.

    Raises:
        ConfigError: Nobody can answer, the answers are refused, or the user keeps the file that exists.
    """
    if not sys.stdin.isatty():
        raise ConfigError(
            "fullshard config asks questions in a terminal, and standard input is not one. Use `fullshard config "
            "--default` to write the defaults without asking."
        )
    try:
        if path.exists() and not ask(f"{path} exists. Overwrite it, yes or no?", "no", yes_or_no):
            raise ConfigError(f"{path} was left unchanged. Name another file with --config_file.")
        print(f"Accelerate's questions; your answers are written to {path}. Ctrl-C exits without writing.")
        return load_program(QUESTIONS).get_user_input().to_dict()
    except EOFError:
        raise ConfigError("The input ended before the last question; nothing was written.") from None
    except (ValueError, RuntimeError, AssertionError) as error:  # what Accelerate raises of answers that do not fit
        raise ConfigError(f"Accelerate refuses these answers, and nothing was written: {error}") from error


def _defaults(path: Path) -> dict[str, Any]:
    if path.exists():
        raise ConfigError(
            f"{path} exists, and --default does not overwrite files. Name another file with --config_file, or remove "
            "it first."
        )
    gpus = gpu_count()
    return default_values(gpus, bf16=gpus > 0 and load_program("torch").cuda.is_bf16_supported())
