"""The settings of a finished run, recorded in its ``summary.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fullshard.config.load import check_run, load_run
from fullshard.config.schema import RunConfig
from fullshard.errors import ConfigError

SUMMARY_NAME = "summary.json"


def read_run(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Return the settings of a run file or of a finished run. Any process can call it.

    Args:
        path: A run file, or the output_dir of a finished run, which may have been moved.
        overrides: Overrides of the form ``section.key=value``.

    Raises:
        ConfigError: The settings cannot be read or are wrong, or a file they name is missing.
    """
    if not path.is_dir():
        return load_run(path, overrides)
    return check_run(_recorded(path), path / SUMMARY_NAME, overrides)


def recorded_run(directory: Path) -> RunConfig | None:
    """Return the settings of a finished run, whose data may be gone; None if the directory has none.

    Raises:
        ConfigError: The settings cannot be read.
    """
    if not (directory / SUMMARY_NAME).exists():
        return None
    try:
        return RunConfig.model_validate(_recorded(directory))
    except ValueError as error:
        raise ConfigError(f"The settings in {directory / SUMMARY_NAME} are invalid: {error}") from error


def _recorded(directory: Path) -> Mapping[str, Any]:
    path = directory / SUMMARY_NAME
    if not path.exists():
        raise ConfigError(
            f"{directory} has no {SUMMARY_NAME}: it is not the output_dir of a finished run. Name that, or a run file."
        )
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}.") from error
    values = summary.get("config") if isinstance(summary, dict) else None
    if not isinstance(values, dict):
        raise ConfigError(f"{path} does not contain the settings of the run. Name the run file instead.")
    # Versions without the option put nothing between source and target.
    data = {"separator": "", **values["data"]} if isinstance(values.get("data"), dict) else values.get("data")
    return {**values, "data": data, "output_dir": str(directory)}
