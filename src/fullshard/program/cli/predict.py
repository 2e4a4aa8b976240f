"""``fullshard predict``: predicts texts for the rows of a file or the lines of standard input."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fullshard.errors import ConfigError, DataError
from fullshard.program.cli.common import (
    add_base,
    add_encoding,
    add_json,
    add_prompt,
    add_system,
    join_other_launcher,
    positive,
    rank_flags,
    require_model,
)
from fullshard.program.launch import Failure, choose_nproc, launch, launched_elsewhere, rank_command
from fullshard.program.launch.messages import say
from fullshard.program.launch.programs.row_formats import require_suffix

PROGRAM = "fullshard.program.launch.programs.predict"

SUMMARY = "predict texts for new rows with a trained model"

DESCRIPTION = """\
Predict a text for each row of FILE with a trained model. Writes one JSON line per row, with all columns of FILE and
then the prediction, in the order of the rows; to a file with -o in the format of its suffix: .jsonl, .json, .csv (with
the delimiter of FILE, if that is a .csv), .tsv, or .txt with one prediction per line. The column of lines of text is
input. A row that cannot be used (it is empty, not text, or has a broken cell) has the prediction null and the problem;
one whose source was cut to data.max_source_length has truncated: true.

MODEL is the output_dir of a finished run or its best model so far (RUN/best), whose prefix, separator, lengths and
beams are used, or any other model: a directory, a directory of a peft adapter, or a Hub id. FILE is .csv, .tsv, .jsonl,
.json or .parquet, of which only the source column is read (of conversations the turns before the last answer), or .txt
with one row per line. Without FILE, or with -, lines are read from standard input. If MODEL was trained on
conversations, a row of plain text is read as the user's turn of one, after the system turn of the training rows.
"""

EPILOG = """\
examples:
  fullshard predict runs/mine test.csv -o predictions.jsonl
  echo "I lost my card" | fullshard predict runs/mine
  fullshard predict google-t5/t5-small articles.txt --prefix "summarize: " --num-beams 4 --nproc 2
"""

_VALUES = (
    "num_beams",
    "max_new_tokens",
    "batch_size",
    "prefix",
    "separator",
    "source_column",
    "encoding",
    "system",
    "set",
    "output",
    "base",
    "json",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument("model", metavar="MODEL", help="output_dir of a run, directory or Hub id of a model")
    parser.add_argument("file", metavar="FILE", nargs="?", default="-", help="rows (default: -, standard input)")
    parser.add_argument("-o", "--output", metavar="FILE", type=Path, help="file to write (default: standard output)")
    add_prompt(parser, "prediction")
    parser.add_argument("--batch-size", metavar="N", type=positive, help="rows per batch (default: the run's)")
    parser.add_argument(
        "--source-column", metavar="NAME", help="column of the source (default: the run's, or chosen by its name)"
    )
    add_encoding(parser, "FILE")
    add_system(parser)
    parser.add_argument("--set", metavar="NAME", help="of a mixture: the set whose columns and prefix the rows have")
    parser.add_argument("--nproc", metavar="N", type=positive, default=1, help="ranks to shard over (default: 1)")
    add_base(parser)
    add_json(parser, help="with -o: print the number of rows as JSON; print errors as JSON")


def run(options: argparse.Namespace) -> Failure | None:
    """Predict, in the launching process or on every rank under torchrun."""
    if options.output is not None and options.file != "-" and options.output.resolve() == Path(options.file).resolve():
        raise ConfigError(f"{options.output} would replace the rows it is made from: give -o another file.")
    if options.output is not None:
        require_suffix(options.output)
    require_model(options.model)
    flags = rank_flags(options, *_VALUES)
    if options.file == "-" and launched_elsewhere():
        raise ConfigError("Ranks under torchrun cannot share standard input: name a FILE.")
    join_other_launcher(PROGRAM, [options.model, options.file, *flags])
    nproc = choose_nproc(options.nproc)
    with _file_of_rows(options.file) as file:
        command = rank_command(PROGRAM, [options.model, str(file), *flags])
        return launch(command, nproc=nproc, saves=False)


@contextmanager
def _file_of_rows(name: str) -> Iterator[Path]:
    """Yield the file itself, or a copy of standard input, which ranks cannot read."""
    if name != "-":
        if Path(name).is_dir():
            raise DataError(f"{name} is a directory; name a file of rows, or - for lines of standard input.")
        if not Path(name).is_file():
            raise DataError(f"There is no file {name}.")
        yield Path(name)
        return
    if sys.stdin.isatty():
        say("reading lines; end with Ctrl-D")
    with tempfile.TemporaryDirectory(prefix="fullshard-") as directory:
        file = Path(directory, "standard_input.txt")
        # Copied as bytes: a line that is not text is one unusable row, not an error.
        file.write_bytes(sys.stdin.buffer.read())
        yield file
