"""``ShardedGradScaler`` with the arguments of ``torch.distributed.fsdp.sharded_grad_scaler``."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from fullshard import optim
from fullshard.compat.torch_fsdp.sharding import accelerator_type
from fullshard.core.comm import as_mesh
from fullshard.core.policy import ShardingStrategy

__all__ = ["ShardedGradScaler"]


class ShardedGradScaler(optim.ShardedGradScaler):
    """Loss scaling for float16, in which either all ranks skip a step or none does.

    It has the methods of ``torch.amp.GradScaler``. Ranks that share the optimizer's shards always agree on whether a
    gradient is inf or nan; ``process_group`` is only needed to agree with further ranks.

    Args:
        device: Type of the device that the loss is on; None: this machine's accelerator, or the CPU if there is none
            (torch's default is ``"cuda"``, and without CUDA its scaler does nothing).
        init_scale: Initial scale.
        backoff_factor: Factor applied to the scale after an inf or nan.
        growth_factor: Factor applied to the scale after ``growth_interval`` steps without inf or nan.
        growth_interval: A number of steps.
        enabled: False disables scaling.
        process_group: Further ranks to agree with; None: only those that share the shards.
    """

    def __init__(
        self,
        device: str | None = None,
        init_scale: float = 2.0**16,
        backoff_factor: float = 0.5,
        growth_factor: float = 2.0,
        growth_interval: int = 2000,
        enabled: bool = True,  # noqa: FBT001, FBT002
        process_group: Any = None,
    ) -> None:
        """Create the scaler; the order of arguments is torch's."""
        if device is None:
            device = accelerator_type() or "cpu"
        super().__init__(
            device,
            init_scale=init_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            enabled=enabled,
        )
        self._further = None if process_group is None else as_mesh(process_group, ShardingStrategy.FULL_SHARD, None)

    def _unscale_grads_(
        self,
        optimizer: Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,  # noqa: FBT001 (torch's signature)
    ) -> dict[torch.device, torch.Tensor]:
        found = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        if self._further is not None:
            flag = torch.stack([one.to(self._further.device) for one in found.values()]).amax().reshape(1)
            self._further.announce("whether a gradient is inf or nan")
            self._further.all_reduce(flag, "max").wait()
            for one in found.values():
                one.copy_(flag.reshape(()))
        return found
