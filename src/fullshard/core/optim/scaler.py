"""Loss scaling for float16 over shards: all ranks skip a step, or none does."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.optim import Optimizer

from fullshard.core.comm import Comm
from fullshard.core.optim.in_backward import refuse_steps_in_backward
from fullshard.core.optim.shards import by_comm, everyone_of
from fullshard.core.shards import on_rows
from fullshard.errors import ConfigError


class ShardedGradScaler(torch.amp.GradScaler):
    """torch's ``GradScaler`` for sharded models: same usage and arguments, on every rank.

    A rank has only its own rows of the gradients. Whether they contain an inf or nan is therefore compared over the
    ranks that share the shards whenever an optimizer's gradients are unscaled, with one all-reduce of one number (also
    on a rank whose shards have no gradient). So all ranks step or skip, and change the scale, in the same way.

    It requires float32 shards that compute in float16: ``MixedPrecision(param="float16", reduce="float32")``.
    Parameters left out of sharding are assumed to have equal gradients on all ranks. Every rank calls ``scale``,
    ``unscale_``, ``step`` and ``update`` in the same order; ``state_dict()`` is the same on all of them.

    A step::

        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)  # only if gradients are read or clipped before the step
        clip_grad_norm_(model, 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    """

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the optimizer's gradients by the scale; on every rank, at most once a step, before clipping.

        Raises:
            ConfigError: The optimizer has no sharded parameters, or float16 ones.
            ShardingError: Its parameters step in backward.
        """
        self._follow_gradients(optimizer)
        super().unscale_(optimizer)

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Unscale if that was not done, and step, or skip if a gradient on any rank is inf or nan; on every rank.

        Returns:
            The result of ``optimizer.step``; None if the step was skipped.

        Raises:
            ConfigError: The optimizer has no sharded parameters, or float16 ones.
            ShardingError: Its parameters step in backward.
        """
        self._follow_gradients(optimizer)
        return super().step(optimizer, *args, **kwargs)

    @on_rows
    def _follow_gradients(self, optimizer: Optimizer) -> None:
        """Move the scale to host memory if the optimizer's shards are there (CPU offload).

        torch copies the scale to the gradients' device without waiting for the copy. From the device to the host that
        is a race with the CPU, which reads the copy at once.
        """
        if not self.is_enabled():
            return
        scale, growth = self._scale, self._growth_tracker
        if scale is None or growth is None or scale.device.type == "cpu":
            return
        if any(p.device.type == "cpu" for p in _params(optimizer)):
            self._scale, self._growth_tracker = scale.cpu(), growth.cpu()

    @on_rows
    def _unscale_grads_(
        self,
        optimizer: Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,  # noqa: FBT001 (torch's signature)
    ) -> dict[torch.device, torch.Tensor]:
        """Unscale this rank's gradients and return, for each device, whether any rank found an inf or nan.

        torch calls it from ``unscale_`` and, with a scale of one, for optimizers that unscale gradients in their step.
        """
        params = list(_params(optimizer))
        comms = _comms(params)
        refuse_steps_in_backward(params, "ShardedGradScaler")
        _require_wide(params)
        found = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        if not found:  # no shard of this rank has a gradient
            found = {found_inf.device: found_inf}
        for comm in comms:
            flag = torch.stack([one.to(comm.device) for one in found.values()]).amax().reshape(1)
            comm.announce("whether a gradient is inf or nan")
            comm.all_reduce(flag, "max").wait()
            for one in found.values():
                one.copy_(flag.reshape(()))
        return found


def _params(optimizer: Optimizer) -> Iterator[torch.nn.Parameter]:
    return (param for group in optimizer.param_groups for param in group["params"])


def _comms(params: Iterable[torch.nn.Parameter]) -> list[Comm]:
    """Return the groups of ranks that step ``params`` together, in the same order on every rank."""
    comms = [comm for comm, _ in by_comm(params, everyone_of)]
    if not comms:
        raise ConfigError(
            "ShardedGradScaler found no sharded parameters in the optimizer: call fully_shard(model) first, and build "
            "the optimizer on its parameters."
        )
    return comms


def _require_wide(params: Iterable[torch.nn.Parameter]) -> None:
    """Refuse float16 shards, by their dtype: every rank knows it, also one that has no gradient of them."""
    narrow = [p for p in params if p.requires_grad and p.dtype == torch.float16]
    if narrow:
        raise ConfigError(
            f"ShardedGradScaler unscales float32 gradients; {len(narrow)} parameters of the optimizer are float16. "
            "Keep the model in float32 and compute in float16: "
            'fully_shard(model, mp_policy=MixedPrecision(param="float16", reduce="float32")).'
        )
