"""What a run or a model records: settings in ``run.json`` and ``summary.json``, and in the model's own directory.

``fullshard_prompt.json`` holds what decides how a model is asked. It travels with the model, wherever that is copied.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, PositiveInt, ValidationError, model_validator

from fullshard.errors import ConfigError
from fullshard.program.config.load import check_run, load_run
from fullshard.program.config.schema import RunConfig, option_of
from fullshard.program.metrics import metric_of

SUMMARY_NAME = "summary.json"
"""File with the result of a finished run."""

RUN_NAME = "run.json"
"""File with the facts known at the start of a run."""

_OWN = ("best", "last")
"""Subdirectories in which a run keeps models of its own."""

PROMPT_NAME = "fullshard_prompt.json"
"""File in the directory of a model, of an adapter, and of each checkpoint's small files."""

_VERSION = 1
_SHOWN = 60
_ROWS_A_LABEL = 10
_LABEL_CHARACTERS = 100

# Nothing that names a file, a machine or an account: the file is published with the model.
_SECTIONS = ("model", "data", "training", "evaluation")
_CLEANED = "wikihow"
"""The format whose articles are cleaned before they are asked. Others say only how the run's own files were read."""


def _known_encoding(name: str) -> str:
    try:
        return codecs.lookup(name).name
    except LookupError as error:
        raise ValueError(f"{error}") from error


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")


class _Turn(_Part):
    role: str
    content: str


class _Data(_Part):
    sets: dict[str, dict[str, Any]] | None = None
    encoding: Annotated[str, AfterValidator(_known_encoding)] = "utf-8"


class _Content(_Part):
    """The types of the file's parts, which may be anyone's; the settings are checked as those of a run file."""

    model: dict[str, Any] | None = None
    data: _Data | None = None
    training: dict[str, Any] | None = None
    evaluation: dict[str, Any] | None = None
    conversations: bool = False
    system_turns: dict[str, list[_Turn] | None] | None = None
    labels: dict[str, PositiveInt] | None = None

    @model_validator(mode="after")
    def _has_sets(self) -> Self:
        if self.conversations and self.system_turns == {}:
            raise ValueError("system_turns is empty, but conversations is true: expected the name of each set")
        return self


def prompt_text(
    config: RunConfig,
    system_turns: Mapping[str, Sequence[Mapping[str, Any]] | None] | None,
    labels: Mapping[str, int] | None = None,
    *,
    conversations: bool,
) -> str:
    """Return the content of the file; any process.

    Args:
        config: The run's settings, with the separator that was chosen.
        system_turns: The system's turns of each set of conversations; None: not recorded.
        labels: The distinct targets with the number of training rows of each; None: not known. They are kept for
            ``accuracy``, and only if they are a label set: others may be people's sentences.
        conversations: Whether the training rows are conversations.
    """
    plain = config.model_dump(mode="json", by_alias=True)
    kept: dict[str, Any] = {section: _kept_of(section, plain[section]) for section in _SECTIONS}
    kept["data"]["sets"] = {
        name: {key: value for key, value in _kept_of("data.sets.*", one).items() if value is not None}
        for name, one in plain["data"]["sets"].items()
    }
    for one in (kept["data"], *kept["data"]["sets"].values()):
        if one.get("format", _CLEANED) != _CLEANED:
            one["format"] = "auto"
    kept |= {"fullshard_prompt": _VERSION, "conversations": conversations, "system_turns": system_turns}
    measured = any(metric_of(name).confusion for name in config.evaluation.every_metric)
    if labels and measured and _is_label_set(labels):
        kept["labels"] = dict(labels)
    # Not sorted: of equally frequent labels the first one is the baseline's.
    return json.dumps(kept, indent=2, ensure_ascii=False) + "\n"


def _kept_of(section: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a section that travel with a model."""
    # A dotted name, which only a file of another program has, would be taken for a part of an option.
    return {name: value for name, value in values.items() if "." not in name and option_of(f"{section}.{name}").travels}


def _is_label_set(counts: Mapping[str, int]) -> bool:
    """Return True if targets are short, and each is repeated: the file is published, and texts of rows are not."""
    repeated = min(counts.values()) >= 2 and sum(counts.values()) >= _ROWS_A_LABEL * len(counts)
    return repeated and max(map(len, counts)) <= _LABEL_CHARACTERS


def read_prompt(directory: Path) -> Mapping[str, Any] | None:
    """Return the content of the file of a model's directory; None if there is none. Any process.

    Raises:
        ConfigError: It cannot be read, a later version wrote it, or a part of it has another type.
    """
    path = directory / PROMPT_NAME
    if not path.is_file():
        return None
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read: {error}.") from error
    version = values.get("fullshard_prompt") if isinstance(values, dict) else None
    if version != _VERSION:
        raise ConfigError(
            f"{path} has version {version!r} and this fullshard reads {_VERSION}: update fullshard, or remove the file "
            "and give the prompt's format on the command line."
        )
    try:
        _Content.model_validate(values)
    except ValidationError as error:
        problems = [
            f"  {'.'.join(map(str, one['loc'])) or 'the file'}: {one['msg']}; got {str(one['input'])[:_SHOWN]!r}"
            for one in error.errors()
        ]
        remedy = "Download the model again, or remove the file and give the prompt's format on the command line."
        raise ConfigError(
            "\n".join([f"{path} is damaged, or fullshard did not write it:", *problems, remedy])
        ) from error
    return values


def prompt_settings(directory: Path, rows: Path | None = None, overrides: Sequence[str] = ()) -> RunConfig | None:
    """Return the settings under which a model is asked; None if its directory has no such file. Any process.

    Args:
        directory: Directory of a model or an adapter.
        rows: File of rows to evaluate on; None: the settings name no data.
        overrides: Overrides of the form ``section.key=value``.

    Raises:
        ConfigError: The file cannot be read, or a value in it or an override is wrong.
    """
    found = read_prompt(directory)
    if found is None:
        return None
    # Only what this version writes is read: the file may be anyone's.
    values: dict[str, Any] = {section: _kept_of(section, found.get(section) or {}) for section in _SECTIONS}
    origin = {"train_file": "-" if rows is None else str(rows.absolute())}
    sets = (found.get("data") or {}).get("sets") or {}
    own = {name: _kept_of("data.sets.*", one) for name, one in sets.items()}
    values["data"] |= {"sets": {name: one | origin for name, one in own.items()}} if own else origin
    values["model"]["path"] = str(directory)
    values["training"]["eval_strategy"] = "no"
    values["output_dir"] = str(directory)
    path = directory / PROMPT_NAME
    if rows is not None or overrides:
        return check_run(values, path, overrides)
    try:
        return RunConfig.model_validate(values)
    except ValueError as error:
        raise ConfigError(f"The settings in {path} are invalid: {error}") from error


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
    # Versions without these options put nothing between source and target, and held rows out by their sources alone.
    earlier, data = {"separator": "", "held_out_by": "source"}, values.get("data")
    return {**values, "data": {**earlier, **data} if isinstance(data, dict) else data, "output_dir": str(directory)}


def _read_object(path: Path) -> Mapping[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}.") from error
    return values if isinstance(values, dict) else {}
