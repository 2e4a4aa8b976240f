"""``fullshard inspect``: the unit table of a run file's model, or the contents of a directory or file of weights."""

from __future__ import annotations

import argparse
import json
from typing import Any

from fullshard.cli.common import add_json, add_overrides, add_verb, load_program, path_or_url, positive
from fullshard.cli.contents import draw
from fullshard.config import load_run
from fullshard.errors import ConfigError
from fullshard.launch import choose_nproc

UNITS_PROGRAM = "fullshard.train.dry_run"
CONTENTS_PROGRAM = "fullshard.storage.contents"

DESCRIPTION = """\
For a run file: show how its model would be sharded (units, parameters, lanes, padding, bytes on each rank). Needs no
GPU, no ranks and no memory for the weights, which are not read.

For the output_dir of a run or a directory of checkpoints: list the checkpoints and show which are complete. For one
checkpoint (step-…), a model's directory or a file of weights: show its contents. URLs of checkpoints (s3://bucket/run)
are listed and shown too. Tensors are not read; fullshard verify compares them with their checksums.
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
    parser = add_verb(
        verbs,
        "inspect",
        run,
        "show how a run's model would be sharded, or the contents of a checkpoint",
        DESCRIPTION,
        EPILOG,
    )
    parser.add_argument("path", metavar="PATH", type=path_or_url, help="run file (YAML), directory or file of weights")
    add_overrides(parser, "with a run file: override a setting of the run file, such as training.learning_rate=1e-4")
    add_json(parser)
    parser.add_argument(
        "--world-size",
        metavar="N",
        type=positive,
        help="with a run file: ranks to shard over (default: as many as train would start)",
    )


def run(options: argparse.Namespace) -> None:
    """Print the table; one process.

    Raises:
        UserError: The settings are wrong, the model cannot be built or wrapped, or the path cannot be read.
    """
    url = isinstance(options.path, str)
    if url or options.path.is_dir() or options.path.name.endswith(load_program("fullshard.storage").WEIGHT_SUFFIXES):
        _print_contents(options)
        return
    if not options.path.exists():
        raise ConfigError(
            f"There is no {options.path}. Name a run file, a run's directory, a checkpoint, or a model's directory."
        )
    config = load_run(options.path, options.overrides)
    world_size = options.world_size or choose_nproc(config.nproc)
    table = load_program(UNITS_PROGRAM).inspect_units(config, world_size)
    print(json.dumps(table.as_dict()) if options.json else table)


def _print_contents(options: argparse.Namespace) -> None:
    given = ["--world-size"] if options.world_size else []
    given += options.overrides
    if given:
        raise ConfigError(f"{options.path} is not a run file; {given[0]} applies to a run file only. Leave it out.")
    found = load_program(CONTENTS_PROGRAM).inspect_path(options.path)
    if options.json:
        print(json.dumps(found.as_dict()))
    else:
        draw(found)
