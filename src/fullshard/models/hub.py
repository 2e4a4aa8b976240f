"""Where a model's files are: a local directory, or a model of the Hugging Face Hub, in the cache or fetched into it."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from fullshard.errors import ModelError

_SMALL_FILES = ("*.json", "*.model", "*.txt", "*.tiktoken", "*.jinja")
_SAFETENSORS = ("model.safetensors", "model-*-of-*.safetensors")
_BIN = ("pytorch_model.bin", "pytorch_model-*-of-*.bin")
_ELSEWHERE = "*/*"
"""Directories in a repository hold other formats of the same weights."""


def resolve_model(path_or_id: str) -> Path:
    """The local directory of a model; any process, alone. What is not there yet is fetched from the Hub.

    Of a model on the Hub the configuration, the tokenizer and the safetensors are fetched, and the ``.bin`` files where
    it has no safetensors. With ``HF_HUB_OFFLINE=1`` only the cache is looked at.

    Args:
        path_or_id: A directory, or an id such as ``google-t5/t5-small``.

    Raises:
        ModelError: It is neither; the message says where was looked.
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


def _fetch(model_id: str, patterns: tuple[str, ...]) -> Path:
    return Path(snapshot_download(model_id, allow_patterns=list(patterns), ignore_patterns=[_ELSEWHERE]))


def _nowhere(path_or_id: str, error: Exception) -> str:
    """Where was looked, what came of it, and what to do."""
    looked = f"There is no directory {Path(path_or_id).absolute()}"
    if isinstance(error, HFValidationError):
        return f"{looked}, and {path_or_id!r} is no id of a model on the Hugging Face Hub. Correct model.path."
    offline = " HF_HUB_OFFLINE is set, so the Hub was not asked." if constants.HF_HUB_OFFLINE else ""
    reason = " ".join(str(error).split()).rstrip(".")
    return (
        f"{looked}, and the model {path_or_id!r} is neither in the Hugging Face cache ({constants.HF_HUB_CACHE}) nor "
        f"could it be fetched: {reason}.{offline} Correct model.path; or fetch the model where there is a network with "
        f"`hf download {path_or_id}` and copy the cache, or name its directory."
    )
