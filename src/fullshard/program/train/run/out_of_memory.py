"""The message of a run that is out of memory: the plan next to measurements, and settings that need less."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fullshard.core.comm import Comm, free_memory
from fullshard.core.engine import memory_summary
from fullshard.program.train.run.assemble import Assembly
from fullshard.program.train.run.step import peak_memory_bytes
from fullshard.program.train.setup.devices import Choice
from fullshard.program.train.setup.optimizers import held_state_bytes
from fullshard.sizes import format_bytes

_CPU_ALLOCATOR = "DefaultCPUAllocator"
"""Name in torch's RuntimeError when the system refuses memory, which has no error class of its own."""

_IN_GENERAL = (
    "Less is needed with training.gradient_checkpointing=true, training.fused_cross_entropy=true, a smaller "
    "training.per_device_train_batch_size with more training.gradient_accumulation_steps, or more ranks."
)


@dataclass(frozen=True)
class Planned:
    """The plan that a run was started with."""

    values: Mapping[str, Any]  # JSON-able values, for the files of the run
    table: str  # the plan of this rank, for people
    remedies: Callable[[], str]  # plans settings that need less and returns lines about them; this rank only
    chosen: tuple[Choice, ...] = ()  # what the plans of all ranks decided


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocation was refused, by the GPU or by the system."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and _CPU_ALLOCATOR in str(error)


def explain(error: BaseException, comm: Comm, parts: Assembly | None, planned: Planned | None) -> str:
    """Return the message of a rank that is out of memory; that rank only.

    Args:
        error: The exception that was raised.
        comm: The ranks.
        parts: The run; None if it is not assembled yet.
        planned: Its plan; None if there is none.
    """
    first = (str(error).splitlines() or [""])[0]
    lines = [f"Rank {comm.rank} of {comm.size} is out of memory: {first}", "", "measured on this rank:"]
    lines += [f"{label:<28}{format_bytes(size):>12}" for label, size in _measured(comm, parts).items()]
    if planned is None:
        return "\n".join([*lines, "", _IN_GENERAL])
    return "\n".join([*lines, "", f"planned: {planned.table}", "", planned.remedies() or _IN_GENERAL])


def _measured(comm: Comm, parts: Assembly | None) -> dict[str, int]:
    """Return the engine's account of this rank's memory, the peak of its allocator or process, and what is free."""
    sizes: dict[str, int] = {}
    if parts is not None:
        held = memory_summary(parts.model)
        sizes = {
            "shards": held["parameters"],
            "optimizer state": held_state_bytes(parts.optimizer),
            "gathered units, peak": held["gathered_peak"],
            "unsharded gradients, peak": held["gradient_buffer_peak"],
            "gradients of the shards": held["gradients"],
        }
    on_gpu = comm.device.type == "cuda"
    sizes["tensors, peak" if on_gpu else "process, peak"] = peak_memory_bytes(comm.device)
    if on_gpu:  # not run on a GPU yet
        sizes["reserved by the allocator"] = torch.cuda.memory_reserved(comm.device)
    pools = free_memory(comm.device)
    return {**sizes, "free now": min(pools.values())} if pools else sizes
