"""Weights for a model with a peft adapter: the base model's from files by shards, the adapter's from memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fullshard.core.comm import Comm, together
from fullshard.core.engine import WantedTensor, WeightReader, wanted_tensors
from fullshard.core.policy import Quantize
from fullshard.core.quantized import chosen_layers, format_of, rounded
from fullshard.errors import InvariantError
from fullshard.program.models.adapters import COPY, magnitude_layers
from fullshard.state.saving.weights import Pretrained


class AdaptedWeights:
    """Weight source for ``fully_shard(peft_model, weights=AdaptedWeights(Pretrained(path), values))``, one per rank."""

    def __init__(self, base: Pretrained, values: Mapping[str, torch.Tensor]) -> None:
        """Keep the adapter's values as long as this object exists.

        ``base`` has the tensor names of the model without an adapter. ``values`` have those of peft's model; they are
        the same on every rank. Copies of base layers that are trained are read from ``base`` if they are not among
        them.
        """
        self._base = base
        self._values = values

    @property
    def quantize(self) -> Quantize | None:
        """Quantisation of the base model's linear layers."""
        return self._base.quantize

    def open(self, model: Any, wanted: list[WantedTensor]) -> WeightReader:
        """See :meth:`fullshard.engine.WeightSource.open`.

        Raises:
            CheckpointError: The files do not fit the base model.
        """
        under = model.get_base_model()
        prefix = next(f"{path}." for path, module in model.named_modules() if module is under)
        plain: dict[str, str] = {}
        of_base = []
        names_of = {name: one.names for one in wanted for name in one.names}
        for one in wanted:
            if one.names[0] in self._values:
                continue
            # A copy begins with the values of the layer that it copies, to which other layers may be tied.
            original = COPY.sub(".original_module.", one.names[0])
            # peft may register the input embedding a second time, outside of the model.
            inside = [name.removeprefix(prefix) for name in names_of[original] if name.startswith(prefix)]
            renamed = [name.replace(".base_layer.", ".").replace(".original_module.", ".") for name in inside]
            if not renamed:
                raise InvariantError(f"{one.names[0]} belongs neither to the adapter nor to its base model.")
            plain |= dict.fromkeys(one.names, renamed[0])
            of_base.append(replace(one, names=renamed))
        return _Reader(self._base.open(under, of_base), plain, self._values)

    def compute_magnitudes(self, model: Any, comm: Comm) -> None:
        """Compute DoRA's magnitudes, the norms of the weights as training sees them; every rank, before sharding.

        Each rank reads the weights of some layers, one at a time, and quantises and dequantises those that will be
        quantised. Magnitudes that already have values, such as a trained adapter's, are kept.

        Args:
            model: peft's model on the meta device, with the adapter on the CPU.
            comm: The ranks to shard over.

        Raises:
            CheckpointError: The files do not fit the base model, or cannot be read.
        """
        layers = magnitude_layers(model)
        due = [name for name in layers if name in self._values and self._values[name].isnan().any()]
        if not due:
            return
        found: dict[str, torch.Tensor] = {}
        mine = together(comm, lambda: self._magnitudes(model, due[comm.rank :: comm.size]))
        for part in comm.all_gather_object(mine):
            found |= part
        for name in due:
            self._values[name].copy_(found[name])

    def _magnitudes(self, model: Any, names: list[str]) -> dict[str, torch.Tensor]:
        """Return the magnitudes with these names."""
        layers, wanted = magnitude_layers(model), wanted_tensors(model)
        reader = self.open(model, wanted)
        name_of = {id(layer): path for path, layer in model.named_modules()}
        quantised = set() if self.quantize is None else {id(one) for one in chosen_layers(model, self.quantize)}
        found = {}
        for name in names:
            layer, adapter = layers[name]
            base = layer.get_base_layer()
            values = torch.empty(base.weight.shape, dtype=base.weight.dtype)
            reader.read(f"{name_of[id(base)]}.weight", 0, values.view(-1))
            if self.quantize is not None and id(base) in quantised:
                values = rounded(format_of(self.quantize), values, values.dtype)
            holder = nn.Module()
            holder.weight = nn.Parameter(values, requires_grad=False)
            factors = {"lora_A": layer.lora_A[adapter].weight, "lora_B": layer.lora_B[adapter].weight}
            magnitude = layer.lora_magnitude_vector[adapter]
            kept = magnitude.weight
            # peft's own formula, which is also that of its layers over bitsandbytes'.
            with torch.no_grad():
                magnitude.update_layer(base_layer=holder, scaling=layer.scaling[adapter], **factors)
            found[name], magnitude.weight = magnitude.weight.detach(), kept
        return found


class _Reader:
    """Reads each tensor from the files or from the adapter's values."""

    def __init__(self, base: WeightReader, plain: Mapping[str, str], values: Mapping[str, torch.Tensor]) -> None:
        """Read from ``base`` under the names that ``plain`` gives, or from ``values``."""
        self._base = base
        self._plain = plain
        self._values = values

    def has(self, name: str) -> bool:
        """See :meth:`fullshard.engine.WeightReader.has`."""
        return name in self._values or (name in self._plain and self._base.has(self._plain[name]))

    def read(self, name: str, start: int, out: torch.Tensor) -> None:
        """See :meth:`fullshard.engine.WeightReader.read`."""
        if name in self._values:
            out.copy_(self._values[name].reshape(-1)[start : start + out.numel()])
        else:
            self._base.read(self._plain[name], start, out)
