"""Facts read from a model's configuration before the model is built: its kind and its task prefixes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES

from fullshard.errors import ModelError
from fullshard.program.models.build import ModelClass


def reads_one_sequence(source: Path | Mapping[str, Any], model_class: ModelClass = "auto") -> bool:
    """Return True if source and target are one sequence (decoder-only) rather than two; any process.

    Args:
        source: The model's local directory, or its ``model_type`` and options.
        model_class: ``seq2seq``, ``causal``, or ``auto``: by the configuration.

    Raises:
        ModelError: The directory's configuration cannot be read.
    """
    if model_class != "auto":
        return model_class == "causal"
    if isinstance(source, Mapping):
        # An unknown type fails when the model is built, with an error that names the nearest one.
        kind = source.get("model_type")
        own = source.get("is_encoder_decoder")
        if own is not None or kind not in CONFIG_MAPPING:
            return not own
        return kind not in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
    try:
        return not AutoConfig.from_pretrained(source, local_files_only=True).is_encoder_decoder
    except (OSError, ValueError, TypeError, StrictDataclassError) as error:
        raise ModelError(f"{source / 'config.json'} cannot be read: {error}") from error


def known_kind(source: str | Mapping[str, Any]) -> str | None:
    """Return a model's type; None if it has none or is not on this machine. Any process; no network.

    ``source`` is the model's local directory or id on the Hub, or its ``model_type`` and options.
    """
    if isinstance(source, Mapping):
        kind = source.get("model_type")
        return kind if isinstance(kind, str) else None
    path = Path(source, "config.json")
    if not Path(source).is_dir():
        found = try_to_load_from_cache(source, "config.json")
        if not isinstance(found, str):
            return None
        path = Path(found)
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return known_kind(values) if isinstance(values, dict) else None


def task_prefixes(directory: Path) -> dict[str, str]:
    """Return the prefixes in a model's configuration, by task; T5 was trained with them. Any process."""
    try:
        values = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        tasks = values.get("task_specific_params") or {}
        return {task: options["prefix"] for task, options in tasks.items() if options.get("prefix")}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}
