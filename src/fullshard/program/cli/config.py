"""``fullshard config``: write a configuration file interactively, check a run file."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from fullshard.compat.accelerate_config.file import read_accelerate_file
from fullshard.compat.accelerate_config.options import launch_warnings
from fullshard.compat.accelerate_config.translate import default_values, next_commands, summary
from fullshard.errors import CheckpointError, ConfigError
from fullshard.program.cli.accelerate import add_config_file, file_overrides
from fullshard.program.cli.common import (
    add_json,
    add_run_arguments,
    add_verb,
    ask,
    load_program,
    positive,
    set_own_parsers,
    yes_or_no,
)
from fullshard.program.config import RunConfig, changed_settings, load_run, require_base, require_output_dir
from fullshard.program.config.training import auto_precision
from fullshard.program.launch import choose_nproc, gpu_count
from fullshard.program.launch.messages import say

PROGRAM = "fullshard.program.train.dry_run"
DEVICES = "fullshard.program.train.setup.devices"

QUESTIONS = "accelerate.commands.config.config"
"""Accelerate's module that asks; its function is that of ``accelerate config``."""

DEFAULT_PATH = Path("fsdp_config.yaml")
"""Default path of the file: next to the user's script, not in Accelerate's cache."""


SUMMARY = "write a configuration file interactively, or check a run file"

DESCRIPTION = f"""\
Without an action: ask the questions of `accelerate config`, write the configuration file that they make, check it and
explain it. fullshard train, fullshard launch and accelerate launch read it. It is written to --config_file, or to
{DEFAULT_PATH}; an existing file is not overwritten without asking.
"""

EPILOG = """\
examples:
  fullshard config
  fullshard config --config_file fsdp_config.yaml
  fullshard config --default --json --config_file fsdp_config.yaml
  fullshard config check run.yaml
"""

CHECK_DESCRIPTION = """\
Read a run file with its overrides. Prints the settings that differ from the defaults and "no problem found", or all
problems at once. --all prints every setting with defaults filled in.

With --dry-run, do everything that train does before its first step, on this machine's CPU and without the model's
weights: read and tokenize the data (which stays in the cache for train) and lay out the model over the ranks. Shows the
unit table, what the run chooses by itself and why, the number of steps and the memory of each rank. --gpu shows what it
would choose on such GPUs.
"""

CHECK_EPILOG = """\
examples:
  fullshard config check examples/banking77_tiny.yaml
  fullshard config check run.yaml --dry-run --world-size 8 training.precision=bf16
  fullshard config check run.yaml --dry-run --world-size 8 --gpu a10g
  fullshard config check run.yaml --config_file fsdp_config.yaml
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument(
        "--config_file",
        "--config-file",
        metavar="FILE",
        type=Path,
        dest="answers_file",
        help=f"file to write (default: {DEFAULT_PATH})",
    )
    parser.add_argument("--default", action="store_true", help="write a sharded file for this machine without asking")
    add_json(parser, dest="answers_json")
    parser.set_defaults(json=False)
    actions = parser.add_subparsers(title="actions", metavar="[ACTION]")
    _add_check(actions)
    set_own_parsers(actions)


def _add_check(actions: Any) -> None:
    check = add_verb(
        actions,
        "check",
        run_check,
        "check a run file; with --dry-run, do everything before the first step",
        CHECK_DESCRIPTION,
        CHECK_EPILOG,
    )
    add_run_arguments(check)
    add_config_file(check)
    check.add_argument("--dry-run", action="store_true", help="do everything before the first step, without weights")
    check.add_argument("--all", action="store_true", help="print every setting, as a run file")
    check.add_argument(
        "--world-size",
        metavar="N",
        type=positive,
        help="with --dry-run: ranks to lay out for (default: as many as train would start)",
    )
    check.add_argument(
        "--gpu",
        metavar="NAME",
        help="with --dry-run: GPU of each rank, such as h100 (default: this machine's, or its CPU)",
    )


def run(options: argparse.Namespace) -> None:
    """Ask, write the file, check it, and print what it means; one process.

    The file is JSON if its name ends in ``.json``, as Accelerate reads it, otherwise YAML. With ``--json`` the result
    is printed on standard output, and the questions on standard error.

    Raises:
        ConfigError: Standard input is not a terminal, it ended, the user keeps the file that exists, or Accelerate
            refuses the answers, or the file cannot be written: nothing is written. Or fullshard does not support what
            was answered: the file is written.
        KeyboardInterrupt: Ctrl-C; nothing is written.
    """
    path, options.json = options.answers_file or DEFAULT_PATH, options.answers_json
    with contextlib.redirect_stdout(sys.stderr) if options.json else contextlib.nullcontext():
        values = _ask(path) if not options.default else _defaults(path)
    text = json.dumps(values, indent=2) if path.suffix == ".json" else yaml.safe_dump(values, sort_keys=False)
    try:
        load_program("fullshard.state.storage").write_text(path, text)
    except CheckpointError as error:
        raise ConfigError(f"{path} cannot be written. {error}") from error
    file = read_accelerate_file(path)
    warnings = [*file.warnings, *launch_warnings(file)]
    for warning in warnings:
        say(f"warning: {warning}")
    if options.json:
        found = {"path": str(path), "config": values, "meaning": summary(file)}
        print(json.dumps({**found, "warnings": warnings, "next": next_commands(file)}))
        return
    print(f"\n{path}\n{text}\nWhat it means", *(f"- {sentence}" for sentence in summary(file)), sep="\n")
    print("\nNext", *(f"  {command}" for command in next_commands(file)), sep="\n")


def _ask(path: Path) -> dict[str, Any]:
    """Ask Accelerate's questions and return the values of its file."""
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


