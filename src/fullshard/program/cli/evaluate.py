"""``fullshard evaluate``: measure a trained model on held-out rows."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from fullshard.errors import ConfigError
from fullshard.program.cli.common import (
    add_base,
    add_encoding,
    add_json,
    add_overrides,
    join_other_launcher,
    rank_flags,
    require_model,
    start_ranks,
)
from fullshard.program.config.load import is_hub_id
from fullshard.program.config.recorded import read_evaluated
from fullshard.program.launch import Failure, choose_nproc

PROGRAM = "fullshard.program.launch.programs.evaluate"

SUMMARY = "measure a trained model on held-out rows"

DESCRIPTION = """\
Measure a trained model on held-out rows, sharded over ranks as in training. Prints the metrics of the run's evaluation
section next to the scores of baselines that use no model, and a confusion matrix for accuracy.

RUN is the output_dir of a finished run, its run file, or with --data any model that an export or share of a run wrote:
a directory or a Hub id. Writes evaluation.json and predictions.jsonl (input, prediction, references) to
output_dir/evaluation, or to evaluation in the model's directory, replacing those of an earlier evaluation.
"""

EPILOG = """\
examples:
  fullshard evaluate runs/mine
  fullshard evaluate runs/mine evaluation.num_beams=4 'evaluation.metrics=[rouge1, rouge2]' --output beams
  fullshard evaluate run.yaml --model runs/other --data test.csv --json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument("path", metavar="RUN", type=Path, help="output_dir of a finished run, a run file, or a model")
    add_overrides(parser, "override a setting of the run, such as evaluation.metric=bleu or nproc=4")
    parser.add_argument(
        "--model", metavar="MODEL", help="directory or Hub id of a model or adapter to measure (default: the run's)"
    )
    parser.add_argument(
        "--data",
        metavar="FILE",
        type=Path,
        help="file of rows to measure on, in the format of the run's data (default: the run's held-out rows)",
    )
    add_encoding(parser, "the --data FILE")
    parser.add_argument(
        "--set",
        metavar="NAME",
        help="of a mixture: the set to measure, or whose columns and prefix --data has (default: all sets)",
    )
    parser.add_argument(
        "--output", metavar="DIR", type=Path, help="directory to write (default: evaluation in the run's output_dir)"
    )
    add_base(parser)
    add_json(parser)


def run(options: argparse.Namespace) -> Failure | None:
    """Evaluate, in the launching process or on every rank under torchrun."""
    if options.model is not None:
        require_model(options.model)
    if options.encoding is not None and options.data is None:
        raise ConfigError("--encoding is that of the --data FILE: give both, or neither.")
    # model.path of the run need not exist any more.
    moved = [] if options.base is None else [f"model.path={json.dumps(str(options.base.absolute()))}"]
    overrides = [*options.overrides, *moved]
    flags = rank_flags(options, "model", "data", "encoding", "output", "set", "base", "json")
    arguments = [str(options.path), *overrides, *flags]
    join_other_launcher(PROGRAM, arguments)
    if options.data is not None and not options.data.is_file():
        found = f"{options.data} is a directory" if options.data.is_dir() else f"there is no file {options.data}"
        raise ConfigError(f"--data: {found}. Give a file of rows.")
    at_hub = is_hub_id(str(options.path))  # its settings are read by the ranks, which download it
    nproc = choose_nproc(None if at_hub else read_evaluated(options.path, options.data, overrides).nproc)
    return start_ranks(PROGRAM, arguments, nproc, saves=False)
