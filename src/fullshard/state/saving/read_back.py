"""A saved model read back as ``from_pretrained`` would, before it is called saved: names, shapes and ties."""

from __future__ import annotations

import importlib
import json
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fullshard.core.engine import plain_class, saved_tensors
from fullshard.core.engine.registry import is_sharded
from fullshard.core.transformers_private import one_at_a_time, without_bar
from fullshard.errors import CheckpointError
from fullshard.state.storage import ADAPTER_NAME, WeightFiles

_SHOWN = 5
_KINDS = {
    "missing_keys": "missing in the files, so that their values would be random",
    "unexpected_keys": "in the files, and not the model's",
    "mismatched_keys": "of another shape",
    "error_msgs": "not readable",
    "conversion_errors": "not readable",
}
"""What transformers reports when it loads a model."""


def read_back(directory: Path, model: Any = None, base_values: Mapping[str, Any] | None = None) -> None:
    """Check that ``from_pretrained`` gives the model whose files lie in a directory; one process.

    The model is built on the meta device by the configuration that was written, and gets tensors without memory, as the
    headers of the files describe them. Nothing is checked of models that are not from transformers.

    Args:
        directory: With the weights of a model or of an adapter, and their configuration.
        model: The model that was saved, sharded or not; None: the one that the configuration names.
        base_values: The configuration of an adapter's base model, if ``model`` is not given.

    Raises:
        CheckpointError: A tensor is missing, left over or of another shape, or others are tied than in ``model``.
    """
    is_adapter = (directory / ADAPTER_NAME).exists()
    stored = WeightFiles(directory / ADAPTER_NAME if is_adapter else directory).tensors
    tensors = {name: torch.empty(one.shape, dtype=one.dtype, device="meta") for name, one in stored.items()}
    kind = _class_of(model, base_values if is_adapter else _read(directory))
    if kind is None:
        return
    with _quietly():
        try:
            if is_adapter:
                problems = _adapter_problems(directory, kind, _config(kind, model, base_values), tensors)
            else:
                problems = _model_problems(directory, kind, tensors, model)
        except Exception as error:  # whatever transformers or peft raise when they build or fill the model
            problems = [f"{type(error).__name__}: {error}"]
    if problems:
        raise CheckpointError(
            f"from_pretrained would not give the model that was trained: {'; '.join(problems)}. Nothing was "
            "replaced, and checkpoints are unchanged. Correct the model's configuration (such as tie_word_embeddings) "
            "or what was added to its class, then resume and save again."
        )


def _class_of(model: Any, values: Mapping[str, Any] | None) -> Any:
    """Return the class of the model, or that of a configuration; None if it is not one of transformers' models."""
    if model is None:
        names = (values or {}).get("architectures")
        return getattr(importlib.import_module("transformers"), names[0], None) if names else None
    base = _base_of(model)
    kind = plain_class(type(base)) if is_sharded(base) else type(base)
    return kind if any(one.__name__ == "PreTrainedModel" for one in kind.__mro__) else None


def _base_of(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "peft_config") else model


def _config(kind: Any, model: Any, values: Mapping[str, Any] | None) -> Any:
    """Return the configuration of an adapter's base model, which is not saved with it."""
    return kind.config_class.from_dict(dict(values or {})) if model is None else _base_of(model).config


def _read(directory: Path) -> dict[str, Any] | None:
    path = directory / "config.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def _model_problems(directory: Path, kind: Any, tensors: Mapping[str, torch.Tensor], model: Any) -> list[str]:
    config_class = kind.config_class if model is None else type(_base_of(model).config)
    loaded, info = kind.from_pretrained(
        None,
        config=config_class.from_pretrained(directory, local_files_only=True),
        state_dict=dict(tensors),
        device_map={"": "meta"},
        dtype=torch.get_default_dtype(),
        ignore_mismatched_sizes=True,  # they are among what it reports
        output_loading_info=True,
    )
    problems = [_listed(map(_name_of, info[key]), text) for key, text in _KINDS.items() if info.get(key)]
    if not problems and model is not None:
        run = {frozenset(one.names) for one in saved_tensors(model) if one.is_parameter}
        problems = _tie_problems(run, _names(loaded))
    return problems


def _name_of(found: Any) -> str:
    return str(found[0] if isinstance(found, tuple) else found)


def _names(model: nn.Module) -> set[frozenset[str]]:
    """Return the names of each parameter."""
    found: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(parameter), set()).add(name)
    return {frozenset(names) for names in found.values()}


def _tie_problems(run: set[frozenset[str]], files: set[frozenset[str]]) -> list[str]:
    kinds = ((run - files, "tied in the run only"), (files - run, "tied by the saved configuration only"))
    return [
        _listed((" = ".join(sorted(names)) for names in groups if len(names) > 1), text)
        for groups, text in kinds
        if any(len(names) > 1 for names in groups)
    ]


def _adapter_problems(directory: Path, kind: Any, config: Any, tensors: Mapping[str, torch.Tensor]) -> list[str]:
    peft: Any = importlib.import_module("peft")
    settings = peft.PeftConfig.from_pretrained(str(directory), local_files_only=True)
    if isinstance(getattr(settings, "init_lora_weights", None), str):
        settings.init_lora_weights = True  # others are computed from the base model's values
    with torch.device("meta"):
        adapted = peft.get_peft_model(kind(config), settings)
    wanted = peft.get_peft_model_state_dict(adapted, save_embedding_layers=False)
    # Beside an adapter of embeddings peft may save the base's tables, which it loads again.
    known = wanted | peft.get_peft_model_state_dict(adapted, save_embedding_layers=True)
    pairs = (
        (wanted.keys() - tensors.keys(), _KINDS["missing_keys"]),
        (tensors.keys() - known.keys(), _KINDS["unexpected_keys"]),
        (
            [name for name in known.keys() & tensors.keys() if known[name].shape != tensors[name].shape],
            _KINDS["mismatched_keys"],
        ),
    )
    return [_listed(names, text) for names, text in pairs if names]


def _listed(names: Iterable[str], text: str) -> str:
    ordered = sorted(names)
    shown = ", ".join(ordered[:_SHOWN]) + (", …" if len(ordered) > _SHOWN else "")
    return f"{len(ordered):,} tensor{'s' * (len(ordered) > 1)} ({shown}) {text}"


@contextmanager
def _quietly() -> Iterator[None]:
    """Use transformers and peft in one thread at a time, without what they print: it becomes one error."""
    logging: Any = importlib.import_module("transformers.utils.logging")
    with one_at_a_time, without_bar(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        before = logging.get_verbosity()
        logging.set_verbosity(logging.CRITICAL)
        try:
            yield
        finally:
            logging.set_verbosity(before)
