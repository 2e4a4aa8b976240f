"""The files of a model: in a local directory, or from the Hugging Face Hub, in its cache or downloaded into it."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from fullshard.errors import ModelError

_SMALL_FILES = ("*.json", "*.model", "*.txt", "*.tiktoken", "*.jinja")
_SAFETENSORS = ("model.safetensors", "model-*-of-*.safetensors")
_BIN = ("pytorch_model.bin", "pytorch_model-*-of-*.bin")
_ELSEWHERE = "*/*"
"""Files in subdirectories of a repository, which are other formats of the same weights."""


def resolve_model(path_or_id: str) -> Path:
    """Return the local directory of a model; any process, alone. A model on the Hub is downloaded if necessary.

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


def _fetch(model_id: str, patterns: tuple[str, ...]) -> Path:
    return Path(snapshot_download(model_id, allow_patterns=list(patterns), ignore_patterns=[_ELSEWHERE]))


def _nowhere(path_or_id: str, error: Exception) -> str:
    """Return an error message: where the model was searched, why that failed, and the remedy."""
    searched = f"There is no directory {Path(path_or_id).absolute()}"
    if isinstance(error, HFValidationError):
        return f"{searched}, and {path_or_id!r} is not an id of a model on the Hugging Face Hub. Correct model.path."
    offline = " HF_HUB_OFFLINE is set, so the Hub was not contacted." if constants.HF_HUB_OFFLINE else ""
    reason = " ".join(str(error).split()).rstrip(".")
    return (
        f"{searched}, and the model {path_or_id!r} is neither in the Hugging Face cache ({constants.HF_HUB_CACHE}) nor "
        f"could it be downloaded: {reason}.{offline} Correct model.path, or download the model on a machine with "
        f"a network (`hf download {path_or_id}`) and copy the cache, or set model.path to its directory."
    )
