"""Stage ``plan``: whether the planner's figures hold on a GPU, once it plans for one."""

from typing import Any

from benchmarks.gpu.machine import Machine
from benchmarks.gpu.record import Case, Lacking


def cases(machine: Machine) -> list[Case]:
    """Return one case that says that there is nothing to check."""
    return [Case("planner", _run)]


def _run(limit_s: float) -> dict[str, Any]:
    raise Lacking("the planner counts the CPU's operators: nothing was compared with a GPU")
