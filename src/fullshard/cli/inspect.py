"""``fullshard inspect``: the unit table of a run file's model, or what a directory or a file of weights holds."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from fullshard.cli.common import load_program, positive
from fullshard.cli.contents import draw
from fullshard.config import load_run
from fullshard.errors import ConfigError
from fullshard.launch import choose_nproc
from fullshard.storage import WEIGHT_SUFFIXES

UNITS_PROGRAM = "fullshard.train.dry_run"
CONTENTS_PROGRAM = "fullshard.storage.contents"

DESCRIPTION = """\
Of a run file: show how its model would be sharded: units, parameters, lanes, padding, bytes on each rank.
Needs no GPU, no ranks and no memory for the model's weights, which are not read.

Of the output_dir of a run or a directory of checkpoints: show the checkpoints there, and which of them are whole.
Of one checkpoint (step-…), a model's directory or a file of weights: show what it holds. No tensor is read; whether
all is as it was written is what fullshard verify tells.
"""

EPILOG = """\
examples:
  fullshard inspect examples/banking77_tiny.yaml
  fullshard inspect run.yaml --world-size 64 --json
  fullshard inspect runs/mine
  fullshard inspect runs/mine/checkpoints/step-00000100
"""


def add_parser(verbs: Any) -> None:
    """Add the verb's parser to those of ``fullshard``."""
    parser = verbs.add_parser(
        "inspect",
        help="show how a run's model would be sharded, or what a checkpoint holds",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("path", metavar="PATH", type=Path, help="run file (YAML), directory or file of weights")
    parser.add_argument(
        "overrides",
        metavar="key=value",
        nargs="*",
        help="with a run file: settings over the file's, such as training.learning_rate=1e-4",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON on standard output")
    parser.add_argument(
        "--world-size",
        metavar="N",
        type=positive,
        help="with a run file: ranks to shard over (default: as many as train would start)",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Print the table; one process.

    Args:
        options: The parsed command line.

    Raises:
        UserError: The settings are wrong, the model cannot be built or wrapped, or what is there cannot be read.
    """
    if options.path.is_dir() or options.path.name.endswith(WEIGHT_SUFFIXES):
        _show_contents(options)
        return
    if not options.path.exists():
        raise ConfigError(
            f"There is no {options.path}. Name a run file, a run's directory, a checkpoint, or a model's directory."
        )
    config = load_run(options.path, options.overrides)
    world_size = options.world_size or choose_nproc(config.nproc)
    table = load_program(UNITS_PROGRAM).inspect_units(config, world_size)
    print(json.dumps(table.as_dict()) if options.json else table)


def _show_contents(options: argparse.Namespace) -> None:
    given = ["--world-size"] if options.world_size else []
    given += options.overrides
    if given:
        raise ConfigError(f"{options.path} is no run file; {given[0]} is for the model of a run file. Leave it out.")
    found = load_program(CONTENTS_PROGRAM).inspect_path(options.path)
    if options.json:
        print(json.dumps(found.as_dict()))
    else:
        draw(found)
