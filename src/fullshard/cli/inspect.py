"""``fullshard inspect``: the unit table of a run's model over any number of ranks."""

from __future__ import annotations

import argparse
import json
from typing import Any

from fullshard.cli.common import add_run_arguments, load_program
from fullshard.config import load_run
from fullshard.launch import Failure, choose_nproc

PROGRAM = "fullshard.train.inspection"

DESCRIPTION = """\
Show how a run's model would be sharded: units, parameters, lanes, padding, bytes on each rank.

Needs no GPU and no ranks. A model given by model.config takes no memory for its weights; one given by model.path is
read.
"""

EPILOG = """\
examples:
  fullshard inspect examples/banking77_tiny.yaml
  fullshard inspect run.yaml --world-size 64 --json
"""


def add_parser(verbs: Any) -> None:
    """Add the verb's parser to those of ``fullshard``."""
    parser = verbs.add_parser(
        "inspect",
        help="show how a run's model would be sharded",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_run_arguments(parser)
    parser.add_argument(
        "--world-size", metavar="N", type=_positive, help="ranks to shard over (default: as many as train would start)"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> Failure | None:
    """Print the table; one process.

    Args:
        options: The parsed command line.

    Returns:
        None.

    Raises:
        UserError: The settings are wrong, or the model cannot be built or wrapped.
    """
    config = load_run(options.config, options.overrides)
    world_size = options.world_size or choose_nproc(config.nproc)
    table = load_program(PROGRAM).inspect_units(config, world_size)
    print(json.dumps(table.as_dict()) if options.json else table)
    return None


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1; got {number}")
    return number
