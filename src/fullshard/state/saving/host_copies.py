"""Copies in host memory of the state that a rank saves, so that training may change it while a thread writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from fullshard.core.comm import Mesh, device_of, together
from fullshard.state.storage import Piece, SaveJob


class HostCopies:
    """Host memory of one rank, reused between saves."""

    def __init__(self, ranks: Mesh) -> None:
        """Start without memory."""
        self._ranks = ranks
        self._host: dict[int, torch.Tensor] = {}

    def take(self, job: SaveJob) -> SaveJob:
        """Return the job with its pieces copied; every rank calls it."""
        pairs = together(self._ranks, lambda: self.pairs(job.plan.pieces))
        ready = device_of(self._ranks.device).copy_to_host(pairs)
        hosts = (host for host, _ in pairs)
        copies = [Piece(p.name, p.shape, p.start, host) for p, host in zip(job.plan.pieces, hosts, strict=True)]
        return replace(job, plan=replace(job.plan, pieces=copies), ready=ready)

    def clear(self) -> None:
        """Free the memory."""
        self._host = {}

    def pairs(self, pieces: Sequence[Piece]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return host memory for each piece, paired with the piece's own; the last save's if it fits. Any rank."""
        device, pinned = device_of(self._ranks.device), self._ranks.device.type == "cuda"
        pairs, used = [], {}
        for number, piece in enumerate(pieces):
            # Kept between saves: 1.3 GB take 3.8 s to copy into new memory (page faults), then 0.3 to 0.8 s.
            host = self._host.get(number)
            if host is None or (host.dtype, host.shape) != (piece.tensor.dtype, piece.tensor.shape):
                host = device.empty_host(piece.tensor.numel(), piece.tensor.dtype, pinned=pinned)
            used[number] = host
            pairs.append((host, piece.tensor))
        self._host = used
        return pairs
