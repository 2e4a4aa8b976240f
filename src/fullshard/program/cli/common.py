"""Code shared by the verbs: their parsers, the program behind a verb, starting it as ranks, and progress bars."""

from __future__ import annotations

import argparse
import importlib
import math
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Self

from rich.progress import DownloadColumn, ProgressColumn, Task, TaskProgressColumn
from rich.text import Text

from fullshard.errors import ModelError
from fullshard.program.config.load import HUB_ID
from fullshard.program.launch import NO_NOTICE, Failure, Notice, launch, launched_elsewhere, rank_command
from fullshard.program.launch.messages import say
from fullshard.program.launch.progress import WorkProgress
from fullshard.sizes import format_bytes

Verb = Callable[[argparse.Namespace], Failure | int | None]
"""Runs a verb with its parsed command line; returns the exit code, or why a rank failed or the run stopped.

It raises UserError if settings, files, data or the model cannot be used. Under torchrun it is one of the ranks, and
ends by SystemExit with the rank's exit code.
"""


def add_verb(verbs: Any, name: str, run: Verb, summary: str, description: str, epilog: str) -> argparse.ArgumentParser:
    """Add a verb's parser to those of ``add_subparsers`` and return it; ``summary`` is its line in the list."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = verbs.add_parser(name, help=summary, description=description, epilog=epilog, formatter_class=raw)
    parser.set_defaults(run=run)
    return parser


def add_json(parser: argparse.ArgumentParser, **more: Any) -> None:
    """Add ``--json``."""
    parser.add_argument(
        "--json", action="store_true", **{"help": "print the result as JSON on standard output", **more}
    )


def add_encoding(
    parser: argparse.ArgumentParser,
    file: str,
    usual: str = "default: the run's data.encoding; if that is utf-8: the one that the file shows",
) -> None:
    """Add the encoding of a file of rows; ``usual`` says which it is if it is not given."""
    parser.add_argument("--encoding", metavar="NAME", type=encoding, help=f"encoding of {file} ({usual})")


def encoding(text: str) -> str:
    """Return the name of an encoding; a ``type`` of argparse."""
    try:
        "a".encode(text)
    except LookupError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not an encoding of Python, such as windows-1252") from error
    return text


def add_system(parser: argparse.ArgumentParser) -> None:
    """Add the system turn that plain text follows."""
    parser.add_argument(
        "--system",
        metavar="TEXT",
        help="conversations: the system turn before plain text, '' for none (default: the one that at least 95 %% of "
        "the run's training rows have)",
    )


def add_prompt(parser: argparse.ArgumentParser, of: str) -> None:
    """Add how a trained model is asked for texts, such as a prediction or an answer."""
    parser.add_argument("--num-beams", metavar="N", type=positive, help="width of the beam search (default: the run's)")
    parser.add_argument(
        "--max-new-tokens", metavar="N", type=positive, help=f"maximum tokens per {of} (default: the run's)"
    )
    parser.add_argument("--prefix", metavar="TEXT", help="text put before each source (default: the run's)")
    parser.add_argument(
        "--separator", metavar="TEXT", help="causal models: text put after each source (default: the run's, or none)"
    )


def add_overrides(parser: argparse.ArgumentParser, help_text: str) -> None:
    """Add the settings that override those of a run file or a finished run."""
    # Without a default argparse lists the argument as required.
    parser.add_argument("overrides", metavar="key=value", nargs="*", default=[], help=help_text)


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of a verb that reads a run file."""
    parser.add_argument("config", metavar="CONFIG", type=Path, help="run file (YAML)")
    add_overrides(
        parser, "override a setting of the run file, such as training.learning_rate=1e-4; key=null unsets one"
    )
    add_json(parser)


def set_own_parsers(verbs: Any) -> None:
    """Set ``parser`` in each verb's parsed options to its own parser, whose usage an error prints."""
    for parser in verbs.choices.values():
        parser.set_defaults(parser=parser)


def load_program(name: str) -> ModuleType:
    """Import the module that does a verb's work.

    The module imports transformers, which takes longer than the rest of the command line. ``--help`` and the process
    that starts the ranks do not need it.
    """
    return importlib.import_module(name)


def join_other_launcher(program: str, arguments: Sequence[str]) -> None:
    """Run the module ``program`` in this process if torchrun started it as a rank; return otherwise.

    Raises:
        SystemExit: Under torchrun, with the rank's exit code.
    """
    if launched_elsewhere():
        sys.exit(load_program(program).main(arguments))


def rank_flags(options: argparse.Namespace, *names: str) -> list[str]:
    """Return the options that are set, for a rank's command line."""
    given = [(f"--{name.replace('_', '-')}", getattr(options, name)) for name in names]
    return [
        flag if value is True else f"{flag}={value}"
        for flag, value in given
        if value is not None and value is not False
    ]


def start_ranks(
    program: str,
    arguments: Sequence[str],
    nproc: int,
    *,
    saves: bool,
    max_restarts: int = 0,
    notice: Notice = NO_NOTICE,
) -> Failure | None:
    """Start the ranks of a verb on this machine and wait for them.

    Args:
        program: Full name of the module that runs a rank.
        arguments: The rank's command line.
        nproc: Number of ranks.
        saves: True if ranks save a checkpoint when they are stopped.
        max_restarts: How often to start all ranks again after one was lost.
        notice: Further ways to request a stop, and the time limit after a request.

    Returns:
        None on success, otherwise why the first failing rank failed or that the run was stopped.
    """
    say(f"starting {nproc} rank{'s' if nproc > 1 else ''}; importing torch and transformers takes some seconds")
    return launch(rank_command(program, arguments), nproc=nproc, saves=saves, max_restarts=max_restarts, notice=notice)


