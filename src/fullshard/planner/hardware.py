"""Data sheets of devices: what they compute, move and hold, and the share that a training step achieves."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import torch

from fullshard.errors import ConfigError

NETWORK_BYTES_PER_S = 50e9
"""Between machines, each way and device: 400 Gbit/s."""

DEVICES_EACH = 8
"""Devices of a machine."""


@dataclass(frozen=True)
class Hardware:
    """A device and its links. Sizes are bytes, rates those that a step gets, not the peaks of a data sheet.

    Attributes:
        name: Its name for ``--gpu``.
        memory_bytes: Memory of the device, as its driver reports it.
        outside_bytes: Part of it outside of torch's allocator: the context, kernels, NCCL's buffers.
        workspace_bytes: Workspaces of matrix products, which the allocator counts.
        flops_per_s: Of matrix products, by dtype.
        bytes_per_s: Between the device's memory and its processors.
        kernel_s: Time of an operator in addition to its arithmetic and its bytes.
        host_s: Time of the CPU to issue an operator of torch, including views.
        devices_each: Devices of a machine.
        link_bytes_per_s: Between two devices of a machine, each way.
        network_bytes_per_s: Between machines, each way and device.
        latency_s: Latency of a collective.
        has_host: True if host memory is separate from the device's.
    """

    name: str
    memory_bytes: int
    outside_bytes: int
    workspace_bytes: int
    flops_per_s: dict[torch.dtype, float]
    bytes_per_s: float
    kernel_s: float
    host_s: float
    link_bytes_per_s: float
    network_bytes_per_s: float = NETWORK_BYTES_PER_S
    devices_each: int = DEVICES_EACH
    latency_s: float = 20e-6
    has_host: bool = True


def hardware(
    name: str, *, network_bytes_per_s: float = NETWORK_BYTES_PER_S, devices_each: int = DEVICES_EACH
) -> Hardware:
    """Return the data sheet of a GPU.

    Args:
        name: One of :func:`names`; case does not matter.
        network_bytes_per_s: Between machines, each way and device.
        devices_each: Devices of a machine.

    Raises:
        ConfigError: There is no sheet for it.
    """
    sheets, shares = _table()["devices"], _table()["shares"]
    sheet = sheets.get(name.lower())
    if sheet is None:
        raise ConfigError(f"There is no data sheet for {name!r}. Known are {', '.join(sheets)}; or pass its memory.")
    rates = {getattr(torch, dtype): rate * shares["flops"] for dtype, rate in sheet["flops_per_s"].items()}
    return Hardware(
        name=name.lower(),
        memory_bytes=int(sheet["memory_gib"] * (1 << 30)),
        outside_bytes=int(shares["outside_gib"] * (1 << 30)),
        workspace_bytes=int(sheet["workspace_mib"] * (1 << 20)),
        flops_per_s=rates,
        bytes_per_s=sheet["bytes_per_s"] * shares["bytes"],
        kernel_s=shares["kernel_s"],
        host_s=shares["host_s"],
        link_bytes_per_s=sheet["link_bytes_per_s"] * shares["link"],
        network_bytes_per_s=network_bytes_per_s * shares["link"],
        devices_each=devices_each,
    )


def names() -> list[str]:
    """Return the names of the GPUs with a data sheet."""
    return list(_table()["devices"])


@cache
def _table() -> dict[str, Any]:
    text = resources.files("fullshard.planner").joinpath("hardware.json").read_text(encoding="utf-8")
    return json.loads(text)
