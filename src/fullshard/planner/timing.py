"""The time of a step: its operators and collectives in order, on a compute stream and streams for collectives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from fullshard.errors import ConfigError
from fullshard.planner.hardware import Hardware
from fullshard.planner.work import Computed, Issued, Operator, Work


@dataclass(frozen=True)
class Timing:
    """The parts of a step, in seconds; they add up to ``step_s``.

    Attributes:
        step_s: The step.
        compute_s: Forward and backward, including hidden collectives. On a CPU, whose operators are not queued,
            also the time between them.
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


class Speed(Protocol):
    """Speed of operators and collectives; in seconds."""

    @property
    def host_s(self) -> float:
        """Time of the CPU between two operators."""
        ...

    @property
    def queues(self) -> bool:
        """True if operators are queued, so that the CPU issues some while others run."""
        ...

    def operator_seconds(self, operator: Operator) -> float:
        """Return how long an operator keeps the device busy; 0 for one that only makes a view."""
        ...

    def collective_seconds(self, issued: Issued) -> tuple[float, float]:
        """Return the time of a collective alone, and how much of it computation does not hide."""
        ...


def time_step(work: Work, speed: Speed, times: float = 1) -> Timing:
    """Return the time of ``work`` at ``speed``, equal on all ranks; all but the optimizer's part times ``times``.

    Operators run one after the other on the compute stream, none before the CPU has issued it. Collectives of a group
    run one after the other, beside the compute stream, each after what was computed before it was issued.
    """
    seconds = {key: speed.operator_seconds(operator) for key, operator in work.operators.items()}
    issued = compute = exposed = starved = 0.0
    busy: dict[range, float] = {}
    ends: dict[int, tuple[float, float]] = {}
    by_phase: dict[str, float] = {}
    for event in work.events:
        if isinstance(event, Computed):
            took = seconds[event.operator]
            if speed.queues:
                issued += speed.host_s
            else:
                took += speed.host_s
            if took:
                starved += max(issued - compute, 0.0)
                compute = max(issued, compute) + took
                by_phase[event.phase] = by_phase.get(event.phase, 0.0) + took
        elif isinstance(event, Issued):
            alone, never_hidden = speed.collective_seconds(event)
            busy[event.ranks] = max(compute, issued, busy.get(event.ranks, 0.0)) + alone
            ends[event.number] = busy[event.ranks], never_hidden
        elif event.number in ends:
            end, never_hidden = ends.pop(event.number)
            waited = max(end - compute, never_hidden)
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


class SheetSpeed:
    """The speed of a device by its data sheet: see :class:`Speed`.

    An operator takes the longer of its arithmetic and its bytes, and ``kernel_s`` (the roofline model, Williams et al.
    2009). Collectives are hidden in full.
    """

    queues = True

    def __init__(self, device: Hardware) -> None:
        """Use the data sheet of ``device``."""
        self._device = device
        self.host_s = device.host_s

    def operator_seconds(self, operator: Operator) -> float:
        """See :meth:`Speed.operator_seconds`.

        Raises:
            ConfigError: There is no figure for products in its dtype.
        """
        return operator_seconds(operator, self._device)

    def collective_seconds(self, issued: Issued) -> tuple[float, float]:
        """See :meth:`Speed.collective_seconds`."""
        return collective_seconds(issued, self._device), 0.0


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
    """Return the time of a collective alone.

    Ranks are numbered machine by machine. Inside a machine bytes go over its links. Between machines each of the
    group's devices in a machine has its own network port; a ring may use all of them, up to the rate of the links.
    """
    each = max(device.devices_each // issued.ranks.step, 1)  # of this group in one machine
    if len(issued.ranks) <= each:
        rate = device.link_bytes_per_s
    elif each == 1:
        rate = device.network_bytes_per_s
    else:
        rate = min(device.link_bytes_per_s, each * device.network_bytes_per_s)
    return device.latency_s + issued.sent_bytes / rate
