"""The questionnaire of ``fullshard config`` in a terminal."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.markup import escape

from fullshard.cli.common import load_program
from fullshard.compat.accelerate_config.file import AccelerateFile, read_accelerate_file
from fullshard.compat.accelerate_config.questions import (
    LAYER_CLASSES,
    MODEL,
    QUESTIONS,
    Answers,
    Machine,
    Question,
    default_answers,
    pick_classes,
    this_machine,
)
from fullshard.compat.accelerate_config.write import file_text, next_commands, summary
from fullshard.errors import ConfigError, ModelError
from fullshard.launch import gpu_count

CLASSES_PROGRAM = "fullshard.compat.accelerate_config.model_classes"
DEFAULT_PATH = Path("fsdp_config.yaml")
"""Default path of the file: next to the user's script, not in Accelerate's cache."""

MOST_OFFERED = 9
"""Maximum number of layer classes listed as choices."""


def run_questions(path: Path, *, ask: bool, as_json: bool) -> None:
    """Ask, write the file, and print what it means; one process.

    Args:
        path: The file to write.
        ask: Whether to ask; otherwise every answer is the default.
        as_json: Whether to print the result as JSON on standard output, and the questions on standard error.

    Raises:
        ConfigError: Standard input is not a terminal, it ended, or the file cannot be written. Nothing is written.
        KeyboardInterrupt: Ctrl-C; nothing is written.
    """
    console = Console(stderr=as_json, highlight=False, soft_wrap=True)
    machine = _machine()
    if ask:
        _require_terminal()
        try:
            answers = _Dialogue(console, machine).answers(path)
        except EOFError:
            raise ConfigError("The input ended before the last question; nothing was written.") from None
    else:
        _require_new(path)
        answers = default_answers(machine)
    _write(path, file_text(answers))
    file = read_accelerate_file(path)
    if as_json:
        print(json.dumps(_as_dict(file)))
    else:
        _show(console, file)


def _machine() -> Machine:
    gpus = gpu_count()
    return this_machine(gpus, bf16=gpus > 0 and load_program("torch").cuda.is_bf16_supported())


def _require_terminal() -> None:
    if not sys.stdin.isatty():
        raise ConfigError(
            "fullshard config asks questions in a terminal, and standard input is not one. Use `fullshard config "
            "--default` to write the defaults without asking."
        )


def _require_new(path: Path) -> None:
    if path.exists():
        raise ConfigError(
            f"{path} exists, and --default does not overwrite files. Name another file with --config_file, or remove "
            "it first."
        )


def _write(path: Path, text: str) -> None:
    """Write the file atomically.

    Raises:
        ConfigError: The file cannot be written.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise ConfigError(f"{path} cannot be written: {error}.") from error


def _as_dict(file: AccelerateFile) -> dict[str, Any]:
    return {
        "path": str(file.path),
        "config": yaml.safe_load(file.path.read_text(encoding="utf-8")),
        "meaning": summary(file),
        "next": next_commands(file),
    }


def _show(console: Console, file: AccelerateFile) -> None:
    console.print(f"\n[bold]{escape(str(file.path))}[/bold]")
    console.print(file.path.read_text(encoding="utf-8"), markup=False)
    console.print("[bold]What it means[/bold]")
    for sentence in summary(file):
        console.print(f"- {sentence}", markup=False)
    console.print("\n[bold]Next[/bold]")
    for command in next_commands(file):
        console.print(f"  {command}", markup=False)


class _Dialogue:
    """The questions, asked on a console."""

    def __init__(self, console: Console, machine: Machine) -> None:
        self.console = console
        self.machine = machine
        self.offered: list[str] = []
        self.usual: tuple[str, ...] = ()
        self.described: dict[str, str] = {}

    def answers(self, path: Path) -> Answers:
        """Ask every question and return the answers.

        Raises:
            ConfigError: The file exists and the user keeps it.
            EOFError: The input ended.
        """
        self.console.print(
            f"Your answers are written to {escape(str(path))}. Enter accepts the default in \\[brackets], ? explains a "
            "question, Ctrl-C exits without writing.\n"
        )
        if path.exists() and not self._overwrite(path):
            raise ConfigError(f"{path} was left unchanged. Name another file with --config_file.")
        given: dict[str, Any] = {}
        for question in QUESTIONS:
            if question.asked(given):
                given[question.key] = self._ask(question, given)
        return given

    def _overwrite(self, path: Path) -> bool:
        question = next(question for question in QUESTIONS if question.key == "use_cpu")
        while True:
            text = self.console.input(f"{escape(str(path))} exists. Overwrite it? \\[no]: ").strip()
            try:
                return bool(text) and question.parse(text, {}, self.machine)
            except ValueError as error:
                self._print_rule(text, error)

    def _ask(self, question: Question, given: Answers) -> Any:
        default = question.default(given, self.machine)
        if question.key == LAYER_CLASSES and self.usual:
            default = self.usual
        self.console.print(f"[bold]{escape(question.text)}[/bold]")
        self._list(question)
        while True:
            shown = "" if default is None else f"\\[{escape(_shown(default))}] "
            text = self.console.input(f"  {shown}({escape(question.reason)}): ").strip()
            if not text and default is not None:
                return default
            if text == "?":
                self.console.print(question.explain, markup=False)
                continue
            try:
                return self._parse(question, text, given)
            except (ValueError, ModelError) as error:
                self._print_rule(text, error)

    def _list(self, question: Question) -> None:
        """Print the numbered choices."""
        choices: Sequence[tuple[str, str]] = question.choices
        for number, (name, text) in enumerate(choices, start=1):
            self.console.print(f"  [cyan]{number} {name}[/cyan]: {escape(text)}")
        if question.key == LAYER_CLASSES:
            for number, name in enumerate(self.offered, start=1):
                self.console.print(f"  [cyan]{number} {name}[/cyan]: {self.described[name]}")

    def _parse(self, question: Question, text: str, given: Answers) -> Any:
        if question.key == MODEL:
            self._find_classes(text)
        if question.key == LAYER_CLASSES:
            return pick_classes(text, self.offered)
        return question.parse(text, given, self.machine)

    def _find_classes(self, path_or_id: str) -> None:
        """Find the layer classes to list as choices.

        Raises:
            ModelError: There is no such model on this machine.
        """
        found = load_program(CLASSES_PROGRAM).layer_classes(path_or_id)[:MOST_OFFERED]
        self.offered = [layer.name for layer in found]
        self.usual = tuple(layer.name for layer in found if layer.repeated)
        self.described = {
            layer.name: f"{layer.count} modules, {layer.numel:,} parameters each"
            + (", the model's repeated blocks" if layer.repeated else "")
            for layer in found
        }

    def _print_rule(self, text: str, error: Exception) -> None:
        rule = f"{error}" if isinstance(error, ModelError) else f"Expected {error}; got {text!r}."
        self.console.print(rule, style="red", markup=False)


def _shown(value: Any) -> str:
    """Return a default as the user would type it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return ",".join(value) or "the model's repeated blocks"
    return str(value) or "skip"
