"""What this machine can train: its GPUs, memory and cores, and a model that fits."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from huggingface_hub import try_to_load_from_cache

from fullshard.program.config.training import auto_precision
from fullshard.program.train.setup.devices import Devices, precision_of
from fullshard.sizes import format_bytes

MODELS = (
    ("google/flan-t5-xl", 2_850_000_000),
    ("google/flan-t5-large", 783_000_000),
    ("google/flan-t5-base", 248_000_000),
    ("google/flan-t5-small", 77_000_000),
)
"""Encoder-decoder models on the Hub to suggest, with their numbers of parameters, largest first."""

_BYTES_A_PARAMETER = 16
_SHARE_FOR_STATES = 0.6
"""Share of memory for weights, gradients and AdamW's state; the rest is left to activations."""


@dataclass(frozen=True)
class Machine:
    """GPUs, memory and cores of a machine."""

    gpus: int
    memory_bytes: int  # of all GPUs together; of the host if there are none
    cores: int
    precision: tuple[str, str] = auto_precision(None)  # what training.precision: auto is here, and why

    @property
    def ranks(self) -> int:
        """Number of ranks that a run starts on this machine."""
        return self.gpus or 2

    @property
    def fitting(self) -> str:
        """Id of the largest suggested model that can be fully trained here; on CPUs the smallest, for speed."""
        room = self.memory_bytes * _SHARE_FOR_STATES
        fitting = [name for name, count in MODELS if count * _BYTES_A_PARAMETER <= room]
        return fitting[0] if fitting and self.gpus else MODELS[-1][0]

    @property
    def at_hand(self) -> str | None:
        """Id of the largest suggested model that fits and is in the Hugging Face cache; None if there is none."""
        names = [name for name, _ in MODELS]
        return next((name for name in names[names.index(self.fitting) :] if is_cached(name)), None)

    def __str__(self) -> str:
        """Describe the machine in one line."""
        memory = format_bytes(self.memory_bytes)
        return f"{self.gpus} GPUs with {memory}" if self.gpus else f"no GPU; {self.cores} CPU cores, {memory}"


def this_machine(gpus: int) -> Machine:
    """Return this machine, with the GPUs that are visible to this process."""
    cores = len(os.sched_getaffinity(0))
    if not gpus:
        return Machine(0, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), cores)
    memory = sum(torch.cuda.get_device_properties(index).total_memory for index in range(gpus))
    return Machine(gpus, memory, cores, precision_of(Devices.of_machine(gpus)))


def is_cached(model_id: str) -> bool:
    """Return True if the Hugging Face cache holds a model's configuration and weights, so that no network is needed."""
    return all(isinstance(try_to_load_from_cache(model_id, name), str) for name in ("config.json", "model.safetensors"))
