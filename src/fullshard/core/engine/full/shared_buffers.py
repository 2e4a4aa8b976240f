"""Buffers that follow the data (running means of BatchNorm): comparing them between ranks and making them equal."""

from __future__ import annotations

import warnings
import zlib

import torch
from torch import nn

from fullshard.core.engine.full.state import left_out, persistent_buffers
from fullshard.core.engine.registry import runtime_of
from fullshard.core.engine.step.runtime import Runtime


def warn_if_buffers_differ(runtime: Runtime) -> None:
    """Warn on every rank if ranks hold different values of a persistent buffer. Every rank calls it.

    Each rank evaluates with its own buffers, and rank 0's are saved.
    """
    buffers = [pair for top in runtime.root.modules for pair in persistent_buffers(top) if not pair[1].is_meta]
    if not buffers or runtime.mesh.size == 1:
        return
    sums = {name: _checksum(buffer) for name, buffer in buffers}
    by_rank = runtime.mesh.all_gather_object(sums)
    differing = [name for name in sums if any(of_rank.get(name) != sums[name] for of_rank in by_rank)]
    if differing:
        warnings.warn(
            f"{len(differing)} buffers, such as {differing[0]}, differ between ranks: they follow each rank's own "
            "data, so ranks evaluate differently, and rank 0's are saved. Call fullshard.broadcast_buffers(model) "
            "before, or use layers with common statistics (SyncBatchNorm).",
            stacklevel=2,
        )


def _checksum(buffer: torch.Tensor) -> int:
    """Return a checksum of the bytes: some dtypes, such as those of 8 bits, cannot be summed."""
    return zlib.crc32(buffer.detach().reshape(-1).cpu().view(torch.uint8).numpy().tobytes())


def broadcast_buffers(model: nn.Module) -> None:
    """Set the model's persistent buffers to rank 0's values on every rank. Every rank calls it.

    Raises:
        ShardingError: The model is not sharded.
    """
    mesh = runtime_of(model).mesh
    if mesh.size == 1:
        return
    for name, buffer in persistent_buffers(model):
        mesh.announce(f"broadcast of buffer {name}")
        sent = buffer.detach().to(mesh.device).contiguous()
        mesh.broadcast(sent)
        buffer.detach().copy_(sent)


def average_ignored_gradients(model: nn.Module) -> None:
    """Average the gradients of parameters left out of sharding over ranks; every rank calls it after backward.

    ``fully_shard`` leaves ``ignored_params`` alone: without this call each rank would train its own. A parameter
    without a gradient on this rank counts as zeros where another rank has one.

    Raises:
        ShardingError: The model is not sharded.
    """
    mesh = runtime_of(model).mesh
    params = {name: param for name, param in left_out(model).items() if param.requires_grad}
    have = torch.tensor([float(param.grad is not None) for param in params.values()], device=mesh.device)
    mesh.announce("which ignored parameters got a gradient")
    mesh.all_reduce(have).wait()
    for (name, param), ranks in zip(params.items(), have.tolist(), strict=True):
        if ranks:
            gradient = torch.zeros_like(param) if param.grad is None else param.grad
            mean = gradient.detach().to(mesh.device).contiguous()
            mesh.announce(f"mean gradient of {name}")
            mesh.all_reduce(mean).wait()
            param.grad = gradient.copy_(mean.div_(mesh.size))
