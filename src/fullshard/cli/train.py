"""``fullshard train``: start the ranks of a run, or be one of them where torchrun has started them."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from fullshard.cli.accelerate import add_config_file, file_overrides, require_one_machine
from fullshard.cli.common import add_run_arguments, load_program
from fullshard.config import load_run, require_output_dir
from fullshard.launch import Failure, choose_nproc, launch, launched_elsewhere, rank_command

RANK_PROGRAM = "fullshard.launch.rank"

DESCRIPTION = """\
Fine-tune a model on your data, sharded over the GPUs of this machine, or over CPU processes where there are none.

Writes the best model to output_dir (load it with from_pretrained(output_dir)), and beside it summary.json,
metrics.jsonl and predictions.jsonl. Starts its own ranks; under torchrun it joins those that are there.

Ctrl-C or SIGTERM: the run saves a checkpoint after its step and leaves with exit code 75; a second one ends it at once.
The same command goes on where a run was stopped or killed, with the same result; resume=never starts anew.

With --config_file the sharding, precision and number of ranks are those of Accelerate's configuration file, as
`accelerate config` or `fullshard config` wrote it. The run file may leave them out or say the same; what it says
otherwise is an error, and what of the file has no effect is a warning.
"""

EPILOG = """\
examples:
  fullshard train examples/banking77_tiny.yaml
  fullshard train run.yaml training.learning_rate=1e-4 output_dir=runs/second
  fullshard train run.yaml --config_file fsdp_config.yaml
  torchrun --nproc_per_node 4 -m fullshard.cli.main train run.yaml
"""


def add_parser(verbs: Any) -> None:
    """Add the verb's parser to those of ``fullshard``."""
    parser = verbs.add_parser(
        "train",
        help="fine-tune a model as a run file says",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_run_arguments(parser)
    add_config_file(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> Failure | None:
    """Train; in the launching process, or on every rank under torchrun.

    Args:
        options: The parsed command line.

    Returns:
        None on success, else why the first failing rank failed, or that the run was stopped.

    Raises:
        UserError: The settings are wrong.
        SystemExit: Under torchrun, with the rank's exit code.
    """
    overrides = [*options.overrides, *file_overrides(options)]
    arguments = [str(options.config), *overrides, *(["--json"] if options.json else [])]
    if launched_elsewhere():
        sys.exit(load_program(RANK_PROGRAM).main(arguments))
    require_one_machine(options)
    config = load_run(options.config, overrides)
    require_output_dir(config.output_dir)
    nproc = choose_nproc(config.nproc)
    # The ranks say nothing before their imports are done, which takes seconds.
    print(f"fullshard: starting {nproc} rank{'s' if nproc > 1 else ''}", file=sys.stderr, flush=True)
    return launch(rank_command(RANK_PROGRAM, arguments), nproc=nproc)
