"""Going on from a sharded checkpoint, whatever ranks wrote it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fullshard.comm import device_of, together, together_in_background
from fullshard.engine import mesh_of
from fullshard.optim.average import ExponentialMovingAverage
from fullshard.saving.pieces import Stepping, Target
from fullshard.saving.rng import restore_rng, rng_name
from fullshard.storage import CheckpointReader, Piece, read_index


@dataclass(frozen=True)
class Restored:
    """What a checkpoint held beside tensors.

    Attributes:
        path: Its directory.
        step: Optimizer steps taken.
        world_size: Ranks that wrote it.
        values: What ``save`` was given.
        metric: What ``save`` was given.
        rng_restored: Whether each rank's random state was set; not at another world size.
    """

    path: Path
    step: int
    world_size: int
    values: Mapping[str, Any]
    metric: float | None
    rng_restored: bool


def load_checkpoint(
    model: nn.Module, optimizer: Stepping | None, path: str | Path, *, average: ExponentialMovingAverage | None = None
) -> Restored:
    """Go on from a checkpoint of any world size and strategy; every rank calls it.

    Each rank reads the element ranges it holds and checks the checksum of every block it touches; beside the training
    state it needs the memory of one block.

    Args:
        model: The sharded model; its shards and persistent buffers are filled in place.
        optimizer: Its state and options are set; None: they are left as they are.
        path: The checkpoint's directory.
        average: The moving average of the model's weights, filled in place; None: it is not read.

    Returns:
        What it held beside tensors.

    Raises:
        CheckpointError: It is damaged or of another model; on every rank, with the same text. When it does not fit,
            nothing has changed; when a file turns out to be damaged, the model has been changed in part.
    """
    ranks, path = mesh_of(model), Path(path)
    index = together_in_background(ranks, lambda: read_index(path))
    target = together(ranks, lambda: Target(model, optimizer, index, average))
    device = device_of(ranks.device)
    together_in_background(ranks, device.for_thread(lambda: target.compare(CheckpointReader(path, index))))
    same_size = index.world_size == ranks.size

    def read() -> torch.Tensor | None:
        reader = CheckpointReader(path, index)
        for piece in sorted(target.pieces, key=lambda piece: (piece.name, piece.start)):
            reader.read(piece)
        if not same_size:
            return None
        name = rng_name(ranks.rank)
        rng = torch.empty(reader.entry(name).shape, dtype=torch.uint8)
        reader.read(Piece(name, tuple(rng.shape), 0, rng))
        return rng

    rng = together_in_background(ranks, device.for_thread(read))
    target.finish()
    if rng is not None:
        together(ranks, lambda: restore_rng(rng, ranks.device))
    return Restored(path, index.step, index.world_size, index.values, index.metric, rng_restored=rng is not None)
