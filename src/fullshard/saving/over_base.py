"""A merged model of a checkpoint that has the adapter alone: its base is read, and quantised as it was in the run.

The base model's files are read a weight at a time. A weight that was quantised is quantised and dequantised again, so
that the adapter is added to the numbers it was trained over; others are as they are in the files.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fullshard.errors import CheckpointError
from fullshard.policy import Quantize
from fullshard.quantized import format_of
from fullshard.saving.lora import LowRank, merged_updates
from fullshard.storage import Base, TensorEntry, WeightFiles, content_of


class OverBase:
    """The tensors of a merged model, under the names that they have in the base model's files."""

    def __init__(
        self, base: Base, tensors: Mapping[str, TensorEntry], config: Mapping[str, Any], model_config: Mapping[str, Any]
    ) -> None:
        """Open the base model's files and match them with the adapter; no values are read.

        Args:
            base: The base model that the checkpoint names.
            tensors: Tensors of the checkpoint's model, by name without ``model/``.
            config: The adapter's configuration.
            model_config: The model's configuration; empty if not known.

        Raises:
            CheckpointError: The base model is not there or has changed, or merging takes more than adding
                ``scaling * B @ A``.
            ConfigError: bitsandbytes is missing or too old.
        """
        self.files = _open(base)
        self.format = format_of(Quantize(base.type, double_quant=base.double_quant))
        names = _Names(self.files, base)
        self.quantised = {names.stored(name) for name in base.layers}
        updates = merged_updates(tensors, config, model_config, lambda module: self._entry(names.stored(module)))
        self.updates: dict[str, LowRank] = {names.stored(module): update for module, update in updates.items()}

    def _entry(self, stored: str) -> TensorEntry:
        found = self.files.tensors[stored]
        return TensorEntry(str(found.dtype).removeprefix("torch."), tuple(found.shape), ())

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor of the files, flattened; floating ones that change in float32, dequantised if they were."""
        found = self.files.tensors[name]
        changes = name in self.quantised or name in self.updates
        values = torch.empty(torch.Size(found.shape).numel(), dtype=torch.float32 if changes else found.dtype)
        self.files.read(name, 0, values)
        if name not in self.quantised:
            return values
        rows, width = found.shape
        codes, largest = self.format.quantise(values, (rows, width))
        codes = codes.reshape(self.format.codes_shape((rows, width)))
        scales = self.format.pack(largest)
        return self.format.dequantise(codes, scales, (rows, width), torch.float32).reshape(-1)


class _Names:
    """Stored names of the base model's tensors, which may lack the model's prefix or have one more."""

    def __init__(self, files: WeightFiles, base: Base) -> None:
        self._stored, self._base = files.tensors, base

    def stored(self, name: str) -> str:
        """Return the stored name of a tensor of the model."""
        if name in self._stored:
            return name
        found = [one for one in self._stored if one.endswith(f".{name}") or name.endswith(f".{one}")]
        if len(found) != 1:
            raise CheckpointError(
                f"The base model in {self._base.directory} has no tensor {name}: it is another model."
            )
        return found[0]


def _open(base: Base) -> WeightFiles:
    """Open the base model's files, if they are what the run read."""
    directory = Path(base.directory)
    remedy = f"Put the model that the run read ({base.name}, {base.content}) there again, or export with --adapter."
    if not directory.is_dir():
        raise CheckpointError(
            f"The checkpoint has the adapter alone, and its base model {directory} is not there. {remedy}"
        )
    try:
        content = content_of(directory)
    except OSError as error:
        raise CheckpointError(f"The base model {directory} cannot be read: {error}.") from error
    if content != base.content:
        raise CheckpointError(
            f"The checkpoint has the adapter alone, and its base model {directory} has changed: {content}. {remedy}"
        )
    return WeightFiles(directory)
