"""How long a step takes: its operators and collectives in order, on a compute stream and streams for collectives."""

from __future__ import annotations

from dataclasses import dataclass

from fullshard.errors import ConfigError
from fullshard.planner.hardware import Hardware
from fullshard.planner.work import Awaited, Computed, Issued, Operator, Work


@dataclass(frozen=True)
class Timing:
    """The parts of a step, in seconds; they add up to ``step_s``.

    Attributes:
        step_s: The step.
        compute_s: Forward and backward, collectives that are hidden behind them included.
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
    """Return how long ``work`` takes on ``device``, every rank alike; all but the optimizer's part ``times`` as long.

    Operators run one after the other on the compute stream, none before the CPU has issued it. An operator takes the
    longer of its arithmetic and its bytes, and ``kernel_s`` (the roofline model, Williams et al. 2009). Collectives of
    a group run one after the other, beside the compute stream, each after what was computed before it was issued.
    """
    seconds = {key: operator_seconds(operator, device) for key, operator in work.operators.items()}
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
            started = max(compute, issued, busy.get(event.ranks, 0.0))
            ends[event.number] = busy[event.ranks] = started + collective_seconds(event, device)
        elif isinstance(event, Awaited):
            exposed += max(ends[event.number] - compute, 0.0)
            compute = max(compute, ends[event.number])
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


def operator_seconds(operator: Operator, device: Hardware) -> float:
    """Return how long an operator keeps the device busy; 0 for one that only makes a view.

    Raises:
        ConfigError: There is no figure for products in its dtype.
    """
    if not operator.nbytes:
        return 0.0
    return max(_arithmetic(operator, device), operator.nbytes / device.bytes_per_s) + device.kernel_s


def _arithmetic(operator: Operator, device: Hardware) -> float:
    if not operator.flops:
        return 0.0
    rate = None if operator.dtype is None else device.flops_per_s.get(operator.dtype)
    if rate is None:
        has = ", ".join(map(str, device.flops_per_s))
        raise ConfigError(
            f"{device.name} has no figure for matrix products in {operator.dtype}, as in this step; it has some "
            f"for {has}. Plan another precision."
        )
    return operator.flops / rate


def collective_seconds(issued: Issued, device: Hardware) -> float:
    """Return how long a collective takes alone.

    Ranks are numbered machine by machine. Inside a machine bytes go over its links. Between machines each of the
    group's devices in a machine has its own network port, and a ring may use all of them, but no more than the links.
    """
    each = max(device.devices_each // issued.ranks.step, 1)  # of this group in one machine
    if len(issued.ranks) <= each:
        rate = device.link_bytes_per_s
    elif each == 1:
        rate = device.network_bytes_per_s
    else:
        rate = min(device.link_bytes_per_s, each * device.network_bytes_per_s)
    return device.latency_s + issued.sent_bytes / rate
