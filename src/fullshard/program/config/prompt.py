"""``fullshard_prompt.json``: what decides how a model is asked. It travels with the model, wherever that is copied."""

from __future__ import annotations

import codecs
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, PositiveInt, ValidationError, model_validator

from fullshard.errors import ConfigError
from fullshard.program.config.load import check_run
from fullshard.program.config.schema import RunConfig

PROMPT_NAME = "fullshard_prompt.json"
"""File in the directory of a model, of an adapter, and of each checkpoint's small files."""

_VERSION = 1
_SHOWN = 60
_ROWS_A_LABEL = 10
_LABEL_CHARACTERS = 100

# Nothing that names a file, a machine or an account: the file is published with the model.
_COLUMNS = ("source_column", "target_column", "template", "source_prefix")
_KEPT: Mapping[str, tuple[str, ...]] = {
    "model": ("class", "attn_implementation"),
    "data": (
        *_COLUMNS,
        "format",
        "target_lists",
        "train_on",
        "chat_template",
        "separator",
        "max_source_length",
        "max_target_length",
        "encoding",
    ),
    "training": ("precision", "per_device_eval_batch_size"),
    "evaluation": (
        "metric",
        "metrics",
        "lead_sentences",
        "max_new_tokens",
        "min_new_tokens",
        "num_beams",
        "length_penalty",
        "no_repeat_ngram_size",
    ),
}
_OF_A_SET = (*_COLUMNS, "format")
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
    kept: dict[str, Any] = {section: {name: plain[section][name] for name in names} for section, names in _KEPT.items()}
    kept["data"]["format"] = _kept_format(plain["data"]["format"])
    kept["data"]["sets"] = {
        name: {key: one[key] for key in _OF_A_SET if one[key] is not None}
        for name, one in plain["data"]["sets"].items()
    }
    for one in kept["data"]["sets"].values():
        if "format" in one:
            one["format"] = _kept_format(one["format"])
    kept |= {"fullshard_prompt": _VERSION, "conversations": conversations, "system_turns": system_turns}
    measured = "accuracy" in (config.evaluation.metric, *config.evaluation.metrics)
    if labels and measured and _is_label_set(labels):
        kept["labels"] = dict(labels)
    # Not sorted: of equally frequent labels the first one is the baseline's.
    return json.dumps(kept, indent=2, ensure_ascii=False) + "\n"


def _is_label_set(counts: Mapping[str, int]) -> bool:
    """Return True if targets are short, and each is repeated: the file is published, and texts of rows are not."""
    repeated = min(counts.values()) >= 2 and sum(counts.values()) >= _ROWS_A_LABEL * len(counts)
    return repeated and max(map(len, counts)) <= _LABEL_CHARACTERS


def _kept_format(name: str) -> str:
    return name if name == _CLEANED else "auto"


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
    values: dict[str, Any] = {
        section: {key: value for key, value in (found.get(section) or {}).items() if key in names}
        for section, names in _KEPT.items()
    }
    origin = {"train_file": "-" if rows is None else str(rows.absolute())}
    sets = (found.get("data") or {}).get("sets") or {}
    own = {name: {key: one[key] for key in _OF_A_SET if key in one} for name, one in sets.items()}
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
