"""``fullshard predict``: texts by a trained model for the rows of a file, or for lines."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fullshard.cli.common import load_program, positive
from fullshard.errors import ConfigError, DataError
from fullshard.launch import Failure, choose_nproc, launch, launched_elsewhere, rank_command

RANK_PROGRAM = "fullshard.launch.predict"

DESCRIPTION = """\
Write a text for each row of FILE with a trained model: a JSON line with input and prediction, in the order of the rows.

MODEL is the output_dir of a finished run, which says prefix, lengths and beams; or any model: its directory, that of an
adapter by peft, or a Hub id. FILE is .csv, .tsv, .jsonl, .json or .parquet, of which only the source column is read, or
.txt with a row in each line; without it, or with -, lines are read from standard input. Empty lines are no rows.
"""

EPILOG = """\
examples:
  fullshard predict runs/mine test.csv -o predictions.jsonl
  echo "I lost my card" | fullshard predict runs/mine
  fullshard predict google-t5/t5-small articles.txt --prefix "summarize: " --num-beams 4 --nproc 2
"""

_VALUES = ("num_beams", "max_new_tokens", "batch_size", "prefix", "source_column", "output")


def add_parser(verbs: Any) -> None:
    """Add the verb's parser to those of ``fullshard``."""
    parser = verbs.add_parser(
        "predict",
        help="write texts for new rows with a trained model",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL", help="output_dir of a run, a model's directory or Hub id")
    parser.add_argument("file", metavar="FILE", nargs="?", default="-", help="rows (default: -, standard input)")
    parser.add_argument("-o", "--output", metavar="FILE", type=Path, help="where to write (default: standard output)")
    parser.add_argument("--num-beams", metavar="N", type=positive, help="width of the beam search (default: the run's)")
    parser.add_argument(
        "--max-new-tokens", metavar="N", type=positive, help="most tokens of a text (default: the run's)"
    )
    parser.add_argument("--batch-size", metavar="N", type=positive, help="rows of a batch (default: the run's)")
    parser.add_argument("--prefix", metavar="TEXT", help="text put before each source (default: the run's)")
    parser.add_argument("--source-column", metavar="NAME", help="column of the source (default: the run's, or by name)")
    parser.add_argument("--nproc", metavar="N", type=positive, default=1, help="ranks to shard over (default: 1)")
    parser.add_argument("--json", action="store_true", help="with -o: print the number of rows as JSON; errors as JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> Failure | None:
    """Predict; in the launching process, or on every rank under torchrun.

    Args:
        options: The parsed command line.

    Returns:
        None on success, else why the first failing rank failed.

    Raises:
        UserError: The settings are wrong, or standard input is no text.
        SystemExit: Under torchrun, with the rank's exit code.
    """
    if options.output is not None and options.file != "-" and options.output.resolve() == Path(options.file).resolve():
        raise ConfigError(f"{options.output} would replace the rows it is made from: give -o another file.")
    flags: list[str] = []
    for name in _VALUES:
        value = getattr(options, name)
        flags += [] if value is None else [f"--{name.replace('_', '-')}={value}"]
    flags += ["--json"] if options.json else []
    if launched_elsewhere():
        if options.file == "-":
            raise ConfigError("Ranks under torchrun cannot share standard input: name a FILE.")
        sys.exit(load_program(RANK_PROGRAM).main([options.model, options.file, *flags]))
    nproc = choose_nproc(options.nproc)
    with _file_of_rows(options.file) as file:
        command = rank_command(RANK_PROGRAM, [options.model, str(file), *flags])
        return launch(command, nproc=nproc, saves=False)


@contextmanager
def _file_of_rows(name: str) -> Iterator[Path]:
    """The file itself, or what standard input holds: ranks have no standard input."""
    if name != "-":
        if Path(name).is_dir():
            raise DataError(f"{name} is a directory; name a file of rows, or - for lines of standard input.")
        if not Path(name).is_file():
            raise DataError(f"There is no file {name}.")
        yield Path(name)
        return
    if sys.stdin.isatty():
        print("fullshard: reading lines; end with Ctrl-D", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix="fullshard-") as directory:
        file = Path(directory, "standard_input.txt")
        try:
            text = sys.stdin.read()
        except UnicodeDecodeError as error:
            raise DataError(f"Standard input is not {sys.stdin.encoding}: {error}.") from error
        file.write_text(text, encoding="utf-8", newline="")
        yield file
