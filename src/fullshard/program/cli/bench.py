"""``fullshard bench``: measures how long a run's operators and collectives take on this machine."""

from __future__ import annotations

import argparse
from pathlib import Path

from fullshard.errors import ConfigError
from fullshard.program.cli.common import add_run_arguments, join_other_launcher, positive, rank_flags, start_ranks
from fullshard.program.cli.plan import RATES
from fullshard.program.config import load_run
from fullshard.program.launch import Failure, choose_nproc

PROGRAM = "fullshard.program.launch.programs.bench"

SUMMARY = "measure this machine's rates for a plan's time"

DESCRIPTION = """\
Measure what the operators and collectives of a run's steps take on this machine, in about a minute, and write it to a
file for `fullshard plan --rates`. Nothing is trained or saved.

Every rank takes steps of mean size, as one rank of --world, without the others' values; then the ranks measure the
collectives, alone and behind computation. Leave the machine idle meanwhile: other programs change the result.

The file keeps rates for other numbers of ranks that were measured on the same machine. Under torchrun the ranks may be
on several machines, and the collectives go over the network between them.
"""

EPILOG = """\
examples:
  fullshard bench examples/banking77_tiny.yaml
  fullshard plan examples/banking77_tiny.yaml --world 2 --cpu
  fullshard bench run.yaml nproc=1 --world 8 --out laptop.json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    add_run_arguments(parser)
    parser.add_argument(
        "--world", metavar="N", type=positive, help="ranks of the run (default: as many as train would start)"
    )
    parser.add_argument("--out", metavar="FILE", type=Path, default=RATES, help=f"file to write (default: {RATES})")


def run(options: argparse.Namespace) -> Failure | None:
    """Measure, in the launching process or on every rank under torchrun."""
    if not options.out.absolute().parent.is_dir():
        raise ConfigError(f"--out {options.out}: there is no directory {options.out.parent}. Make it, or name another.")
    arguments = [str(options.config), *options.overrides, *rank_flags(options, "out", "world", "json")]
    join_other_launcher(PROGRAM, arguments)
    nproc = choose_nproc(load_run(options.config, options.overrides).nproc)
    return start_ranks(PROGRAM, arguments, min(nproc, options.world or nproc), saves=False)
