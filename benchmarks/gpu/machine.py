"""What this machine is, asked in a process of its own: one that has asked CUDA cannot fork ranks that use it."""

import os
import subprocess
from collections.abc import Callable
from typing import Any

import torch
from ranks import on_ranks

PROBE_S = 120.0


class Machine:
    """The devices, and how ranks are started here.

    Attributes:
        facts: What :func:`_facts` found.
        dry: Whether sizes are tiny, and the CPU will do.
        start: How processes start: by fork, which is quick, unless something asked CUDA for its devices before.
    """

    def __init__(self, *, dry: bool) -> None:
        """Probe the devices."""
        # Where it works, CUDA is asked without being initialised.
        os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
        self.dry = dry
        self.start = "fork"
        self.facts = self.alone(_facts, limit_s=PROBE_S)
        if self.facts["forked_too_late"]:
            self.start = "spawn"
            self.facts = self.alone(_facts, limit_s=PROBE_S)

    @property
    def cuda(self) -> bool:
        """Whether measurements run on GPUs."""
        return self.facts["devices"] > 0 and not self.dry

    def devices_suffice(self, world: int) -> bool:
        """Whether each of ``world`` ranks has a device of its own, so that torch's engines can take part."""
        return not self.cuda or self.facts["devices"] >= world

    def together(self, world: int, work: Callable[..., Any], *args: Any, limit_s: float) -> list[Any]:
        """Run ``work(comm, *args)`` on ``world`` ranks; see :func:`ranks.on_ranks`."""
        return on_ranks(world, work, *args, timeout_s=limit_s, start=self.start, join_timeout_s=limit_s)

    def alone(self, work: Callable[..., Any], *args: Any, limit_s: float) -> Any:
        """Run ``work(*args)`` in a process without a process group."""
        return on_ranks(1, _bare, work, *args, timeout_s=limit_s, start=self.start, join_timeout_s=None)[0]


def _bare(_comm: None, work: Callable[..., Any], *args: Any) -> Any:
    return work(*args)


def _facts() -> dict[str, Any]:
    """Return the first device's name and memory, the number of devices, and torch's version."""
    forked_too_late = torch.cuda._is_in_bad_fork()
    there = not forked_too_late and torch.cuda.is_available()
    found: dict[str, Any] = {
        "forked_too_late": forked_too_late,
        "devices": torch.cuda.device_count() if there else 0,
        "name": "CPU",
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "torch": torch.__version__,
    }
    if there:
        about = torch.cuda.get_device_properties(0)
        found |= {"name": about.name, "memory_bytes": about.total_memory}
    return found


def output_of(*command: str) -> str:
    """Return what a program of this machine prints, or why it did not."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{type(error).__name__}: {error}"
    return (done.stdout + done.stderr).strip()
