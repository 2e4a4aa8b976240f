"""Merging a checkpoint that holds only an adapter: its base model is read, and quantised as it was in the run.

The base model's files are read one weight at a time. A weight that was quantised is quantised and dequantised again,
so that the adapter is added to the numbers it was trained on; other weights are used as stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fullshard.core.policy import Quantize
from fullshard.core.quantized import format_of, rounded
from fullshard.errors import CheckpointError
from fullshard.state.saving.lora import MODEL, LowRank, merged_updates, trained_copies
from fullshard.state.storage import Base, TensorEntry, WeightFiles, require_base


class OverBase:
    """The tensors of a merged model, under the names that they have in the base model's files."""

    def __init__(
        self,
        base: Base,
        moved: Path | None,
        tensors: Mapping[str, TensorEntry],
        config: Mapping[str, Any],
        model_config: Mapping[str, Any],
    ) -> None:
        """Open the base model's files and match them with the adapter; no values are read.

        Args:
            base: The base model that the checkpoint names.
            moved: Its directory now; None: where the run read it.
            tensors: Tensors of the checkpoint's model, by name without ``model/``.
            config: The adapter's configuration.
            model_config: The model's configuration; empty if not known.

        Raises:
            CheckpointError: The base model is not there or has changed, or merging takes more than adding
                ``scaling * B @ A`` and DoRA's magnitudes.
            ConfigError: bitsandbytes is missing or too old.
        """
        directory = moved or Path(base.directory)
        remedy = "Give the directory where that model is now (--base DIR), or export with --adapter."
        require_base(directory, base.facts, "The checkpoint, which has the adapter alone,", remedy)
        self.files = WeightFiles(directory)
        self.format = format_of(Quantize(base.type, double_quant=base.double_quant))
        names = _Names(self.files)
        self.quantised = {names.stored(name) for name in base.layers}
        updates = merged_updates(tensors, config, model_config, lambda module: self._entry(names.stored(module)))
        self.updates: dict[str, LowRank] = {names.stored(module): update for module, update in updates.items()}
        copies = trained_copies(tensors, model_config)
        self.trained = {names.stored(plain): MODEL + name for plain, name in copies.items()}

    def _entry(self, stored: str) -> TensorEntry:
        found = self.files.tensors[stored]
        return TensorEntry(str(found.dtype).removeprefix("torch."), tuple(found.shape), ())

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor of the files, flattened: in float32 if it is changed, and dequantised if it was quantised."""
        found = self.files.tensors[name]
        changes = name in self.quantised or name in self.updates
        values = torch.empty(torch.Size(found.shape).numel(), dtype=torch.float32 if changes else found.dtype)
        self.files.read(name, 0, values)
        if name not in self.quantised:
            return values
        return rounded(self.format, values.view(found.shape), torch.float32).reshape(-1)


class _Names:
    """Stored names of the base model's tensors, which may lack the model's prefix or have an additional one."""

    def __init__(self, files: WeightFiles) -> None:
        self._path, self._stored = files.path, files.tensors

    def stored(self, name: str) -> str:
        """Return the stored name of a tensor of the model."""
        if name in self._stored:
            return name
        found = [one for one in self._stored if one.endswith(f".{name}") or name.endswith(f".{one}")]
        if len(found) != 1:
            raise CheckpointError(f"The base model in {self._path} has no tensor {name}: it is another model.")
        return found[0]
