"""Gradient clipping by the norm of all shards, equal to the unsharded norm."""

from __future__ import annotations

import math

import torch
from torch import nn

from fullshard.comm import Comm
from fullshard.errors import ConfigError


def clip_grad_norm_(model: nn.Module, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
    """Scale all gradients so that their global norm is at most ``max_norm``; every rank calls it after backward.

    The norm over ranks is ``(sum_r sum_i |g_ri|^p)^(1/p)``, of which each rank computes its inner sum: equal to
    ``torch.nn.utils.clip_grad_norm_`` on the unsharded model.

    Parameters left out of sharding are taken to have equal gradients on all ranks, and count once.

    Args:
        model: A sharded model whose gradients are reduced.
        max_norm: Largest norm, above zero; infinity only measures.
        norm_type: p, above zero, or infinity.

    Returns:
        The norm before clipping, 0-d, float32 or wider, the same on every rank.

    Raises:
        ConfigError: A number is out of range, or the model is not sharded.
    """
    if not max_norm > 0 or not norm_type > 0:
        raise ConfigError(f"max_norm and norm_type must be above zero; got {max_norm} and {norm_type}.")
    params = [p for p in model.parameters() if hasattr(p, "shard_comm")]
    if not params:
        raise ConfigError("clip_grad_norm_ found no sharded parameters: call fully_shard(model) first.")
    comm: Comm = params[0].shard_comm  # type: ignore[attr-defined]
    everywhere = [p for p in model.parameters() if not hasattr(p, "shard_comm")]  # left out of sharding: copies
    dtype = torch.float64 if any(p.dtype == torch.float64 for p in params) else torch.float32
    total = _global_norm(comm, _grads(params), norm_type, dtype)
    copies = torch.nn.utils.get_total_norm(_grads(everywhere), norm_type).to(total)
    total = torch.linalg.vector_norm(torch.stack([total, copies]), norm_type)
    torch.nn.utils.clip_grads_with_norm_([*params, *everywhere], max_norm, total)
    return total


def _grads(params: list[nn.Parameter]) -> list[torch.Tensor]:
    return [p.grad for p in params if p.grad is not None]


def _global_norm(comm: Comm, grads: list[torch.Tensor], norm_type: float, dtype: torch.dtype) -> torch.Tensor:
    """The norm of all ranks' ``grads``; ``dtype`` is the same on every rank, also on one without gradients."""
    local = torch.nn.utils.get_total_norm(grads, norm_type).to(device=comm.device, dtype=dtype).reshape(1)
    if math.isinf(norm_type):
        comm.all_reduce(local, "max").wait()
        return local[0]
    powered = local.pow(norm_type)
    comm.all_reduce(powered).wait()
    return powered[0].pow(1.0 / norm_type)
