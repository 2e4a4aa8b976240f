"""``fullshard init``: write a first run file for a table."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from fullshard.errors import ConfigError, DataError, ModelError
from fullshard.program.cli.common import add_encoding, ask, load_program, require_model, yes_or_no
from fullshard.program.config import load_run
from fullshard.program.launch import gpu_count

PROGRAM = "fullshard.program.starter"

_MOST_REASONS = 5
_MOST_LINES = 3

SUMMARY = "write a first run file for a table"

DESCRIPTION = """\
Inspect a table and this machine, ask at most four questions, and write a run file with a comment for each choice. It
can be trained as it is. Nothing is downloaded.

DATA is .csv, .tsv, .jsonl, .json or .parquet, with a row for each example, conversation or text, or plain text in a
.txt or .md file. An existing run file is not overwritten without asking.
"""

EPILOG = """\
examples:
  fullshard init train.csv
  fullshard init train.csv --yes --out first.yaml
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument("data", metavar="DATA", type=Path, help="the rows to train on")
    parser.add_argument(
        "-o", "--out", metavar="RUN", type=Path, default=Path("run.yaml"), help="run file to write (default: run.yaml)"
    )
    parser.add_argument(
        "--label-column",
        metavar="NAME",
        help="column that says whether a completion is desirable, or which of two is better (data.label_column)",
    )
    add_encoding(parser, "DATA", "default: UTF-8, or the one that its letters show")
    parser.add_argument("--yes", action="store_true", help="take every default without asking")
    parser.set_defaults(json=False)


def run(options: argparse.Namespace) -> None:
    """Inspect, ask and write; one process."""
    asks, out = not options.yes, options.out
    if asks and not sys.stdin.isatty():
        raise ConfigError(
            "fullshard init asks questions in a terminal, and standard input is not one. Use `fullshard init DATA "
            "--yes` to take every default."
        )
    if not asks and out.exists():
        raise ConfigError(f"{out} exists, and --yes does not overwrite files. Name another file with --out.")
    starter = load_program(PROGRAM)
    machine = starter.this_machine(gpu_count())
    look = starter.look_at(options.data, options.encoding, options.label_column)
    _show(look, machine)
    try:
        if look.equals is not None and (label := _label(look, asks=asks)) is not None:
            look = starter.look_at(options.data, options.encoding, label)
        choice = _choose(starter, look, machine, asks=asks)
        if out.exists() and not ask(f"{out} exists. Overwrite it, yes or no?", "no", yes_or_no):
            raise ConfigError(f"{out} was left unchanged. Name another file with --out.")
    except EOFError:
        raise ConfigError("The input ended before the last question; nothing was written.") from None
    rows = starter.read_rows(look, choice)
    if rows.unused is not None:
        print(rows.unused)
    _show_unusable(rows, look.rows)
    if choice.model == starter.NEW_MODEL and choice.prefers == "labels":
        print("the model starts from random weights, and training.objective: kto is for a model that answers already")
    load_program("fullshard.state.storage").write_text(out, starter.run_file_text(look, machine, choice, rows, out))
    load_run(out)
    print(f"written: {out}\nnext:\n  fullshard config check {out} --dry-run\n  fullshard train {out}")


def _show(look: Any, machine: Any) -> None:
    between = "" if look.delimiter is None else f", cells separated by {look.delimiter!r}"
    print(f"{look.path}: {look.format}{between}, {look.rows:,} rows")
    if look.encoding.example is not None:
        print(f"  {look.encoding.note('data.encoding')}")
    for note in look.notes:
        print(f"  {note.removeprefix(f'{look.path}: ')}")
    if look.turns is not None:
        found = look.preferences
        columns = look.turns if found is None or not found.rejected else f"{look.turns} and {found.rejected}"
        print(f"  {columns}: each row is a conversation")
    for one in look.columns:
        more = " or more" if one.distinct == 1_000 else ""
        print(
            f"  {one.name}: {one.filled:,} filled, mean {one.mean:.0f} characters, longest {one.longest:,}, "
            f"{one.distinct:,}{more} different"
        )
    print(f"this machine: {machine}")


