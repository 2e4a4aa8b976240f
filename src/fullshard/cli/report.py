"""``fullshard report``: one HTML page that tells what a run did."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from fullshard.cli.common import load_program
from fullshard.errors import ConfigError
from fullshard.sizes import format_bytes

PROGRAM = "fullshard.report"

DESCRIPTION = """\
Write one self-contained HTML page about a run: its result beside the baselines, curves, the memory of each rank, the
schedule of one step, padding, predictions beside references, settings and versions.

RUN is the output_dir of a run; it may be under way, stopped or killed. The page needs no network.
"""

EPILOG = """\
examples:
  fullshard report runs/mine
  fullshard report runs/mine -o mine.html --json
"""


def add_parser(verbs: Any) -> None:
    """Add the verb's parser to those of ``fullshard``."""
    parser = verbs.add_parser(
        "report",
        help="write an HTML page about a run",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("directory", metavar="RUN", type=Path, help="output_dir of the run")
    parser.add_argument("-o", "--output", metavar="FILE", type=Path, help="file to write; default: RUN/report.html")
    parser.add_argument("--json", action="store_true", help="print path and headline as JSON on standard output")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Write the report; one process.

    Args:
        options: The parsed command line.

    Raises:
        CheckpointError: There is no run, or the page cannot be written.
        ConfigError: plotly is missing, or there is a directory where the page is to be.
    """
    if options.output is not None and options.output.is_dir():
        raise ConfigError(
            f"-o {options.output} is a directory; name a file, such as -o {options.output / 'report.html'}."
        )
    written = load_program(PROGRAM).write_report(options.directory, options.output)
    if options.json:
        print(json.dumps(written))
    else:
        print(f"{written['report']} ({format_bytes(written['bytes'])})")
