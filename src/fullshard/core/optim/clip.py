"""Gradient clipping by the norm over all shards, equal to the unsharded norm."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from fullshard.core.comm import Comm
from fullshard.core.optim.in_backward import refuse_steps_in_backward
from fullshard.core.optim.shards import by_comm, everyone_of
from fullshard.core.shards import on_rows
from fullshard.errors import ConfigError, TrainingError

_WIDE = (torch.float32, torch.float64)


@on_rows
def clip_grad_norm_(
    model: nn.Module | Iterable[nn.Parameter],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scale all gradients so that their global norm is at most ``max_norm``; every rank calls it after backward.

    The norm equals that of ``torch.nn.utils.clip_grad_norm_`` on the unsharded model, computed in float32 even where
    gradients are narrower. Parameters left out of sharding, or replicated, are assumed to have equal gradients on all
    ranks, and count once. Those of a group of the model's ranks, such as experts, count once for each group.

    As in torch, a norm that is not finite corrupts the gradients: an infinite norm makes finite ones zero and infinite
    ones nan, a nan norm makes all of them nan. Check the returned norm before stepping, or set ``error_if_nonfinite``;
    a :class:`~fullshard.optim.ShardedGradScaler` skips such a step automatically.

    Args:
        model: A sharded model with reduced gradients, or parameters of such models, in the same order on every rank.
        max_norm: Largest norm, above zero; infinity only measures and leaves every gradient unchanged.
        norm_type: p, above zero, or infinity.
        error_if_nonfinite: Raise if the norm is not finite, and leave the gradients unchanged.

    Returns:
        The norm before clipping, 0-d, float32 or wider, on the device of the ranks' collectives, the same on every
        rank; zero if no parameter has a gradient.

    Raises:
        ConfigError: A number is out of range, or the model is not sharded.
        ShardingError: The model's parameters step in backward.
        TrainingError: The norm is not finite and ``error_if_nonfinite`` is set; on every rank.
    """
    if not max_norm > 0 or not norm_type > 0:
        raise ConfigError(f"max_norm and norm_type must be above zero; got {max_norm} and {norm_type}.")
    params = list(model.parameters() if isinstance(model, nn.Module) else model)
    sharded = [p for p in params if hasattr(p, "shard_comm")]
    if not sharded:
        raise ConfigError("clip_grad_norm_ found no sharded parameters: call fully_shard(model) first.")
    refuse_steps_in_backward(sharded, "clip_grad_norm_")
    everywhere = [p for p in params if not hasattr(p, "shard_comm")]  # left out of sharding: equal on all ranks
    dtype = torch.float64 if any(p.dtype == torch.float64 for p in sharded) else torch.float32
    by_ranks = by_comm(sharded, everyone_of)  # or each group of experts would scale what all share by its own norm
    # Of a group's replicated parameters, those of its first rank count.
    counting = [(comm, [p for p in params if getattr(p, "shard_counts", True)]) for comm, params in by_ranks]
    norms = [_norm_over_ranks(comm, _grads(params), norm_type, dtype) for comm, params in counting]
    norms.append(_local_norm(_grads(everywhere), norm_type, norms[0]))
    total = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    if error_if_nonfinite and not math.isfinite(total.item()):
        raise TrainingError(
            f"The norm of the gradients (p = {norm_type:g}) is {total.item()} and must be a finite number; nothing was "
            "clipped. Lower the learning rate or the loss scale, or skip the step."
        )
    if math.isfinite(max_norm):
        torch.nn.utils.clip_grads_with_norm_([*sharded, *everywhere], max_norm, total)
    return total


def _grads(params: Sequence[nn.Parameter]) -> list[torch.Tensor]:
    return [p.grad for p in params if p.grad is not None and p.grad.numel()]  # an empty tensor has no largest element


def _local_norm(grads: Sequence[torch.Tensor], norm_type: float, like: torch.Tensor) -> torch.Tensor:
    """Return the norm of this rank's ``grads``, 0-d, with dtype and device of ``like``; zero if there are none."""
    wide = [g for g in grads if g.dtype in _WIDE]
    # torch's norm of a list has the list's dtype: bfloat16 would keep 3 digits, float16 overflows at 65504.
    narrow = [torch.linalg.vector_norm(g, norm_type, dtype=like.dtype) for g in grads if g.dtype not in _WIDE]
    norms = [torch.nn.utils.get_total_norm(wide, norm_type), *narrow]
    return torch.linalg.vector_norm(torch.stack([norm.to(like) for norm in norms]), norm_type)


def _norm_over_ranks(comm: Comm, grads: list[torch.Tensor], norm_type: float, dtype: torch.dtype) -> torch.Tensor:
    """Return the norm of all ranks' ``grads``; ``dtype`` is the same on every rank, also on one without gradients."""
    local = _local_norm(grads, norm_type, torch.empty((), dtype=dtype, device=comm.device))
    comm.announce("norm of the gradients")
    if math.isinf(norm_type):
        # The maximum over ranks may lose a nan (in gloo it depends on the order of ranks), so nan is sent as a flag.
        both = torch.stack([local, local.isnan().to(dtype)])
        comm.all_reduce(both, "max").wait()
        largest, any_nan = both.unbind()
        return largest.masked_fill(any_nan > 0, math.nan)
    powered = local.pow(norm_type).reshape(1)
    comm.all_reduce(powered).wait()
    return powered.reshape(()).pow(1.0 / norm_type)