def _show_unusable(rows: Any, total: int) -> None:
    """Print how many rows cannot be used and why, the most frequent reasons first."""
    if not rows.unusable:
        return
    print(f"{rows.unusable:,} of {total:,} rows cannot be used and will be skipped (data.max_bad_rows):")
    reasons = sorted(rows.reasons.items(), key=lambda one: -len(one[1]))
    for reason, lines in reasons[:_MOST_REASONS]:
        first = ", ".join(map(str, lines[:_MOST_LINES])) + (", ..." if len(lines) > _MOST_LINES else "")
        print(f"  {len(lines):,}: {reason} (line{'s' if len(lines) > 1 else ''} {first})")
    if len(reasons) > _MOST_REASONS:
        print(f"  {sum(len(lines) for _, lines in reasons[_MOST_REASONS:]):,}: other reasons")


def _choose(starter: Any, look: Any, machine: Any, *, asks: bool) -> Any:
    """Return columns and model, as defaults or as the user's answers."""
    model, found = machine.at_hand or starter.NEW_MODEL, look.preferences
    if found is not None:
        print(_told_preferences(found))
    if look.turns is not None or (found is not None and not found.sources):
        target = found.target if found is not None and look.turns is None else ""
        return starter.Choice((), target, _ask_model(starter, machine, model) if asks else _told(model), found)
    if look.text is not None:
        others = [one.name for one in look.columns if one.name != look.text]
        about = f"not used: {', '.join(others)}; for rows with a target set data.source_column and data.target_column"
        print(f"plain text: {look.text}" + (f" ({about})" if others else ", the only column"))
        return starter.Choice((look.text,), "", _ask_model(starter, machine, model) if asks else _told(model))
    usual = look.by_name or ((look.likely_source,), look.likely_target)
    names, against = [one.name for one in look.columns], look.speaking_against
    if not asks and against:
        raise DataError(
            f"{look.path}: which columns are source and target? {' and '.join(map(repr, against))} may be meant as no "
            f"target, so --yes does not guess. Its columns: {', '.join(map(repr, names))}. Answer the questions: "
            f"fullshard init {look.path}. Or write a run file with data.source_column and data.target_column."
        )
    if not asks:
        print(f"source: {' and '.join(usual[0])}; target: {usual[1]}; model: {model}")
        return starter.Choice(*usual, model, found)

    def column(text: str) -> str:
        if text not in names:
            raise ValueError(f"Expected one of the columns {', '.join(names)}; got {text!r}.")
        return text

    source = ask("Which column does the model read?", "" if against else usual[0][0], column)
    names.remove(source)
    likely = usual[1] if usual[1] in names else names[-1]
    target = ask("Which column does it write?", "" if against else likely, column)
    model = _ask_model(starter, machine, model)
    kept = (source, target) == (usual[0][0], usual[1])
    return starter.Choice(usual[0] if kept else (source,), target, model, found if kept else None)


def _label(look: Any, *, asks: bool) -> str | None:
    """Return the column that says which of two completions of equal rank is better; None: rows are to be no pairs."""
    likely, both = look.ranking[0] if len(look.ranking) == 1 else "", " and ".join(map(repr, look.equals))
    if not asks:
        listed = ", ".join(map(repr, look.ranking)) or "no column that looks like it"
        example = look.ranking[0] if look.ranking else "NAME"
        raise DataError(
            f"{look.path}: {both} are two answers of equal rank. Which column says which of them is better? There is "
            f"{listed}. --yes does not guess: give it with --label-column, such as --label-column {example} (in a run "
            "file data.label_column), or answer the questions without --yes."
        )
    kinds = ", ".join(look.ranking) or "no likely one"
    question = f"{both} are two answers. Which column says which is better ({kinds}), or no for none?"
    found = ask(question, likely, str)
    return None if found == "no" else found


def _told_preferences(found: Any) -> str:
    """Return a line on what preferences are read from."""
    if found.kind == "labels":
        return f"preferences: {found.label} says whether {found.target} is desirable (training.objective: kto)"
    better = f"{found.target} is preferred to {found.rejected}"
    if found.label is not None:
        better = f"{found.label} says which of {found.target} and {found.rejected} is better"
    return f"preferences: {better}; the prompt is {found.prompt}"


def _ask_model(starter: Any, machine: Any, usual: str) -> str:
    question = f"Model: a directory, an id on the Hub such as {machine.fitting}, or new (a small T5)?"
    return ask(question, usual, lambda text: _model(text, starter.NEW_MODEL))


def _told(model: str) -> str:
    print(f"model: {model}")
    return model


def _model(text: str, new: str) -> str:
    try:
        if text != new:
            require_model(text)
    except ModelError as error:
        raise ValueError(str(error)) from error
    return text
