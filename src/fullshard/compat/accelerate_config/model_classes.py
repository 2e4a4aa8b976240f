"""Layer classes of a model that a wrap policy can name, found without its weights."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from transformers import AutoConfig, AutoModel

from fullshard.engine.setup.wrap import find_units
from fullshard.errors import ModelError, WrapError


@dataclass(frozen=True)
class LayerClass:
    """A class that a wrap policy could name."""

    name: str
    count: int  # number of its layers in the model
    numel: int  # number of parameters of the largest of them
    repeated: bool  # whether these are the model's repeated blocks, which are wrapped by default


def layer_classes(path_or_id: str) -> list[LayerClass]:
    """Return the layer classes of a model, its repeated blocks first; one process, no network, no weights.

    Args:
        path_or_id: A directory with a config.json, or the id of a model in the Hugging Face cache.

    Raises:
        ModelError: There is no such model, or it cannot be built.
    """
    try:
        config = AutoConfig.from_pretrained(path_or_id, local_files_only=True)
        with torch.device("meta"):
            model = AutoModel.from_config(config)
    except (OSError, ValueError, KeyError, TypeError, ImportError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise ModelError(
            f"Cannot build a model from {path_or_id!r}: it must be a directory with a config.json, or a model in the "
            f"Hugging Face cache. ({reason[:200]})"
        ) from error
    try:
        blocks = {type(module).__name__ for _, (module, *_) in find_units(model, "auto")}
    except WrapError:
        blocks = set()
    plain = {name for name in blocks if hasattr(torch.nn, name)}
    sizes: dict[str, int] = {}
    counts: Counter[str] = Counter()
    for module in model.modules():
        name, numel = type(module).__name__, sum(parameter.numel() for parameter in module.parameters())
        if module is not model and numel and next(module.children(), None) is not None and not hasattr(torch.nn, name):
            counts[name] += 1
            sizes[name] = max(numel, sizes.get(name, 0))
    found = [LayerClass(name, count, sizes[name], name in blocks - plain) for name, count in counts.items()]
    return sorted(found, key=lambda layer: (not layer.repeated, -layer.numel))
