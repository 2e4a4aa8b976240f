"""Offloaded shards in a plan, which distinguishes host and device memory although all tensors are the CPU's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from fullshard.core.comm.device import CpuDevice, Device
from fullshard.core.engine.registry import runtime_of
from fullshard.core.engine.step.lane import PermanentBuffer
from fullshard.errors import ConfigError
from fullshard.planner.hollow import HollowMode
from fullshard.planner.meter import Meter


class _Apart(CpuDevice):
    """The device of a rank with separate host memory: lanes see that their shards are not on it."""

    def __init__(self, meter: Meter, reduces_behind: int) -> None:
        super().__init__(torch.device("cpu"))
        self.reduces_behind = reduces_behind
        self.device = torch.device("meta")  # no tensor is on it, so shards always count as elsewhere
        self._meter = meter

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype)

    def empty_host(self, numel: int, dtype: torch.dtype, *, pinned: bool) -> torch.Tensor:
        made = torch.empty(numel, dtype=dtype)
        self._meter.to_host(made)
        return made


def host_of_gpu() -> Device | None:
    """Return a device that has host memory apart, in the rehearsal of a rank on a GPU; None elsewhere."""
    mode: Any = _get_current_dispatch_mode()
    return _Apart(mode.meter, 0) if isinstance(mode, HollowMode) and mode.has_host else None


def set_apart(model: torch.nn.Module, mode: HollowMode, phase: Callable[[], str]) -> None:
    """Count the shards of ``model`` as the host's from now on, and everything made only from them.

    Args:
        model: Sharded with ``offload_policy``.
        mode: The mode it runs in.
        phase: Returns the phase of a step: what the optimizer makes of nothing is the host's too.

    Raises:
        ConfigError: Weights are replicated.
    """
    meter, runtime = mode.meter, runtime_of(model)
    lanes = [lane for unit in runtime.units for lane in unit.lanes]
    if any(isinstance(lane.full, PermanentBuffer) for lane in lanes):
        raise ConfigError(
            "A plan for GPUs does not support sharding.cpu_offload with replicated weights yet (no_shard, or sharding."
            "frozen: replicate). Plan sharding.strategy=full_shard and sharding.frozen=shard."
        )
    apart = _Apart(meter, runtime.device.reduces_behind)
    for lane in lanes:
        meter.to_host(lane.shard)
        lane.device = apart

    def on_host(given: list[torch.Tensor]) -> bool:
        return all(map(meter.is_on_host, given)) if given else phase() == "optimizer"

    mode.on_host = on_host
