"""``ShardedGradScaler`` with the arguments of ``torch.distributed.fsdp.sharded_grad_scaler``."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from fullshard import optim
from fullshard.comm import as_mesh
from fullshard.compat.torch_fsdp.arguments import accelerator_type
from fullshard.policy import ShardingStrategy

__all__ = ["ShardedGradScaler"]


class ShardedGradScaler(optim.ShardedGradScaler):
    """Loss scaling for float16: all ranks skip a step, or none does.

    Used as ``torch.amp.GradScaler`` is: ``scale``, ``unscale_``, ``step``, ``update``, ``get_scale``, ``is_enabled``,
    ``state_dict``, ``load_state_dict``. Whether a gradient is inf or nan is compared over the ranks that share the
    optimizer's shards, whichever these are, so that ``process_group`` is needed only to compare with further ranks.

    Args:
        device: Type of the device that the loss is on; None: the accelerator of this machine, else the CPU (torch's
            default is ``"cuda"``, which without CUDA gives a scaler that does nothing).
        init_scale: The first scale.
        backoff_factor: What the scale is multiplied by after an inf or nan.
        growth_factor: What it is multiplied by after ``growth_interval`` steps without one.
        growth_interval: A number of steps.
        enabled: False: it does nothing.
        process_group: Further ranks to compare with; None: those that share the shards.
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
        """Take the arguments in torch's order."""
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
        allow_fp16: bool,  # noqa: FBT001 (torch calls it so)
    ) -> dict[torch.device, torch.Tensor]:
        found = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        if self._further is not None:
            flag = torch.stack([one.to(self._further.device) for one in found.values()]).amax().reshape(1)
            self._further.announce("whether a gradient is inf or nan")
            self._further.all_reduce(flag, "max").wait()
            for one in found.values():
                one.copy_(flag.reshape(()))
        return found
