"""``fullshard verify``: read everything that was written, and say what is wrong where."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from fullshard.cli.common import load_program
from fullshard.cli.progress import ByteProgress
from fullshard.errors import CheckpointError
from fullshard.sizes import format_bytes

PROGRAM = "fullshard.storage.verify"

DESCRIPTION = """\
Read everything in PATH and compare it with what was written; say all that is wrong, and where.

PATH is the output_dir of a run, a directory of checkpoints, one checkpoint (step-…), a model's directory or a file of
weights. Of checkpoints every block is compared with its checksum; formats without checksums are read through, and
only their structure is checked.
"""

EPILOG = """\
Ends with exit code 0 when all is whole, 9 when anything is not.

examples:
  fullshard verify runs/mine
  fullshard verify runs/mine/checkpoints/step-00000100 --json
"""


def add_parser(verbs: Any) -> None:
    """Add the verb's parser to those of ``fullshard``."""
    parser = verbs.add_parser(
        "verify",
        help="check that checkpoints and models are whole",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "path", metavar="PATH", type=Path, help="a run, its checkpoints, one checkpoint, a model or a file of weights"
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON on standard output")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Verify; one process.

    Args:
        options: The parsed command line.

    Returns:
        The exit code.

    Raises:
        CheckpointError: There is nothing to verify.
    """
    with ByteProgress("verifying") as progress:
        found = load_program(PROGRAM).verify(options.path, progress)
    if options.json:
        print(json.dumps(found.as_dict()))
    else:
        _print(found)
    if not found.problems:
        return 0
    damaged = sum(bool(verdict.problems) for verdict in found.verdicts)
    print(
        f"{CheckpointError.__name__}: {damaged} of {len(found.verdicts)} in {options.path} "
        f"{'is' if damaged == 1 else 'are'} not whole: {found.problems:,} problem{'s' if found.problems > 1 else ''}.",
        file=sys.stderr,
    )
    return CheckpointError.exit_code


def _print(found: Any) -> None:
    """For people."""
    for verdict in found.verdicts:
        size = f"{verdict.tensors:,} tensors, {format_bytes(verdict.nbytes)}"
        if verdict.problems:
            print(f"{verdict.path}: NOT WHOLE")
        elif verdict.checksums:
            print(f"{verdict.path}: whole; {size}, {verdict.checksums:,} checksums agree{_unhashed(verdict)}")
        else:
            print(f"{verdict.path}: whole as far as its structure tells, it has no checksums; {size}")
        for problem in verdict.problems:
            print(f"  {problem.file}: {problem.text}")
    for note in found.notes:
        print(f"note: {note}")


def _unhashed(verdict: Any) -> str:
    count = len(verdict.unhashed)
    if not count:
        return ""
    files = "1 small file has none" if count == 1 else f"{count} small files have none"
    return f"; its {files}, saved by an earlier version: only sizes were compared"
