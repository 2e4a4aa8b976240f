"""``fullshard train``: starts the ranks of a run, or is one of them under torchrun."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from fullshard.directory_lock import CHECKPOINTS_NAME, require_untaken
from fullshard.errors import ConfigError
from fullshard.program.cli.accelerate import add_config_file, file_overrides, require_one_machine
from fullshard.program.cli.common import (
    add_run_arguments,
    amount,
    join_other_launcher,
    load_program,
    rank_flags,
    start_ranks,
    whole_number,
)
from fullshard.program.config import RunConfig, load_run, require_output_dir
from fullshard.program.config.data import source_spec
from fullshard.program.launch import Failure, Notice, choose_nproc
from fullshard.program.launch.streams import guard_streams

PROGRAM = "fullshard.program.launch.programs.train"
FIRST_LOOK = "fullshard.program.data.reading.early"

SUMMARY = "fine-tune a model as set in a run file"

DESCRIPTION = """\
Fine-tune a model on your data, sharded over the GPUs of this machine, or over CPU processes if it has none.

Writes the best model to output_dir (load it with from_pretrained(output_dir)), along with summary.json, metrics.jsonl
and predictions.jsonl. Starts its own ranks; under torchrun it runs as one of torchrun's ranks.

On Ctrl-C, SIGTERM, SIGUSR1 or SIGHUP (the terminal closes), or when the file of --stop-when-file appears, the run saves
a checkpoint after the current step and exits with code 75; a second Ctrl-C or SIGTERM ends it immediately. The same
command resumes a stopped or killed run, with the same result; resume=never starts from scratch. Under nohup a run
outlives its terminal, and every run outlives its output: what cannot be written (| head, a full disk) is dropped.

If a rank is lost (killed, out of memory, crashed in native code, cut off), all ranks end and start again from the
newest checkpoint, at most --max-restarts times, with the same result. An error that would recur ends the run at
once, and so do a step that fails twice in the same way and a rank killed for memory before the first step. Under
torchrun, torchrun restarts.

A run whose shards, gradients, optimizer state and largest unit cannot fit is refused at once. Otherwise each rank plans
its memory, which takes seconds (see `fullshard plan`), and a run that cannot fit is not started: the message has the
numbers and settings that need less. --no-plan starts it anyway.

With --config_file, sharding, precision and number of ranks come from Accelerate's configuration file, as written by
`accelerate config` or `fullshard config`. The run file may omit them or set the same values; different values are an
error. Settings of the file that have no effect are reported as warnings.
"""

EPILOG = """\
examples:
  fullshard train examples/banking77_tiny.yaml
  fullshard train run.yaml training.learning_rate=1e-4 output_dir=runs/second
  fullshard train run.yaml --config_file fsdp_config.yaml
  torchrun --nproc_per_node 4 -m fullshard train run.yaml
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    add_run_arguments(parser)
    add_config_file(parser)
    parser.add_argument(
        "--max-restarts",
        metavar="N",
        type=partial(whole_number, least=0),
        default=3,
        help="how often to start all ranks again after one was lost (default: 3)",
    )
    parser.add_argument(
        "--stop-when-file", metavar="PATH", type=Path, help="stop as on SIGTERM when this file appears (a spot notice)"
    )
    parser.add_argument(
        "--grace",
        metavar="SECONDS",
        type=amount,
        help="end ranks that have not saved this long after the request to stop (default: no limit)",
    )
    parser.add_argument("--no-plan", action="store_true", help="start without planning the run's memory first")


def run(options: argparse.Namespace) -> Failure | None:
    """Train, in the launching process or on every rank under torchrun."""
    guard_streams(outlived=True)
    overrides = [*options.overrides, *file_overrides(options)]
    arguments = [str(options.config), *overrides, *rank_flags(options, "json", "no_plan", "stop_when_file")]
    file = options.stop_when_file
    if file is not None and file.exists():
        raise ConfigError(
            f"--stop-when-file {file}: the file exists already, so the run would stop at once. Remove it."
        )
    join_other_launcher(PROGRAM, arguments)
    require_one_machine(options)
    config = load_run(options.config, overrides)
    require_output_dir(config)
    _look_first(config)
    notice = Notice(file, options.grace)
    nproc = choose_nproc(config.nproc)
    return start_ranks(PROGRAM, arguments, nproc, saves=True, max_restarts=options.max_restarts, notice=notice)


def _look_first(config: RunConfig) -> None:
    """Refuse at once what ranks would refuse after their imports: another run in the directory, columns, empty files.

    Raises:
        CheckpointError: Another run writes to the directory.
        DataError: A file has no rows, or not the columns.
    """
    require_untaken(Path(config.training.checkpoints_to or config.output_dir / CHECKPOINTS_NAME))
    look = load_program(FIRST_LOOK)
    for part in config.data.parts.values():
        spec = source_spec(part, config.training.objective)
        for split in ("train", "validation") if config.training.eval_strategy != "no" else ("train",):
            look.require_rows(spec, split)
