"""Dequantises a quantised model while it is streamed: files get ``weight`` in place of codes and scales."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from fullshard.core.engine import Run, SavedTensor, full_runs, plain_name
from fullshard.core.quantized import QuantizedLinear


@dataclass(frozen=True)
class _Layer:
    """A quantised layer, by its names in the model."""

    module: QuantizedLinear
    weight: str
    scales: str


class Dequantised:
    """The quantised layers of a model that is written in its unquantised form."""

    def __init__(self, model: nn.Module) -> None:
        """Find the quantised layers; any rank."""
        self._layers: dict[str, _Layer] = {}
        self._scales: dict[str, torch.Tensor] = {}
        for path, module in model.named_modules():
            if isinstance(module, QuantizedLinear):
                prefix = plain_name(f"{path}." if path else "")
                names = prefix + "weight", prefix + module.format.scales
                self._layers[prefix + module.format.codes] = _Layer(module, *names)

    def tensors(self, saved: list[SavedTensor]) -> dict[str, SavedTensor]:
        """Return the tensors of the files by the name of the model's tensor that is streamed for each."""
        scales = {layer.scales for layer in self._layers.values()}
        found = {one.names[0]: one for one in saved if one.names[0] not in scales}
        for name, layer in self._layers.items():
            found[name] = SavedTensor((layer.weight,), layer.module.shape, layer.module.weight_dtype, is_parameter=True)
        return found

    def collect(self, model: nn.Module, limit_bytes: int) -> None:
        """Gather the complete scales on rank 0, which keeps them; every rank calls it.

        Their size is 1/31 of the codes with double quantisation, otherwise 1/8.
        """
        if not self._layers:
            return
        wanted = {layer.scales: layer.module.format.scales_bytes(layer.module.shape) for layer in self._layers.values()}
        for runs in full_runs(model, limit_bytes, names=frozenset(wanted)):
            for name, start, flat in runs:
                if name in wanted:
                    held = self._scales.setdefault(name, torch.empty(wanted[name], dtype=torch.uint8))
                    held[start : start + flat.numel()].copy_(flat)

    def run(self, run: Run) -> Run:
        """Return a streamed run of codes as the run of weights that it encodes; others unchanged; rank 0."""
        name, start, flat = run
        layer = self._layers.get(name)
        if layer is None:
            return run
        module = layer.module
        scales = self._scales[layer.scales]
        return name, *module.format.dequantise_run(flat, start, scales, module.shape, module.weight_dtype)