def ask(question: str, usual: str, parse: Callable[[str], Any]) -> Any:
    """Ask until the answer is valid; an empty answer means the default, unless that is empty."""
    default = f" [{usual}]" if usual else ""
    while True:
        try:
            return parse(input(f"{question}{default}: ").strip() or usual)
        except ValueError as error:
            print(error)


def yes_or_no(text: str) -> bool:
    """Parse an answer to :func:`ask`."""
    if text.lower() not in ("yes", "y", "no", "n"):
        raise ValueError(f"Expected yes or no; got {text!r}.")
    return text.lower().startswith("y")


def require_model(name: str) -> None:
    """Refuse the path of a model that does not exist, before ranks start or the Hub is contacted; one process.

    A name is a path, not an id on the Hub, if it does not look like an id or its parent directory exists here.

    Raises:
        ModelError: There is nothing at the path.
    """
    path = Path(name)
    inside = path.parent != Path() and path.parent.is_dir()
    if path.exists() or (HUB_ID.fullmatch(name) and not inside):
        return
    others = sorted(one.name for one in path.parent.iterdir() if one.is_dir()) if path.parent.is_dir() else []
    listed = f" Directories in {path.parent}: {', '.join(others)}." if others else ""
    raise ModelError(f"There is no {path}: give the directory of a model or of a run, or an id on the Hub.{listed}")


def add_base(parser: argparse.ArgumentParser) -> None:
    """Add ``--base``."""
    parser.add_argument(
        "--base",
        metavar="DIR",
        type=Path,
        help="where an adapter's quantised base model is now; its files must be those of the training (default: where "
        "they were)",
    )


def describe_base(base: Mapping[str, str]) -> str:
    """Describe the base model that a checkpoint names instead of containing it."""
    return f"{base['name']} ({base['content']}), not in the checkpoint, quantised: {base['quantisation']}"


def path_or_url(text: str) -> Path | str:
    """Parse a path, or a checkpoint's URL in an object store, which pathlib would mangle."""
    return text if "://" in text else Path(text)


def positive(text: str) -> int:
    """Parse an argument that is a whole number of at least 1."""
    return whole_number(text, least=1)


def amount(text: str) -> float:
    """Parse an argument that is a number of at least 0."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number of at least 0; got {text!r}")
    return number


def whole_number(text: str, *, least: int) -> int:
    """Parse a whole number of at least ``least``."""
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if number < least:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least {least}; got {text!r}")
    return number


_LONG_BYTES = 64 << 20


class ByteProgress(WorkProgress):
    """A progress bar called with bytes done and in total; shown at once for more than 64 MiB."""

    def is_long(self, total: int) -> bool:
        """Return True if the work is long enough for a bar."""
        return total > _LONG_BYTES or super().is_long(total)

    def amount(self, done: int, total: int) -> str:
        """Return what is done, for a line."""
        return f"{format_bytes(done)} of {format_bytes(total)}"

    def columns(self) -> tuple[ProgressColumn, ...]:
        """Return the columns between the bar and the remaining time."""
        return (DownloadColumn(binary_units=True), _Speed())


class ShareProgress(WorkProgress):
    """A progress bar over several pieces of work, one after the other; shows the completed share.

    Attributes:
        pieces: Number of pieces.
        piece: Number of the current piece, from 0.
    """

    def __init__(self, what: str, pieces: int, *, shown: bool) -> None:
        """Start without a bar, before the first piece."""
        super().__init__(what, shown=shown)
        self.pieces, self.piece = pieces, 0
        self._share = 0.0

    def __call__(self, done: int, total: int) -> None:
        """Update the bar: ``done`` of ``total`` of the current piece, which may be done several times."""
        self._share = max(self._share, (self.piece + done / total) / self.pieces)  # a bar does not go back
        super().__call__(round(self._share * self.pieces * total), self.pieces * total)

    def amount(self, done: int, total: int) -> str:
        """Return what is done, for a line."""
        return f"{done / total:.0%}"

    def columns(self) -> tuple[ProgressColumn, ...]:
        """Return the columns between the bar and the remaining time."""
        return (TaskProgressColumn(),)


class NeverSilent:
    """Context that says every two seconds, from another thread, what is still being done; for work without a bar."""

    EVERY_S = 2.0

    def __init__(self, what: str) -> None:
        """Begin with ``what``, such as ``importing torch``."""
        self._over, self._begun = threading.Event(), time.monotonic()
        self._what = self._said = what
        self._thread = threading.Thread(target=self._tick, name="never silent", daemon=True)

    def now(self, what: str) -> None:
        """Say what is done from now on, at once."""
        say(what)
        self._what, self._begun = what.partition(":")[0], time.monotonic()

    def __enter__(self) -> Self:
        """Start the thread."""
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        """End it."""
        self._over.set()
        self._thread.join()

    def _tick(self) -> None:
        while not self._over.wait(self.EVERY_S):
            say(f"{self._what}: {time.monotonic() - self._begun:.0f} s")


class _Speed(ProgressColumn):
    """The rate in binary units; rich's own column has decimal units only."""

    def render(self, task: Task) -> Text:
        """Return the rate of the last seconds, or of the finished task."""
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{format_bytes(speed)}/s", style="progress.data.speed")