def _refuse_misplaced(options: argparse.Namespace) -> None:
    """Refuse the questionnaire's options in front of an action."""
    given = {"--config_file": options.answers_file, "--default": options.default, "--json": options.answers_json}
    for name, value in given.items():
        if value:
            raise ConfigError(f"Put {name} after the action: before it, it is an option of the questions.")


def run_check(options: argparse.Namespace) -> None:
    """Check a run file; one process."""
    _refuse_misplaced(options)
    for name, given in (("--world-size", options.world_size), ("--gpu", options.gpu)):
        if given and not options.dry_run:
            raise ConfigError(f"{name} needs --dry-run: add it, or leave out {name}.")

    def load(more: Sequence[str]) -> RunConfig:
        return load_run(options.config, [*options.overrides, *file_overrides(options), *more])

    config, gpus = load(()), gpu_count()
    require_base(config.model)
    require_output_dir(config)
    plain = dict(config.as_plain())
    if not options.dry_run:
        if config.training.precision == "fp16" or config.training.lr_scheduler_kwargs:  # the program loads slowly
            load_program(PROGRAM).check_kind(config)
        _print_settings(options, plain, gpus)
        return
    world_size = options.world_size or choose_nproc(config.nproc)
    device = None if options.gpu is None else load_program("fullshard.planner").hardware(options.gpu)
    found = load_program(PROGRAM).dry_run(config, world_size, load=load, device=device, gpus=gpus)
    if options.all and not options.json:
        _print_settings(options, plain, gpus)
    print(json.dumps({"config": plain, **found.as_dict()}) if options.json else found)


def _print_settings(options: argparse.Namespace, plain: Mapping[str, Any], gpus: int) -> None:
    """Print the settings of a run file without problems: all, or those that differ from the defaults.

    Also what ``training.precision: auto`` is on this machine; the program is loaded for that only if it has GPUs.
    """
    if options.json:
        print(json.dumps(plain))
        return
    auto = ""
    if plain["training"]["precision"] == "auto":
        of_gpus = load_program(DEVICES) if gpus else None
        value, why = auto_precision(None) if of_gpus is None else of_gpus.precision_of(of_gpus.Devices.of_machine(gpus))
        auto = f"training.precision: auto is {value} on this machine: {why}\n"
    if options.all:
        text = yaml.safe_dump(plain, sort_keys=False, allow_unicode=True)
        print(f"{text}{auto and f'# {auto}'}# no problem found")
        return
    changed = changed_settings(plain)
    print(f"{len(changed)} settings differ from the defaults (--all prints every one):")
    for key, value in changed.items():
        print(f"  {key}: {json.dumps(value, ensure_ascii=False)}")
    print(f"{auto}no problem found in {options.config}; --dry-run also checks data and model")
