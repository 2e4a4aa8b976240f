"""The settings that a run records in ``run.json`` and, when finished, in ``summary.json``; those of a model without."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fullshard.errors import ConfigError
from fullshard.program.config.load import check_run, load_run
from fullshard.program.config.prompt import PROMPT_NAME, prompt_settings, prompt_text, read_prompt
from fullshard.program.config.schema import RunConfig

SUMMARY_NAME = "summary.json"
"""File with the result of a finished run."""

RUN_NAME = "run.json"
"""File with the facts known at the start of a run."""

_OWN = ("best", "last")
"""Subdirectories in which a run keeps models of its own."""


def read_run(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Return the settings of a run file or of a finished run. Any process can call it.

    Args:
        path: A run file, or the output_dir of a finished run, which may have been moved.
        overrides: Overrides of the form ``section.key=value``.

    Raises:
        ConfigError: The settings cannot be read or are wrong, or a file they name is missing.
    """
    if not path.exists():
        raise ConfigError(f"There is no {path}: give a run file (YAML), or the output_dir of a finished run.")
    if not path.is_dir():
        return load_run(path, overrides)
    try:
        return check_run(_recorded(path / SUMMARY_NAME), path / SUMMARY_NAME, overrides)
    except ConfigError as error:
        base = recorded_base(path)
        if base is None or any(override.startswith("model.path=") for override in overrides):
            raise
        raise ConfigError(
            f"{error}\nThe run trained an adapter over the quantised base model {base['name']}. If it was moved, "
            "give the directory where it is now: --base DIR."
        ) from error


def read_evaluated(path: Path, rows: Path | None, overrides: Sequence[str] = ()) -> RunConfig:
    """Return the settings of :func:`read_run`, or of a model without its run, which names no rows. Any process.

    Args:
        path: A run file, the output_dir of a finished run, or the directory of a model.
        rows: File of rows to evaluate on; None: those of the run.
        overrides: Overrides of the form ``section.key=value``.

    Raises:
        ConfigError: As from :func:`read_run`, or a model without its run is to be evaluated without rows.
    """
    if (path / SUMMARY_NAME).exists() or read_prompt(path) is None:
        return read_run(path, overrides)
    if rows is None:
        raise ConfigError(f"{path} is a model without its run, which has no held-out rows: name some with --data FILE.")
    config = prompt_settings(path, rows, overrides)
    assert config is not None, "there is a file"
    return config


def run_of(directory: Path) -> Path | None:
    """Return the output_dir of the run that a model belongs to; None if it belongs to none. Any process.

    It is the directory itself if a run has finished in it, otherwise its parent: a run keeps its best model so far in a
    subdirectory. Of a model that was exported or downloaded it is its directory, with what travels with the model, also
    if that is inside of the directory of another run.

    Raises:
        ConfigError: The record of the run around it cannot be read.
    """
    if (directory / SUMMARY_NAME).exists():
        return directory
    place = directory.resolve()
    has_prompt = (directory / PROMPT_NAME).is_file()
    if has_prompt and place.name not in _OWN:
        return directory
    path = place.parent / RUN_NAME
    if path.is_file() and "config" in _read_object(path):
        return place.parent
    return directory if has_prompt else None


def recorded_run(directory: Path) -> RunConfig | None:
    """Return the settings of the run that a model belongs to, whose data may be gone; None if it belongs to none.

    Raises:
        ConfigError: The settings cannot be read.
    """
    run = run_of(directory)
    if run is None:
        return None
    if run == directory and not (run / SUMMARY_NAME).exists():
        return prompt_settings(directory)
    path = run / (SUMMARY_NAME if run == directory else RUN_NAME)
    try:
        return RunConfig.model_validate(_recorded(path))
    except ValueError as error:
        raise ConfigError(f"The settings in {path} are invalid: {error}") from error


@dataclass(frozen=True)
class RecordedTurns:
    """What a run recorded of the conversations that it was trained on."""

    system: tuple[Mapping[str, Any], ...] | None  # the system's turns that they begin with; None: they differ
    known: bool = True  # False if the run's version did not record ``system``


def recorded_turns(run: Path, name: str | None) -> RecordedTurns | None:
    """Return what a run recorded of its conversations; None if its training rows were none, or it did not record it.

    Args:
        run: The result of :func:`run_of`.
        name: The set of a mixture; None: the run's only set.

    Raises:
        ConfigError: Its record cannot be read.
    """
    values = _read_object(run / RUN_NAME) if (run / RUN_NAME).exists() else read_prompt(run) or {}
    if not values.get("conversations"):
        return None
    sets = values.get("system_turns")
    if not sets:
        return RecordedTurns(None, known=False)
    name = next(iter(sets)) if name is None else name
    if name not in sets:
        return None
    return RecordedTurns(None if sets[name] is None else tuple(sets[name]))


def recorded_prompt(run: Path) -> str | None:
    """Return the content of ``fullshard_prompt.json`` for a finished run, whose version may not have written it.

    Any process; None if there is no run.

    Raises:
        ConfigError: Its record cannot be read.
    """
    config = recorded_run(run)
    if config is None:
        return None
    values = _read_object(run / RUN_NAME) if (run / RUN_NAME).exists() else {}
    return prompt_text(config, values.get("system_turns"), conversations=bool(values.get("conversations")))


def recorded_base(directory: Path) -> Mapping[str, str] | None:
    """Return the recorded quantised base model of the adapter in a directory; None if there is none.

    Earlier versions did not record it.

    Raises:
        ConfigError: The record cannot be read.
    """
    run = run_of(directory)
    path = None if run is None else run / RUN_NAME
    return _read_object(path).get("base") if path is not None and path.exists() else None


def _recorded(path: Path) -> Mapping[str, Any]:
    """Return the settings in a run's file, with its current directory as output_dir: the run may have been moved."""
    directory = path.parent
    if not path.exists():
        raise ConfigError(
            f"{directory} has no {path.name}: it is not the output_dir of a finished run. Name that, or a run file."
        )
    values = _read_object(path).get("config")
    if not isinstance(values, dict):
        raise ConfigError(f"{path} does not contain the settings of the run. Name the run file instead.")
    # Versions without the option put nothing between source and target.
    data = {"separator": "", **values["data"]} if isinstance(values.get("data"), dict) else values.get("data")
    return {**values, "data": data, "output_dir": str(directory)}


def _read_object(path: Path) -> Mapping[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}.") from error
    return values if isinstance(values, dict) else {}
