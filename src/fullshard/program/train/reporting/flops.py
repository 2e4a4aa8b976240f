"""Model FLOPs utilisation (MFU): FLOPs that the model needs, divided by the peak FLOPs of the devices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_HALF_PEAKS = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10": 125e12,
}
"""Dense bf16 and fp16 FLOP/s from NVIDIA's data sheets; the first key that the device's name contains applies."""

_FLOPS_PER_WEIGHT = 6
"""FLOPs of a token in a linear layer: 2 forward and 4 backward (Kaplan et al., 2020, arXiv:2001.08361, section 2.1)."""

_FLOPS_PER_FROZEN_WEIGHT = 4
"""A frozen weight needs no gradient of its own."""


@dataclass(frozen=True)
class Flops:
    """FLOPs of a token and of the devices; attention's own products are not counted."""

    source_token: float  # FLOPs of a source token; of a causal model, of any token
    target_token: float  # FLOPs of a target token; 0 for a causal model
    peak: float  # peak FLOP/s of all devices together

    def utilisation(self, *, tokens: int, target_tokens: int, seconds: float) -> float:
        """Return the share of the peak that a step reached.

        Args:
            tokens: All tokens of the step, targets included.
            target_tokens: Target tokens among them; a causal model's cost as much as its source tokens.
            seconds: Wall time of the step.
        """
        if not self.target_token:
            target_tokens = 0
        needed = (tokens - target_tokens) * self.source_token + target_tokens * self.target_token
        return needed / seconds / self.peak


def count_flops(model: PreTrainedModel) -> tuple[float, float]:
    """Return the FLOPs of a source and of a target token in forward and backward; before the model is sharded.

    Args:
        model: On any device; an adapter's base model counts as frozen.

    Returns:
        FLOPs of a source token and of a target token; for a causal model, of any token and 0.
    """
    encoder, everything = 0.0, 0.0
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(module, nn.Embedding) or not isinstance(weight, nn.Parameter) or weight.dim() != 2:
            continue
        cost = weight.numel() * (_FLOPS_PER_WEIGHT if weight.requires_grad else _FLOPS_PER_FROZEN_WEIGHT)
        everything += cost
        # Cross-attention's keys and values are computed once for each source token.
        if "encoder." in name.replace("decoder.", "") or "EncDecAttention.k" in name or "EncDecAttention.v" in name:
            encoder += cost
    if not model.config.is_encoder_decoder:
        return everything, 0.0
    return encoder, everything - encoder


def peak_flops(device: torch.device, precision: str) -> float | None:
    """Return the peak FLOP/s of one device in bf16 or fp16, or None if it is not known, as in fp32."""
    if device.type != "cuda" or precision == "fp32":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in _HALF_PEAKS.items() if part in name), None)
