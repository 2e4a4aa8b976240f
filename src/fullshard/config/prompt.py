"""``fullshard_prompt.json``: what decides how a model is asked. It travels with the model, wherever that is copied."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fullshard.config.load import check_run
from fullshard.config.schema import RunConfig
from fullshard.errors import ConfigError

PROMPT_NAME = "fullshard_prompt.json"
"""File in the directory of a model, of an adapter, and of each checkpoint's small files."""

_VERSION = 1

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
        labels: The label set of ``accuracy`` with the number of training rows of each; None: not known.
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
    if labels is not None and "accuracy" in (config.evaluation.metric, *config.evaluation.metrics):
        kept["labels"] = dict(labels)
    # Not sorted: of equally frequent labels the first one is the baseline's.
    return json.dumps(kept, indent=2, ensure_ascii=False) + "\n"


def _kept_format(name: str) -> str:
    return name if name == _CLEANED else "auto"


def read_prompt(directory: Path) -> Mapping[str, Any] | None:
    """Return the content of the file of a model's directory; None if there is none. Any process.

    Raises:
        ConfigError: It cannot be read, or a later version wrote it.
    """
    path = directory / PROMPT_NAME
    if not path.is_file():
        return None
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}.") from error
    version = values.get("fullshard_prompt") if isinstance(values, dict) else None
    if version != _VERSION:
        raise ConfigError(
            f"{path} has version {version!r} and this fullshard reads {_VERSION}: update fullshard, or remove the file "
            "and give the prompt's format on the command line."
        )
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
    values["data"] |= {"sets": {name: {**one, **origin} for name, one in sets.items()}} if sets else origin
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
