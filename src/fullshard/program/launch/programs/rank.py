"""Common code of all rank programs: a rank ends with its launcher and reports its failure."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence

from transformers.utils import logging

from fullshard.core.comm import ENDINGS, announce_failure
from fullshard.errors import DataError, RunStopped
from fullshard.program.launch.failure import Failure, error_file, is_forgotten
from fullshard.program.launch.local import UNREAD_EXIT_CODE
from fullshard.program.launch.processes import INTERRUPTED_EXIT_CODE, end_with_launcher
from fullshard.program.launch.streams import UnreadOutputError, guard_streams
from fullshard.variables import ATTEMPT_VARIABLE
from fullshard.version import TESTED, untested


def rank_parser(program: str, positional: Mapping[str, type], options: Mapping[str, type]) -> argparse.ArgumentParser:
    """Return the parser of a rank's command line, whose values the verb has checked: types by name."""
    parser = argparse.ArgumentParser(prog=f"python -m fullshard.program.launch.programs.{program}")
    for name, kind in positional.items():
        parser.add_argument(name, type=kind, nargs="*" if name == "overrides" else None)
    for name, kind in options.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind)
    return parser


def run_as_rank(
    parser: argparse.ArgumentParser,
    arguments: Sequence[str] | None,
    work: Callable[..., None],
    *,
    outlives_output: bool = False,
) -> int:
    """Run this process as one rank.

    Args:
        parser: Parses the command line; ``--json`` is added to it.
        arguments: Command line; None: this process's.
        work: The rank's work, called as ``work(options, is_first=…)``; rank 0 is first and reports to the user.
        outlives_output: True if the work continues when its standard output cannot be written.

    Returns:
        Exit code 0, or ``STOPPED_EXIT_CODE`` when a run was stopped and has saved. A failure ends the process here with
        its exit code: leaving the process group in order would wait for ranks that never arrive.
    """
    guard_streams(outlived=outlives_output)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    end_with_launcher()
    rank = int(os.environ["RANK"])
    ENDINGS[:] = [lambda error: _report_failure(error, rank)]
    if rank == 0 and (line := untested(*TESTED)) is not None:
        print(line, file=sys.stderr, flush=True)
    if rank != 0:
        # transformers prints the same on every rank.
        logging.disable_progress_bar()
        logging.set_verbosity_error()
    try:
        work(options, is_first=rank == 0)
        sys.stdout.flush()
    except RunStopped as stopped:
        return _report_stop(Failure.of(stopped, rank), as_json=options.json)
    except UnreadOutputError:
        os._exit(UNREAD_EXIT_CODE)
    except KeyboardInterrupt:
        os._exit(INTERRUPTED_EXIT_CODE)
    except BaseException as error:
        _report_failure(error, rank)
    return 0


def _report_stop(stop: Failure, *, as_json: bool) -> int:
    """Report that the run has saved and stopped, to fullshard's launcher or, under another one, to the user."""
    path = error_file()
    if path is not None:
        stop.write(path)
    if ATTEMPT_VARIABLE not in os.environ and stop.rank == 0:  # torch's agent shows none if a signal ended it
        print(stop.text(), file=sys.stderr, flush=True)
        if as_json:
            print(json.dumps(stop.as_dict()), flush=True)
    return stop.exit_code


def _report_failure(error: BaseException, rank: int) -> None:
    """Report this rank's failure to its launcher or, if that does not show it, to the user; then end the process."""
    failure = Failure.of(error, rank)
    with contextlib.suppress(UnreadOutputError, DataError):  # standard output may have caused the failure
        sys.stdout.flush()
    path, shown = error_file(), not is_forgotten()
    if path is not None:
        try:
            failure.write(path)
        except OSError:  # the disk is full
            shown = False
    if not shown:
        print(f"[rank {failure.rank}] {failure.text()}", file=sys.stderr, flush=True)
    announce_failure(error)
    os._exit(failure.exit_code)
