"""``fullshard config``: write a configuration file by questions, turn one into a run file, check a run file."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import yaml

from fullshard.cli.accelerate import add_config_file, file_overrides
from fullshard.cli.common import add_run_arguments, know_their_parsers, load_program, positive
from fullshard.cli.questionnaire import DEFAULT_PATH, run_questions
from fullshard.compat.accelerate_config.file import read_accelerate_file
from fullshard.compat.accelerate_config.run_file import LEFT, run_file_text
from fullshard.compat.accelerate_config.translate import nested, translate
from fullshard.config import load_run
from fullshard.errors import ConfigError
from fullshard.launch import choose_nproc

PROGRAM = "fullshard.train.dry_run"

DESCRIPTION = f"""\
Without an action: answer questions on machines, ranks, sharding and precision, and get a configuration file in
Accelerate's format, every line explained, for fullshard train, fullshard launch and accelerate launch. It is written to
--config_file, or to {DEFAULT_PATH}; one that exists is not overwritten without asking.
"""

EPILOG = """\
examples:
  fullshard config
  fullshard config --config_file fsdp_config.yaml
  fullshard config --default --json --config_file fsdp_config.yaml
  fullshard config convert fsdp_config.yaml -o run.yaml
  fullshard config check run.yaml
"""

CONVERT_DESCRIPTION = """\
Turn Accelerate's configuration file into a run file for fullshard train: its sharding, precision and ranks, with
comments for what is left to fill in. What does not carry over is a warning, with the reason.

Prints the run file, or writes it to -o, which must not exist.
"""

CONVERT_EPILOG = """\
examples:
  fullshard config convert fsdp_config.yaml
  fullshard config convert fsdp_config.yaml -o run.yaml
  fullshard config convert fsdp_config.yaml --json
"""

CHECK_DESCRIPTION = """\
Read a run file with its overrides and print every setting, defaults filled in; all problems at once if there are any.

With --dry-run everything is done that train does before its first step, on this machine's CPU and without the model's
weights: the data is read and tokenized (and stays in the cache for train), the model is laid out over the ranks. Shows
the unit table, the steps and what each rank will hold.
"""

CHECK_EPILOG = """\
examples:
  fullshard config check examples/banking77_tiny.yaml
  fullshard config check run.yaml --dry-run --world-size 8 training.precision=bf16
  fullshard config check run.yaml --config_file fsdp_config.yaml
"""


def add_parser(verbs: Any) -> None:
    """Add the verb's parser to those of ``fullshard``."""
    parser = verbs.add_parser(
        "config",
        help="write a configuration file by questions, convert one, or check a run file",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--config_file",
        "--config-file",
        metavar="FILE",
        type=Path,
        dest="answers_file",
        help=f"file to write (default: {DEFAULT_PATH})",
    )
    parser.add_argument("--default", action="store_true", help="write the defaults without asking")
    parser.add_argument(
        "--json", action="store_true", dest="answers_json", help="print the result as JSON on standard output"
    )
    parser.set_defaults(run=run_ask, json=False)
    actions = parser.add_subparsers(title="actions", metavar="[ACTION]")
    _add_convert(actions)
    _add_check(actions)
    know_their_parsers(actions)


def _add_convert(actions: Any) -> None:
    convert = actions.add_parser(
        "convert",
        help="turn Accelerate's configuration file into a run file",
        description=CONVERT_DESCRIPTION,
        epilog=CONVERT_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    convert.add_argument("file", metavar="FILE", type=Path, help="Accelerate's configuration file (YAML)")
    convert.add_argument("-o", "--output", metavar="RUN", type=Path, help="run file to write (default: print it)")
    convert.add_argument("--json", action="store_true", help="print the result as JSON on standard output")
    convert.set_defaults(run=run_convert)


def _add_check(actions: Any) -> None:
    check = actions.add_parser(
        "check",
        help="check a run file, and with --dry-run all that comes before the first step",
        description=CHECK_DESCRIPTION,
        epilog=CHECK_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_run_arguments(check)
    add_config_file(check)
    check.add_argument("--dry-run", action="store_true", help="do everything up to the first step, without weights")
    check.add_argument(
        "--world-size",
        metavar="N",
        type=positive,
        help="with --dry-run: ranks to lay out for (default: as many as train would start)",
    )
    check.set_defaults(run=run_check)


def run_ask(options: argparse.Namespace) -> None:
    """The questionnaire; one process.

    Args:
        options: The parsed command line.

    Raises:
        ConfigError: See :func:`~fullshard.cli.questionnaire.run_questions`.
    """
    options.json = options.answers_json
    run_questions(options.answers_file or DEFAULT_PATH, ask=not options.default, as_json=options.json)


def run_convert(options: argparse.Namespace) -> None:
    """Convert Accelerate's file; one process.

    Args:
        options: The parsed command line.

    Raises:
        ConfigError: The file is wrong or for something that is not done here, or the run file exists or cannot be
            written.
    """
    _refuse_misplaced(options)
    file = read_accelerate_file(options.file)
    translation = translate(file)
    text = run_file_text(file, translation)
    for warning in translation.warnings:
        print(f"fullshard: warning: {warning}", file=sys.stderr, flush=True)
    if options.output is not None:
        _write_new(options.output, text)
        print(f"fullshard: wrote {options.output}; left to fill in: {', '.join(LEFT)}", file=sys.stderr, flush=True)
    if options.json:
        settings, left = nested(translation.settings), list(LEFT)
        print(json.dumps({"settings": settings, "left": left, "warnings": list(translation.warnings)}))
    elif options.output is None:
        print(text, end="")


def _write_new(path: Path, text: str) -> None:
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(f"{path} exists. Name another one with -o, or remove it first.") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error}.") from error


def _refuse_misplaced(options: argparse.Namespace) -> None:
    """Refuse options of the questionnaire in front of an action."""
    given = {"--config_file": options.answers_file, "--default": options.default, "--json": options.answers_json}
    for name, value in given.items():
        if value:
            raise ConfigError(f"{name} stands before the action, where it is for the questions. Put it behind.")


def run_check(options: argparse.Namespace) -> None:
    """Check a run file; one process.

    Args:
        options: The parsed command line.

    Raises:
        UserError: The settings are wrong; with ``--dry-run``, data or model do not work out.
    """
    _refuse_misplaced(options)
    if options.world_size and not options.dry_run:
        raise ConfigError("--world-size is for --dry-run; give both, or leave it out.")
    config = load_run(options.config, [*options.overrides, *file_overrides(options)])
    plain = dict(config.as_plain())
    if not options.dry_run:
        if config.training.precision == "fp16":  # what the program has to be loaded for
            load_program(PROGRAM).check_kind(config)
        print(json.dumps(plain) if options.json else yaml.safe_dump(plain, sort_keys=False, allow_unicode=True), end="")
        return
    world_size = options.world_size or choose_nproc(config.nproc)
    found = load_program(PROGRAM).dry_run(config, world_size)
    print(json.dumps({"config": plain, **found.as_dict()}) if options.json else found)
