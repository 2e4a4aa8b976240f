"""``fullshard report``: one HTML page about a run."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from fullshard.errors import ConfigError
from fullshard.program.cli.common import add_json, load_program
from fullshard.sizes import format_bytes

PROGRAM = "fullshard.program.report"

SUMMARY = "write an HTML page about a run"

DESCRIPTION = """\
Write one self-contained HTML page about a run: its result next to the baselines, curves, the memory of each rank, the
schedule of one step, padding, predictions next to references, settings and versions.

RUN is the output_dir of a run that is running, finished, stopped or killed. The page needs no network.
"""

EPILOG = """\
examples:
  fullshard report runs/mine
  fullshard report runs/mine -o mine.html --json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument("directory", metavar="RUN", type=Path, help="output_dir of the run")
    parser.add_argument("-o", "--output", metavar="FILE", type=Path, help="file to write (default: RUN/report.html)")
    add_json(parser, help="print path and headline as JSON on standard output")


def run(options: argparse.Namespace) -> None:
    """Write the report; one process."""
    if options.output is not None and options.output.is_dir():
        raise ConfigError(
            f"-o {options.output} is a directory; name a file, such as -o {options.output / 'report.html'}."
        )
    written = load_program(PROGRAM).write_report(options.directory, options.output)
    if options.json:
        print(json.dumps(written))
    else:
        print(f"{written['report']} ({format_bytes(written['bytes'])})")
