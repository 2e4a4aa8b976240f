"""``fullshard``: the command line, its verbs and its exit codes."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from fullshard.errors import DataError, FullshardError
from fullshard.program.cli import (
    chat,
    config,
    evaluate,
    export,
    init,
    inspect,
    launch,
    plan,
    predict,
    report as report_verb,
    share,
    train,
    verify,
)
from fullshard.program.cli.common import add_verb, set_own_parsers
from fullshard.program.launch import INTERRUPTED_EXIT_CODE, UNREAD_EXIT_CODE, Failure
from fullshard.program.launch.messages import say
from fullshard.program.launch.processes import waits_for_store
from fullshard.program.launch.streams import UnreadOutputError, guard_streams
from fullshard.version import __version__

VERBS = (*(init, train, launch, evaluate, predict, chat, report_verb), *(config, inspect, plan, export, verify, share))
"""The verbs, in the order of the help: each a module with its texts, ``add_arguments`` and ``run``."""

DESCRIPTION = "Train PyTorch models that do not fit on one GPU: shard them, fine-tune them on your data."

EPILOG = """\
examples:
  fullshard train examples/banking77_tiny.yaml training.num_train_epochs=1
  fullshard verify runs/mine
  fullshard export runs/mine --dtype bf16 -o exported

exit codes:
  0 success, 1 unexpected error, 2 settings or command line, 3 data, 4 model, 5 wrapping, 6 sharding,
  7 process group, 8 ranks differ, 9 checkpoint, 10 training diverged, 11 out of memory,
  12 the Hugging Face Hub refused or was not reached,
  70 bug in fullshard, 75 stopped after saving a checkpoint to resume from, 130 interrupted,
  141 the reader of the output is gone, as after | head; train and launch go on without it
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb and return the exit code. ``arguments``: without the program's name; None: this process's."""
    options = parse(arguments)
    try:
        outcome: Failure | int | None = options.run(options)
        sys.stdout.flush()
    except FullshardError as error:
        outcome = Failure.of(error)
    except KeyboardInterrupt:
        say("interrupted; nothing is left running.")
        return INTERRUPTED_EXIT_CODE
    except UnreadOutputError:  # the reader has all that it wanted
        return UNREAD_EXIT_CODE
    return report(outcome, as_json=options.json) if isinstance(outcome, Failure) else outcome or 0


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse a command line. The result's ``run`` is the verb.

    An invalid command line ends the process with exit code 2; an empty one prints the help and ends it with 0.
    """
    parser = make_parser()
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments:
        parser.print_help()
        parser.exit()
    options, rest = parser.parse_known_args(arguments)
    # argparse accepts overrides in one place only, but a user may also add some after an option.
    takes_overrides = hasattr(options, "overrides")
    overrides = [text for text in rest if takes_overrides and "=" in text and not text.startswith("-")]
    if len(overrides) < len(rest):
        options.parser.error(f"unrecognized arguments: {' '.join(text for text in rest if text not in overrides)}")
    if takes_overrides:
        options.overrides = [*options.overrides, *overrides]
    return options


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="fullshard", description=DESCRIPTION, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"fullshard {__version__}")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    for verb in VERBS:
        name = verb.__name__.rpartition(".")[2]
        verb.add_arguments(add_verb(verbs, name, verb.run, verb.SUMMARY, verb.DESCRIPTION, verb.EPILOG))
    set_own_parsers(verbs)
    return parser


def report(failure: Failure, *, as_json: bool) -> int:
    """Print why the command ended: text on standard error, and with ``--json`` also JSON on standard output."""
    print(failure.text(), file=sys.stderr, flush=True)
    if as_json:
        with contextlib.suppress(UnreadOutputError, DataError):  # the exit code says why the command ended
            print(json.dumps(failure.as_dict()), flush=True)
    return failure.exit_code


def entry() -> NoReturn:
    """Run the command line; the entry point of the console script ``fullshard``."""
    guard_streams()
    try:
        try:
            code = main()
        finally:
            sys.stdout.flush()  # --help ends inside
    except UnreadOutputError:
        code = UNREAD_EXIT_CODE
    except DataError as error:
        code = report(Failure.of(error), as_json=False)
    if waits_for_store():
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    entry()
