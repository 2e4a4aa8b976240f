"""Stage ``plan``: nothing runs here; plans need no GPU and are compared with the other stages' results."""

from typing import Any

from benchmarks.gpu.machine import Machine
from benchmarks.gpu.record import Case, Lacking


def cases(machine: Machine) -> list[Case]:
    """Return one case that says that there is nothing to check."""
    return [Case("planner", _run)]


def _run(limit_s: float) -> dict[str, Any]:
    raise Lacking("benchmarks/plan_gpu.py compares plans with the results of the stages memory and step, without a GPU")
