"""Saves a tokenizer so that other programs read it too: earlier versions of transformers, and llama.cpp's converter."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from fullshard.state.storage import write_text


def save_tokenizer(tokenizer: Any, directory: Path) -> None:
    """Write a transformers tokenizer's files into an existing directory; one process.

    Transformers 5 writes neither the SentencePiece file that it was read from, without which no T5 becomes a GGUF, nor
    the list of tokens that were added since; and transformers 4 does not know its name of a plain tokenizer's class,
    nor a list under ``extra_special_tokens``. Transformers 5 reads all of these as its own.
    """
    tokenizer.save_pretrained(directory)
    pieces = getattr(tokenizer, "vocab_file", None)
    if pieces is not None and Path(pieces).suffix == ".model" and Path(pieces).is_file():
        shutil.copyfile(pieces, directory / Path(pieces).name)
        write_text(directory / "added_tokens.json", json.dumps(tokenizer.get_added_vocab(), indent=2) + "\n")
    path = directory / "tokenizer_config.json"
    values = json.loads(path.read_text(encoding="utf-8"))
    if isinstance(values.get("extra_special_tokens"), list):
        values["additional_special_tokens"] = values.pop("extra_special_tokens")
    if values.get("tokenizer_class") == "TokenizersBackend":
        values["tokenizer_class"] = "PreTrainedTokenizerFast"
    write_text(path, json.dumps(values, indent=2, sort_keys=True, ensure_ascii=False) + "\n")
