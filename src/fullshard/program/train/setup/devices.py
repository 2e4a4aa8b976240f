"""The devices that a run computes on, and the settings that follow from them where they say ``auto``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fullshard.core.comm import Comm, device_of, whole_memory_bytes
from fullshard.core.policy import ShardingStrategy
from fullshard.planner import Hardware
from fullshard.program.config import RunConfig
from fullshard.program.config.training import auto_precision


@dataclass(frozen=True)
class Devices:
    """The devices of a run's ranks.

    Attributes:
        gpu: True if ranks compute on GPUs.
        bf16: True if all of them compute bfloat16 in hardware.
        name: The GPU's name, for users; of one without bfloat16 or float8 if there is one.
        fp8: True if all of them multiply in float8.
    """

    gpu: bool = False
    bf16: bool = False
    name: str = "CPU"
    fp8: bool = False

    @classmethod
    def of_ranks(cls, comm: Comm) -> Devices:
        """Return the devices of all ranks; every rank calls it."""
        mine = cls() if comm.device.type != "cuda" else cls._of_gpu(comm.device)
        return min(comm.all_gather_object(mine), key=cls._least)

    @classmethod
    def of_machine(cls, gpus: int) -> Devices:
        """Return the devices of this machine's ranks, on its first ``gpus`` GPUs; one process."""
        found = (cls._of_gpu(torch.device("cuda", index)) for index in range(gpus))
        return min(found, key=cls._least, default=cls())

    @classmethod
    def of_sheet(cls, hardware: Hardware | None) -> Devices:
        """Return the devices of a plan: GPUs with this data sheet; None: CPUs."""
        if hardware is None:
            return cls()
        rates = hardware.flops_per_s
        return cls(True, torch.bfloat16 in rates, hardware.name, torch.float8_e4m3fn in rates)  # noqa: FBT003

    @classmethod
    def _of_gpu(cls, gpu: torch.device) -> Devices:
        device = device_of(gpu)
        return cls(True, device.supports_bf16()[0], torch.cuda.get_device_name(gpu), device.supports_fp8())  # noqa: FBT003

    @staticmethod
    def _least(one: Devices) -> tuple[bool, bool]:
        return one.bf16, one.fp8


@dataclass(frozen=True)
class Choice:
    """A setting that a run chooses by itself."""

    setting: str  # its dotted key
    value: str  # what was chosen
    why: str

    @property
    def override(self) -> str:
        """Return it as an override of the run file."""
        return f"{self.setting}={self.value}"

    def __str__(self) -> str:
        return f"{self.setting}: {self.value} ({self.why})"


KEPT = "as at this run's start"
"""Why a run that continues takes a choice."""

_CHOSEN_AGAIN = ("sharding.frozen", "sharding.tables")
"""Settings that say where rows lie, which follows from the number of ranks; the values of weights do not."""


_DECIDED = ("sharding.auto", "speed.ways", "training.accumulate", "training.gradient_checkpointing")
"""Settings that are decided before a run is assembled, so that its own settings no longer say ``auto``."""


def decided_settings(config: RunConfig) -> dict[str, Any]:
    """Return what a checkpoint records of settings that were decided before the run was assembled, by dotted key."""
    flat = config.as_flat()
    return {key: flat[key] for key in _DECIDED}


def recorded_choices(chosen: Sequence[Choice]) -> dict[str, str]:
    """Return what a checkpoint records of a run's choices."""
    return {one.setting: one.value for one in chosen if one.setting not in _CHOSEN_AGAIN}


def kept_choices(config: RunConfig, recorded: Mapping[str, str]) -> tuple[RunConfig, tuple[Choice, ...]]:
    """Return the settings with what a run chose at its start wherever they say ``auto``, and these choices."""
    flat, kept = config.as_flat(), []
    for setting, value in recorded.items():
        section, _, name = setting.partition(".")
        if flat.get(setting) == "auto":
            config = _changed(config, section, **{name: {"true": True, "false": False}.get(value, value)})
            kept.append(Choice(setting, value, KEPT))
    return config, tuple(kept)


def smallest_memory(comm: Comm) -> int:
    """Return the smallest memory of all ranks' devices, or of their hosts, in bytes; every rank calls it."""
    return min(comm.all_gather_object(whole_memory_bytes(comm.device)))


def precision_of(devices: Devices) -> tuple[str, str]:
    """Return what ``training.precision: auto`` is on these devices, and why."""
    return auto_precision(devices.name if devices.gpu else None, bf16=devices.bf16)


def precision_choice(config: RunConfig, devices: Devices, before: str | None = None) -> Choice:
    """Return the precision of a run on these devices; ``before``: that of the checkpoint that it continues from."""
    precision, why = config.training.precision, "as the run file says"
    if precision == "auto":
        precision, why = precision_of(devices)
        if before is not None and before != precision:
            precision, why = before, f"as at this run's start; a new run takes {precision}: {why}"
    if devices.gpu and precision == "fp32":
        why += "; matrix products in TF32" if config.training.tf32 else "; without TF32"
    return Choice("training.precision", precision, why)


def with_precision(config: RunConfig, devices: Devices, precision: str | None = None) -> RunConfig:
    """Return the settings with ``training.precision: auto`` resolved, or with ``precision`` in its place."""
    if config.training.precision != "auto":
        return config
    return _changed(config, "training", precision=precision or precision_of(devices)[0])


def usable(config: RunConfig, devices: Devices) -> tuple[RunConfig, tuple[str, ...]]:
    """Return the settings to use a trained model with, and notes: a run chose its precision for its own devices.

    A run in fp8 evaluates in bf16 too.
    """
    if config.training.precision == "fp8":
        config = _changed(config, "training", precision="bf16", fp8_scales="tensorwise", allow_emulation=False)
    if config.training.precision != "bf16" or not devices.gpu or devices.bf16:
        return config, ()
    note = f"computed in fp32: {precision_of(devices)[1]}, in which the model was trained"
    return _changed(config, "training", precision="fp32"), (note,)


def for_devices(config: RunConfig, devices: Devices) -> RunConfig:
    """Return the settings to build a model with; ``sharding.tables: auto`` is ``gather`` on GPUs, as no other has run.

    It is not recorded, unlike the precision. Nothing is emulated on GPUs.
    """
    config = with_precision(config, devices)
    if devices.gpu and config.training.allow_emulation:
        config = _changed(config, "training", allow_emulation=False)
    if devices.gpu and config.sharding.tables == "auto":
        config = _changed(config, "sharding", tables="gather")
    return config


def may_accumulate_unsharded(config: RunConfig, ranks: int) -> bool:
    """Return whether ``training.accumulate: auto`` may be ``unsharded``: where that sends fewer bytes."""
    training = config.training
    several = training.gradient_accumulation_steps > 1
    # Without shards, gradients are all-reduced once a step either way.
    return training.accumulate == "auto" and several and ranks > 1 and ShardingStrategy(config.sharding.strategy).shards


def with_unsharded(config: RunConfig) -> RunConfig:
    """Return the settings with ``training.accumulate: unsharded``."""
    return _changed(config, "training", accumulate="unsharded")


def _changed(config: RunConfig, section: str, **values: Any) -> RunConfig:
    return config.model_copy(update={section: getattr(config, section).model_copy(update=values)})
