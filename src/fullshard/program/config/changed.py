"""Which settings of a run differ from the schema's defaults."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, get_args

from pydantic import BaseModel

from fullshard.program.config.schema import RunConfig

_NOTHING = (None, [], {})


def changed_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that differ from their defaults, by dotted key; any process.

    Args:
        values: The settings by section, as a run records them; those of another version may have other keys.
    """
    defaults = dict(_defaults(RunConfig))
    found = {key: value for key, value in flat_settings(values) if key in defaults or value not in _NOTHING}
    return {key: value for key, value in found.items() if key not in defaults or value != defaults[key]}


def flat_settings(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the settings by dotted key, in their order."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flat_settings(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _defaults(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the defaults of the options that have one, as JSON values."""
    for name, field in section.model_fields.items():
        key = f"{prefix}{field.alias or name}"
        if not field.is_required():
            value = field.get_default(call_default_factory=True)
            if not isinstance(value, BaseModel):
                yield key, json.loads(json.dumps(value, default=str))
        kinds = get_args(field.annotation) or (field.annotation,)
        for kind in kinds:
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from _defaults(kind, f"{key}.")
