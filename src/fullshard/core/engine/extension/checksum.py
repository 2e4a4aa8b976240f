"""Checksums of all bits of tensors, computed on their devices at the speed of memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fullshard.core.comm.memory import on_gpu

_ROW = 1 << 16
"""Words of 8 bytes whose products with the weights are added up first."""
_ROWS_ON_CPU, _ROWS_ON_GPU = 4, 64
"""Rows at once: a core keeps 2 MiB in its cache, a GPU needs 32 MiB for its bandwidth."""

_FACTOR = 0x1E3779B97F4A7C15


@torch.no_grad()
def checksums(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return a 64-bit checksum of each tensor, which depends on each bit and on its place.

    One element that differs always changes it, several differing ones all but once in 2^32. The device is waited for
    once. Memory beside the tensors: twice that of the largest one, at most 4 MiB, on a GPU 96 MiB; a tensor that is not
    contiguous is copied.

    Args:
        tensors: Of any dtypes and shapes, on the CPU or on one GPU each; on the meta device their checksum is 0.
    """
    found, of_device = [0] * len(tensors), dict[torch.device, list[int]]()
    for place, tensor in enumerate(tensors):
        if not tensor.is_meta and tensor.numel():
            of_device.setdefault(tensor.device, []).append(place)
    for device, places in of_device.items():
        most = max(tensors[place].numel() * tensors[place].itemsize for place in places)
        on_device = _Checksums(device, -(-most // 8))
        # In a plan, whose tensors have no values, numpy reads zeros where tolist() is refused.
        sums = torch.stack([on_device.of(tensors[place]) for place in places]).cpu().numpy().tolist()
        for place, value in zip(places, sums, strict=True):
            found[place] = value
    return found


class _Checksums:
    """Checksums on one device."""

    def __init__(self, device: torch.device, most: int) -> None:
        """Take memory for tensors of up to ``most`` words."""
        self._on_gpu = on_gpu(device)  # also in a plan for one
        self._weights = _weights(min(_ROW, most), device)
        rows = _ROWS_ON_GPU if self._on_gpu else _ROWS_ON_CPU
        self._mixed = torch.empty(min(rows * _ROW, most), dtype=torch.int64, device=device)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the checksum of a tensor, a scalar on its device."""
        bits = tensor.detach().contiguous().view(-1).view(torch.uint8)
        sums = torch.cat([self._row_sums(part) for part in bits.split(8 * self._mixed.numel())])
        if len(sums) > _ROW:
            return self.of(sums)
        return (_mix(sums, torch.empty_like(sums)) * self._weights[: len(sums)]).sum()

    def _row_sums(self, part: torch.Tensor) -> torch.Tensor:
        if part.storage_offset() % 8 or len(part) % 8:
            padded = part.new_zeros(-(-len(part) // 8) * 8)
            padded[: len(part)] = part
            part = padded
        words = part.view(torch.int64)
        mixed, rows = _mix(words, self._mixed[: len(words)]), len(words) // _ROW
        parts = [mixed[: rows * _ROW].view(rows, _ROW)] if rows else []
        parts += [mixed[rows * _ROW :].view(1, -1)] if len(words) % _ROW else []
        return torch.cat([self._products(part) for part in parts])

    def _products(self, rows: torch.Tensor) -> torch.Tensor:
        weights = self._weights[: rows.shape[1]]
        # A GPU has no matrix product of integers; a core's makes no second copy.
        return (rows * weights).sum(1) if self._on_gpu else torch.mv(rows, weights)


def _mix(words: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Write ``words`` so that their upper half is in the lower one too; no two words become the same.

    In a product modulo 2^64 only the lower bits of its weight count for an upper bit: two signs could cancel.
    """
    torch.bitwise_right_shift(words, 32, out=out)
    return out.bitwise_xor_(words)


def _weights(count: int, device: torch.device) -> torch.Tensor:
    """Return numbers that look random, because with plain places several changes could cancel, and are odd.

    The product of an odd number and a difference is never zero modulo 2^64.
    """
    places = torch.arange(1, count + 1, device=device) * _FACTOR
    return (places ^ (places >> 29)) | 1
