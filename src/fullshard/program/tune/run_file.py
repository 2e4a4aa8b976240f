"""A tuning's choice in the user's run file: few lines are changed or added, and comments and order stay."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from fullshard.errors import CheckpointError, ConfigError
from fullshard.program.config import RunConfig
from fullshard.program.config.load import check_run
from fullshard.program.train.setup.tuned import Setting
from fullshard.state.storage import write_text


def changes(setting: Setting, config: RunConfig) -> dict[str, Any]:
    """Return the options whose value the run file must be given for a setting, by dotted key."""
    now = config.as_flat()
    found = {name: value for name, value in setting.values.items() if now[name] != value}
    if set(setting.ways) == set(config.ways):  # in another order, or by training.torch_compile
        found.pop("speed.ways", None)
    return found


def write_choice(path: Path, values: Mapping[str, Any], overrides: Sequence[str] = ()) -> None:
    """Write options into a run file, atomically; one rank. ``overrides`` are those of the command line.

    Raises:
        ConfigError: The file cannot be edited so that only these options change; the text has what to add.
    """
    path = path.resolve()
    try:
        mode = path.stat().st_mode
        if not (mode & 0o222 and os.access(path, os.W_OK)):  # renaming would replace it all the same
            raise ValueError("it is read-only")
        with path.open(encoding="utf-8", newline="") as file:  # line ends stay as they are
            text = file.read()
        before = yaml.safe_load(text)
        new = edited(text, values)
        if yaml.safe_load(new) != _changed(before, values):
            raise ValueError("more than these options would change")
        found = check_run(yaml.safe_load(new), path, overrides).as_flat()
        if any(found[name] != value for name, value in values.items()):
            raise ValueError("an override of the command line sets one of them")
        write_text(path, new)
        path.chmod(mode)
    except (OSError, CheckpointError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(
            f"{path} is as it was: the choice cannot be written into it ({error}). Add it by hand:\n{as_yaml(values)}"
        ) from error


def as_yaml(values: Mapping[str, Any]) -> str:
    """Return options by dotted key as sections of a run file."""
    sections: dict[str, list[str]] = {}
    for key, value in values.items():
        section, name = key.split(".")
        sections.setdefault(section, []).append(f"  {name}: {_text(value)}")
    return "\n".join(line for section, lines in sections.items() for line in (f"{section}:", *lines))


def edited(text: str, values: Mapping[str, Any]) -> str:
    """Return a run file's text with options set, as good as lines allow; the caller checks the result.

    Raises:
        ValueError: The file is not a mapping of sections.
    """
    for key, value in reversed(list(values.items())):  # each new line becomes the first of its section
        section, name = key.split(".")
        text = _with(text, section, name, _text(value))
    return text


def _text(value: Any) -> str:
    return f"[{', '.join(value)}]" if isinstance(value, list) else json.dumps(value)


def _changed(before: Any, values: Mapping[str, Any]) -> Any:
    wanted = copy.deepcopy(before)
    for key, value in values.items():
        section, name = key.split(".")
        wanted[section] = {**(wanted.get(section) or {}), name: value}
    return wanted


def _with(text: str, section: str, name: str, value: str) -> str:
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    if not isinstance(root, yaml.MappingNode):
        raise ValueError("it is not a mapping of sections")
    key, inside = _entry(root, section)
    if key is None:
        return f"{_ended(text)}{section}:\n  {name}: {value}\n"
    if isinstance(inside, yaml.MappingNode):
        there, old = _entry(inside, name)
        if there is not None:
            return f"{text[: old.start_mark.index]}{value}{text[old.end_mark.index :]}"
        if inside.flow_style:
            at = inside.start_mark.index + 1
            return f"{text[:at]}{name}: {value}{', ' if inside.value else ''}{text[at:]}"
    # The first line of the section, above comments that belong to its next option.
    line = text.find("\n", key.end_mark.index) + 1 or len(text)
    indent = inside.value[0][0].start_mark.column if isinstance(inside, yaml.MappingNode) else 2
    return f"{_ended(text[:line])}{' ' * indent}{name}: {value}\n{text[line:]}"


def _ended(text: str) -> str:
    return text if text.endswith("\n") else f"{text}\n"


def _entry(mapping: yaml.MappingNode, name: str) -> tuple[Any, Any]:
    return next(((key, value) for key, value in mapping.value if key.value == name), (None, None))
