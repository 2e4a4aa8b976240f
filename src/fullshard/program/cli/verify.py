"""``fullshard verify``: reads checkpoints and models and compares them with their checksums."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from fullshard.errors import CheckpointError
from fullshard.program.cli.common import ByteProgress, add_json, describe_base, load_program, path_or_url
from fullshard.sizes import format_bytes

PROGRAM = "fullshard.state.storage.contents"

SUMMARY = "check that checkpoints and models are complete"

DESCRIPTION = """\
Read everything in PATH and report what is damaged or missing, and in which file.

PATH is the output_dir of a run, a directory of checkpoints, one checkpoint (step-…), a model's directory or a file of
weights; or the URL of a directory of checkpoints or of one (s3://bucket/run). Every block of a checkpoint is compared
with its checksum. Files of formats without checksums are read completely, and only their structure is checked.
"""

EPILOG = """\
Exits with code 0 if everything is complete, else with code 9.

examples:
  fullshard verify runs/mine
  fullshard verify runs/mine/checkpoints/step-00000100 --json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    help_text = "a run, its checkpoints, one checkpoint, a model or a file of weights; or a URL of checkpoints"
    parser.add_argument("path", metavar="PATH", type=path_or_url, help=help_text)
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Verify; one process."""
    with ByteProgress("verifying") as progress:
        found = load_program(PROGRAM).verify(options.path, progress)
    if options.json:
        print(json.dumps(found.as_dict()))
    else:
        _print(found)
    if not found.problems:
        return 0
    damaged = sum(bool(verdict.problems) for verdict in found.results)
    print(
        f"{CheckpointError.__name__}: {damaged} of {len(found.results)} in {options.path} "
        f"{'is' if damaged == 1 else 'are'} damaged or incomplete: {found.problems:,} "
        f"problem{'s' if found.problems > 1 else ''}.",
        file=sys.stderr,
    )
    return CheckpointError.exit_code


def _print(found: Any) -> None:
    for verdict in found.results:
        size = f"{verdict.tensors:,} tensors, {format_bytes(verdict.nbytes)}"
        if verdict.problems:
            print(f"{verdict.path}: DAMAGED")
        elif verdict.checksums:
            print(f"{verdict.path}: complete; {size}, {verdict.checksums:,} checksums match{_unhashed(verdict)}")
        else:
            print(f"{verdict.path}: complete, but without checksums, so the bytes were not checked; {size}")
        if verdict.base is not None:
            print(f"  base: {describe_base(verdict.base)}")
        for problem in verdict.problems:
            print(f"  {problem.file}: {problem.text}")
    for note in found.notes:
        print(f"note: {note}")


def _unhashed(verdict: Any) -> str:
    count = len(verdict.unhashed)
    if not count:
        return ""
    files = "1 small file has no checksum" if count == 1 else f"{count} small files have no checksums"
    return f"; {files}, saved by an earlier version: only sizes were compared"
