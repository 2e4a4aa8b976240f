"""Stage ``memory``: a step's peak, allocation retries, waits of the CPU and kernels, each engine alone."""

from functools import partial

from benchmarks.gpu.machine import Machine
from benchmarks.gpu.races import measure_alone
from benchmarks.gpu.record import Case
from benchmarks.gpu.step import contests, limit_s


def cases(machine: Machine) -> list[Case]:
    """Return the same contests as stage ``step``."""
    return [Case(c.name, partial(measure_alone, machine, c), limit_s=limit_s(c)) for c in contests(machine)]
