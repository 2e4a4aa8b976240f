"""Rotary parameters of a saved configuration under the names that transformers 4 and other readers look for."""

from __future__ import annotations

import copy
import warnings
from typing import Any

_OF_ALL = {
    "rope_theta": "rope_theta",
    "global_rope_theta": "rope_theta",
    "rotary_emb_base": "rope_theta",
    "partial_rotary_factor": "partial_rotary_factor",
    "rotary_pct": "partial_rotary_factor",
}
"""Earlier names of one value for all layers, or for those of full attention."""

_OF_SLIDING = {"rope_local_base_freq": "rope_theta", "local_rope_theta": "rope_theta"}
"""Earlier names of a value for layers of sliding attention."""


def add_earlier_names(config: Any, values: dict[str, Any]) -> None:
    """Add the earlier names that a configuration's class reads to ``values``, its JSON, in place; its parts' too.

    Which names those are, and whether they say all, is asked of the class itself: it reads both forms. It warns if the
    earlier form cannot express the positions.
    """
    for key in config.sub_configs:
        part = getattr(config, key, None)
        if part is not None and isinstance(values.get(key), dict):
            add_earlier_names(part, values[key])
    rope = values.get("rope_parameters")
    if not isinstance(rope, dict):
        return
    names = _names(type(config), values, rope)
    bare = {key: value for key, value in values.items() if key != "rope_parameters"}
    if _read(type(config), {**values, **names}) == rope:
        values.update(names)
    if _read(type(config), {**bare, **names}) != rope:
        warnings.warn(
            f"The positions of this {config.model_type} ({rope}) have no form that transformers 4 reads: load what is "
            "saved with transformers 5.",
            stacklevel=2,
        )


def _names(kind: Any, values: dict[str, Any], rope: dict[str, Any]) -> dict[str, Any]:
    """Return the earlier names that a class of configurations reads, with their values."""
    full, sliding = rope.get("full_attention", rope), rope.get("sliding_attention", {})
    given = {name: full.get(key) for name, key in _OF_ALL.items()}
    given |= {name: sliding.get(key) for name, key in _OF_SLIDING.items()}
    bare = {key: value for key, value in values.items() if key not in {"rope_parameters", *given}}
    plain = _read(kind, bare)
    found = {
        name: value
        for name, value in given.items()
        if value is not None and _read(kind, {**bare, name: value * 0.75}) != plain
    }
    if full.get("rope_type", "default") == "default":
        return found
    # What stands beside it is not repeated: transformers 4 counts the entries of Phi-3's, and asks for its `type`.
    kept = {key: value for key, value in full.items() if key not in {*_OF_ALL.values(), *bare}}
    if kept["rope_type"] == "longrope":
        kept["type"] = kept.pop("rope_type")
    return found | {"rope_scaling": kept}


def _read(kind: Any, values: dict[str, Any]) -> Any:
    """Return the rotary parameters that a class of configurations reads from JSON; None if it refuses it.

    Of a copy, because it changes what it is given.
    """
    try:
        rope = kind.from_dict(copy.deepcopy(values)).to_dict().get("rope_parameters")
    except Exception:  # its checks of other values
        return None
    for part in (rope, *rope.values()) if isinstance(rope, dict) else ():
        if isinstance(part, dict):
            part.pop("type", None)  # an earlier name, kept beside the new one
    return rope
