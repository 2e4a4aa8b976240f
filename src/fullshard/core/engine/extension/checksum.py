"""A checksum of all bits of a tensor, computed on its device."""

from __future__ import annotations

import torch

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
_CHUNK = 1 << 22  # elements: the weights and products take 32 MiB each
_FACTOR = 0x1E3779B97F4A7C15


@torch.no_grad()
def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Return an int64 scalar that depends on each bit of ``tensor`` and on its place; a change is missed once in 2^32.

    Memory: that of 4 million elements, also for a large contiguous tensor.
    """
    bits = tensor.detach().reshape(-1)
    bits = bits.view(_INTEGERS.get(bits.element_size(), torch.int64))
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for start in range(0, len(bits), _CHUNK):
        part = bits[start : start + _CHUNK]
        # Weights that look random: with plain places, changes of several elements could cancel.
        weights = torch.arange(start + 1, start + 1 + len(part), device=bits.device) * _FACTOR
        total += ((weights ^ (weights >> 29)) * part).sum()
    return total
