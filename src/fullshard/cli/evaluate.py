"""``fullshard evaluate``: measure a trained model on held-out rows."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from fullshard.cli.common import load_program
from fullshard.config.recorded import read_run
from fullshard.errors import ConfigError
from fullshard.launch import Failure, choose_nproc, launch, launched_elsewhere, rank_command

RANK_PROGRAM = "fullshard.launch.evaluate"

DESCRIPTION = """\
Measure a trained model on held-out rows, sharded over ranks as train does: the metrics of the run's evaluation section
beside what predictions without any model score, and for accuracy a confusion matrix.

RUN is the output_dir of a finished run, or its run file. Writes evaluation.json and predictions.jsonl (input,
prediction, references) to output_dir/evaluation; what an earlier evaluation left there is replaced.
"""

EPILOG = """\
examples:
  fullshard evaluate runs/mine
  fullshard evaluate runs/mine evaluation.num_beams=4 'evaluation.metrics=[rouge1, rouge2]' --output beams
  fullshard evaluate run.yaml --model runs/other --data test.csv --json
"""


def add_parser(verbs: Any) -> None:
    """Add the verb's parser to those of ``fullshard``."""
    parser = verbs.add_parser(
        "evaluate",
        help="measure a trained model on held-out rows",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("path", metavar="RUN", type=Path, help="output_dir of a finished run, or a run file")
    parser.add_argument(
        "overrides",
        metavar="key=value",
        nargs="*",
        help="settings over the run's, such as evaluation.metric=bleu or nproc=4",
    )
    parser.add_argument(
        "--model", metavar="MODEL", help="directory or Hub id of a model or adapter to measure (default: the run's)"
    )
    parser.add_argument(
        "--data", metavar="FILE", type=Path, help="rows to measure on, read as the run's (default: its held-out rows)"
    )
    parser.add_argument(
        "--output", metavar="DIR", type=Path, help="where to write (default: evaluation in the run's output_dir)"
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON on standard output")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> Failure | None:
    """Evaluate; in the launching process, or on every rank under torchrun.

    Args:
        options: The parsed command line.

    Returns:
        None on success, else why the first failing rank failed.

    Raises:
        UserError: The settings are wrong.
        SystemExit: Under torchrun, with the rank's exit code.
    """
    arguments = [str(options.path), *options.overrides]
    for name in ("model", "data", "output"):
        value = getattr(options, name)
        arguments += [] if value is None else [f"--{name}", str(value)]
    arguments += ["--json"] if options.json else []
    if launched_elsewhere():
        sys.exit(load_program(RANK_PROGRAM).main(arguments))
    nproc = choose_nproc(read_run(options.path, options.overrides).nproc)
    if options.data is not None and not options.data.is_file():
        found = f"{options.data} is a directory" if options.data.is_dir() else f"there is no file {options.data}"
        raise ConfigError(f"--data: {found}. Name a file of rows.")
    print(f"fullshard: starting {nproc} rank{'s' if nproc > 1 else ''}", file=sys.stderr, flush=True)
    return launch(rank_command(RANK_PROGRAM, arguments), nproc=nproc, saves=False)
