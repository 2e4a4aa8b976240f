"""A model before it is built: its files, here or on the Hugging Face Hub, and what its configuration and card say."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import constants, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, StrictDataclassError
from transformers import CONFIG_MAPPING, AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES

from fullshard.errors import ModelError
from fullshard.program.models.build import ModelClass

_SMALL_FILES = ("README.md", "*.json", "*.model", "*.txt", "*.tiktoken", "*.jinja")
_SAFETENSORS = ("model.safetensors", "model-*-of-*.safetensors")
_BIN = ("pytorch_model.bin", "pytorch_model-*-of-*.bin")
_ELSEWHERE = "*/*"
"""Files in subdirectories of a repository, which hold other formats of the same weights."""


def resolve_model(path_or_id: str) -> Path:
    """Return the local directory of a model, downloading it from the Hub if necessary; any process.

    The configuration, the tokenizer and the safetensors are downloaded, or the ``.bin`` files if there are no
    safetensors. With ``HF_HUB_OFFLINE=1`` only the cache is used.

    Args:
        path_or_id: A directory, or an id such as ``google-t5/t5-small``.

    Raises:
        ModelError: There is no such directory, and no such model in the cache or on the Hub.
    """
    directory = Path(path_or_id)
    if directory.is_dir():
        return directory
    if directory.exists():
        raise ModelError(
            f"{directory.absolute()} is a file. A model is a directory with config.json, weights, tokenizer."
        )
    try:
        found = _fetch(path_or_id, (*_SMALL_FILES, *_SAFETENSORS))
        if any(found.glob("*.safetensors")):
            return found
        return _fetch(path_or_id, (*_SMALL_FILES, *_BIN))
    except (HFValidationError, HfHubHTTPError, OSError, ValueError) as error:
        raise ModelError(_nowhere(path_or_id, error)) from error


def resolve_adapter(path_or_id: str) -> Path:
    """Return the local directory of an adapter that peft saved, downloading it if necessary; any process.

    Raises:
        ModelError: There is no such directory, none in the cache or on the Hub, or it holds no adapter.
    """
    try:
        found = Path(path_or_id)
        found = found if found.is_dir() else _fetch(path_or_id, (*_SMALL_FILES, "adapter_model.*"))
    except (HFValidationError, HfHubHTTPError, OSError, ValueError) as error:
        raise ModelError(_nowhere(path_or_id, error, "model.adapter.path")) from error
    if not (found / "adapter_config.json").is_file():
        raise ModelError(
            f"model.adapter.path: {path_or_id} has no adapter_config.json, so peft has not saved an adapter there. "
            "Name such a directory; a complete model is model.path."
        )
    return found


def stated_license(path_or_id: str) -> str | None:
    """Return the licence that a model's card states; None if it has no card here or the card states none.

    Any process; the network is not used.
    """
    found = Path(path_or_id, "README.md")
    if not Path(path_or_id).is_dir():
        with suppress(HFValidationError):
            cached = try_to_load_from_cache(path_or_id, "README.md")
            found = Path(cached) if isinstance(cached, str) else found
    try:
        values = card_metadata(found.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return None
    licence = values.get("license")
    if licence == "other":
        name, link = values.get("license_name"), values.get("license_link")
        return f"{name or 'other'}{f' ({link})' if link else ''}"
    if isinstance(licence, list):
        return ", ".join(map(str, licence))
    return None if licence is None else str(licence)


def card_metadata(text: str) -> Mapping[str, Any]:
    """Return the YAML block at the start of a model card; empty if there is no readable one."""
    block = re.match(r"\s*---\r?\n(.*?)\r?\n---\s", text, re.DOTALL)
    try:
        values = yaml.safe_load(block[1]) if block else {}
    except yaml.YAMLError:
        return {}
    return values if isinstance(values, dict) else {}


def _fetch(model_id: str, patterns: tuple[str, ...]) -> Path:
    return Path(snapshot_download(model_id, allow_patterns=list(patterns), ignore_patterns=[_ELSEWHERE]))


def _nowhere(path_or_id: str, error: Exception, option: str = "model.path") -> str:
    """Return the error message for a model that was not found: where it was searched, why that failed, the remedy."""
    searched = f"There is no directory {Path(path_or_id).absolute()}"
    if isinstance(error, HFValidationError):
        return f"{searched}, and {path_or_id!r} is not an id of a model on the Hugging Face Hub. Correct {option}."
    offline = " HF_HUB_OFFLINE is set, so the Hub was not contacted." if constants.HF_HUB_OFFLINE else ""
    reason = " ".join(str(error).split()).rstrip(".")
    return (
        f"{searched}, and the model {path_or_id!r} is neither in the Hugging Face cache ({constants.HF_HUB_CACHE}) nor "
        f"could it be downloaded: {reason}.{offline} Correct {option}, or download the model on a machine with "
        f"a network (`hf download {path_or_id}`) and copy the cache, or set {option} to its directory."
    )


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
