"""The time of a step: its operators and collectives in order, on streams, and the data sheets of devices."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import torch

from fullshard.errors import ConfigError
from fullshard.planner.work import Computed, Issued, Operator, Work

NETWORK_BYTES_PER_S = 50e9
"""Between machines, each way and device: 400 Gbit/s."""


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
    devices_each: int = 8
    latency_s: float = 20e-6
    has_host: bool = True


def hardware(name: str) -> Hardware:
    """Return the data sheet of a GPU: one of :func:`names`; case does not matter.

    Raises:
        ConfigError: There is no sheet for it.
    """
    sheets, shares = _table()["devices"], _table()["shares"]
    sheet = sheets.get(name.lower())
    if sheet is None:
        raise ConfigError(f"There is no data sheet for {name!r}. Known are {', '.join(sheets)}; or pass its memory.")
    rates = {getattr(torch, dtype): rate * shares["flops"] for dtype, rate in sheet["flops_per_s"].items()}
    if torch.float8_e4m3fn in rates:  # of weights and activations; gradients are e5m2
        rates[torch.float8_e5m2] = rates[torch.float8_e4m3fn]
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
        network_bytes_per_s=NETWORK_BYTES_PER_S * shares["link"],
    )


def names() -> list[str]:
    """Return the names of the GPUs with a data sheet."""
    return list(_table()["devices"])


@cache
def _table() -> dict[str, Any]:
    text = resources.files("fullshard.planner").joinpath("hardware.json").read_text(encoding="utf-8")
    return json.loads(text)


@dataclass(frozen=True)
class Timing:
    """The parts of a step, in seconds; they add up to ``step_s``.

    Attributes:
        step_s: The step.
        compute_s: Forward and backward, including hidden collectives.
        optimizer_s: The optimizer's step.
        exposed_s: Waiting for collectives.
        issue_s: Waiting for the CPU, which issues operators more slowly than the device runs them.
        flops: Floating-point operations of products in the step, on this rank.
    """

    step_s: float
    compute_s: float
    optimizer_s: float
    exposed_s: float
    issue_s: float
    flops: int


def time_step(work: Work, device: Hardware, times: float = 1) -> Timing:
    """Return the time of ``work`` on ``device``, equal on all ranks; all but the optimizer's part times ``times``.

    Operators run one after the other on the compute stream, none before the CPU has issued it. Collectives of a group
    run one after the other, beside the compute stream, each after what was computed before it was issued.

    Raises:
        ConfigError: The device has no figure for products in a dtype of the step.
    """
    seconds = {key: operator_seconds(device, operator) for key, operator in work.operators.items()}
    issued = compute = exposed = starved = 0.0
    busy: dict[range, float] = {}
    ends: dict[int, float] = {}
    by_phase: dict[str, float] = {}
    for event in work.events:
        if isinstance(event, Computed):
            issued += device.host_s
            took = seconds[event.operator]
            if took:
                starved += max(issued - compute, 0.0)
                compute = max(issued, compute) + took
                by_phase[event.phase] = by_phase.get(event.phase, 0.0) + took
        elif isinstance(event, Issued):
            begin = max(compute, issued, busy.get(event.ranks, 0.0))
            busy[event.ranks] = ends[event.number] = begin + collective_seconds(device, event)
        elif event.number in ends:
            waited = max(ends[event.number] - compute, 0.0)
            exposed, compute = exposed + waited, compute + waited
    end = max(compute, issued)
    optimizer = by_phase.pop("optimizer", 0.0)
    flops = sum(work.operators[event.operator].flops for event in work.events if isinstance(event, Computed))
    return Timing(
        step_s=(end - optimizer) * times + optimizer,
        compute_s=sum(by_phase.values()) * times,
        optimizer_s=optimizer,
        exposed_s=exposed * times,
        issue_s=(starved + end - compute) * times,
        flops=round(flops * times),
    )


def operator_seconds(device: Hardware, operator: Operator) -> float:
    """Return how long an operator keeps the device busy; 0 for one that only makes a view.

    It is the longer of its arithmetic and its bytes, and ``kernel_s`` (the roofline model, Williams et al. 2009).

    Raises:
        ConfigError: There is no figure for products in its dtype.
    """
    if not operator.nbytes:
        return 0.0
    rate = None if operator.dtype is None else device.flops_per_s.get(operator.dtype)
    if operator.flops and rate is None:
        raise ConfigError(
            f"{device.name} has no figure for matrix products in {operator.dtype}, as in this step; it has some "
            f"for {', '.join(map(str, device.flops_per_s))}. Plan another precision."
        )
    arithmetic = operator.flops / rate if rate else 0.0
    return max(arithmetic, operator.nbytes / device.bytes_per_s) + device.kernel_s


def collective_seconds(device: Hardware, issued: Issued) -> float:
    """Return the time of a collective, which computation hides in full.

    Ranks are numbered machine by machine. Inside a machine bytes go over its links. Between machines each of the
    group's devices in a machine has its own network port; a ring may use all of them, up to the rate of the links.
    """
    each = max(device.devices_each // issued.ranks.step, 1)  # of this group in one machine
    rate = device.link_bytes_per_s
    if len(issued.ranks) > each:
        rate = min(rate, each * device.network_bytes_per_s) if each > 1 else device.network_bytes_per_s
    return device.latency_s + issued.sent_bytes / rate
