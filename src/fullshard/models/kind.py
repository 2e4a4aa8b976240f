"""What a model's configuration says before any model is built."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES

from fullshard.errors import ModelError
from fullshard.models.build import ModelClass


def reads_one_sequence(source: Path | Mapping[str, Any], model_class: ModelClass = "auto") -> bool:
    """Whether a model reads source and target as one sequence (decoder-only) rather than two; any process, alone.

    Args:
        source: The model's local directory, or its ``model_type`` and options.
        model_class: ``seq2seq``, ``causal``, or ``auto``: what the configuration says.

    Raises:
        ModelError: The directory has no configuration that can be read.
    """
    if model_class != "auto":
        return model_class == "causal"
    if isinstance(source, Mapping):
        # A type that does not exist is refused where the model is built, with the nearest name.
        kind = source.get("model_type")
        own = source.get("is_encoder_decoder")
        if own is not None or kind not in CONFIG_MAPPING:
            return not own
        return kind not in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
    try:
        return not AutoConfig.from_pretrained(source, local_files_only=True).is_encoder_decoder
    except (OSError, ValueError, TypeError, StrictDataclassError) as error:
        raise ModelError(f"{source / 'config.json'} cannot be read: {error}") from error


def task_prefixes(directory: Path) -> dict[str, str]:
    """Prefixes that a checkpoint's configuration names, by task: T5 was trained with them. Any process, alone."""
    try:
        values = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        tasks = values.get("task_specific_params") or {}
        return {task: options["prefix"] for task, options in tasks.items() if options.get("prefix")}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}
