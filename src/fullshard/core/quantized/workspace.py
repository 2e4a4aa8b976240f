"""Memory for one large dequantised weight on a CPU, kept from layer to layer."""

from __future__ import annotations

import threading
from itertools import islice
from math import prod
from typing import Any

import torch

from fullshard.core.comm import device_of
from fullshard.core.quantized.formats import Format, Shape

RECYCLED_BELOW = 32 << 20
"""Smallest allocation that glibc returns to the system when freed, so that the next one needs new pages; in bytes."""


class _Kept(threading.local):
    """The memory of one thread: another one may run the same model at the same time."""

    memory: torch.Tensor | None = None


class Workspace:
    """Memory that the products of a model's quantised layers dequantise a large weight into, one after the other.

    Each thread that runs the model has its own.

    A new 64 MiB weight takes 16,384 page faults: 40 to 53 ms on two busy cores, into kept memory 7 to 9 ms. glibc
    recycles the memory of smaller ones, and on GPUs torch recycles all.

    Attributes:
        numel: Weights of the largest layer.
        keeps: False while a GPU's step is planned, on a CPU.
        most_parts: Parts of a weight that are dequantised, all if None. A plan of memory needs two: one is held while
            the next is made, and none is larger.
    """

    def __init__(self, numel: int = 0) -> None:
        """Start without memory."""
        self.numel = numel
        self.keeps = True
        self.most_parts: int | None = None
        self._kept = _Kept()

    def __reduce__(self) -> Any:
        """Copy and pickle it without its memory."""
        return Workspace, (self.numel,)

    def weight(
        self,
        format: Format,
        stored: tuple[torch.Tensor, torch.Tensor],
        shape: Shape,
        own: torch.dtype,
        dtype: torch.dtype,
    ) -> torch.Tensor | None:
        """Return a large weight in ``dtype``, valid until the thread's next call; None for a small one or on a GPU.

        Args:
            format: The format.
            stored: Codes and scales.
            shape: That of the weight.
            own: The weight's own dtype, to which its values are rounded first if the format does so.
            dtype: Dtype of the result.
        """
        codes, scales = stored
        numel = prod(shape)
        if not self.keeps or codes.device.type != "cpu" or numel * dtype.itemsize < RECYCLED_BELOW:
            return None
        kept = self._kept.memory
        if kept is None or kept.dtype != dtype or kept.numel() < numel:
            self._kept.memory = None  # freed before new memory is allocated
            with torch.inference_mode(mode=False):  # training after an evaluation writes to it
                self._kept.memory = kept = device_of(codes.device).empty(max(numel, self.numel), dtype)
        start = 0
        for part in islice(format.parts(codes, scales, shape, own, dtype), self.most_parts):
            kept[start : start + part.numel()].copy_(part)
            start += part.numel()
        return kept[:numel].view(shape)
