"""What verbs share."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path
from types import ModuleType
from typing import Any


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of a verb that reads a run file."""
    parser.add_argument("config", metavar="CONFIG", type=Path, help="run file (YAML)")
    parser.add_argument(
        "overrides",
        metavar="key=value",
        nargs="*",
        help="settings over the file's, such as training.learning_rate=1e-4",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON on standard output")


def know_their_parsers(verbs: Any) -> None:
    """Have the options of each verb say, as ``parser``, whose usage is to be shown with an error in them.

    Args:
        verbs: What ``add_subparsers`` returned, with all verbs added.
    """
    for parser in verbs.choices.values():
        parser.set_defaults(parser=parser)


def load_program(name: str) -> ModuleType:
    """The module that does a verb's work, of a room below this one.

    It imports transformers, which takes longer than everything else the command line does, so a verb loads it when it
    is known to run here: ``--help`` and the launcher of ranks do without.

    Args:
        name: Full name of the module.
    """
    return importlib.import_module(name)


def positive(text: str) -> int:
    """The type of an argument that is a whole number of at least 1."""
    return whole_number(text, least=1)


def whole_number(text: str, *, least: int) -> int:
    """A whole number of at least ``least``.

    Raises:
        argparse.ArgumentTypeError: It is none.
    """
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if number < least:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least {least}; got {text!r}")
    return number
