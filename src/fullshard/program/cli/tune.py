"""``fullshard tune``: measures on this machine which ways and micro-batches train a run's model fastest."""

from __future__ import annotations

import argparse
import signal
import tempfile
import time
from pathlib import Path

from fullshard.program.cli.common import (
    add_run_arguments,
    amount,
    join_other_launcher,
    load_program,
    rank_flags,
    start_ranks,
)
from fullshard.program.config import load_run
from fullshard.program.launch import Failure, choose_nproc
from fullshard.program.launch.messages import say

PROGRAM = "fullshard.program.launch.programs.tune"

JOURNAL = "fullshard.program.tune.journal"
KILLED = 128 + signal.SIGKILL

SUMMARY = "measure what trains fastest on this machine, and write it into the run file"

DESCRIPTION = """\
Measure on this machine, with the run's model, data and ranks, which settings train fastest, and write them into the run
file; with --json, print them and write nothing. Nothing is trained or saved, and output_dir is not touched.

Measured are the ways of the speed section that apply to the model, blocks to recompute, and the rows of a micro-batch
with as many rows a step as before. What the run file sets by hand stays; gradient_accumulation_steps says how a step is
divided. What does not fit by the memory plan is left out, and so is a way whose loss or gradient norm is not that of
the model without it, within rounding.

Each candidate takes real steps, first until it is compiled. The slower half is dropped in each round, and the last ones
are timed three times. The result is also kept for `training.speed: auto` and `fullshard plan --fit`. Leave the machine
idle meanwhile: other programs change the result.
"""

EPILOG = """\
examples:
  fullshard tune run.yaml
  fullshard tune run.yaml --minutes 15
  fullshard tune examples/banking77_tiny.yaml --minutes 1 --json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    add_run_arguments(parser)
    parser.add_argument(
        "--minutes",
        metavar="M",
        type=amount,
        default=5.0,
        help="stop measuring when the next candidate would end later (default: 5); one is measured in any case",
    )


def run(options: argparse.Namespace) -> Failure | None:
    """Measure, in the launching process or on every rank under torchrun.

    A rank that runs out of memory in a candidate leaves the others waiting for it in a collective, which cannot be
    ended safely. So all ranks end, and start again without that candidate; what was measured is kept in a journal.
    """
    arguments = [str(options.config), *options.overrides, *rank_flags(options, "json")]
    join_other_launcher(PROGRAM, [*arguments, f"--minutes={options.minutes}"])
    nproc = choose_nproc(load_run(options.config, options.overrides).nproc)
    until = time.monotonic() + 60 * options.minutes
    with tempfile.TemporaryDirectory(prefix="fullshard-tune-") as directory:
        journal, lost = Path(directory, "journal.json"), 0
        while True:
            left = max(until - time.monotonic(), 0.0) / 60
            failure = start_ranks(
                PROGRAM, [*arguments, f"--minutes={left}", f"--journal={journal}"], nproc, saves=False
            )
            now = len(list(journal.parent.glob(f"{journal.name}.*.lost")))
            if failure is not None and now <= lost and failure.exit_code == KILLED:
                now += load_program(JOURNAL).lose_begun(journal.parent)
            if failure is None or now <= lost:  # fewer: all was measured, and then something else failed
                return failure
            lost = now
            what = failure.message.partition(" Run the same command")[0].splitlines()
            say(f"{(what or [failure.kind])[0].rstrip('.')}. The ranks start again without that candidate")
