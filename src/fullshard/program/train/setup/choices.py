"""What a run chooses by itself, in one list: its values, and why."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from fullshard.core.engine.registry import runtime_of
from fullshard.program.config import RunConfig
from fullshard.program.train.setup.devices import Choice, Devices, precision_choice
from fullshard.program.train.setup.model import loss_choice


def choices(
    config: RunConfig,
    devices: Devices,
    model: nn.Module,
    memory_bytes: int | None = None,
    *,
    before: Sequence[Choice] = (),
) -> tuple[Choice, ...]:
    """Return what a run chooses by itself; any rank.

    Args:
        config: Its settings, with ``auto`` where the user did not choose.
        devices: The devices of its ranks.
        model: Its model, sharded.
        memory_bytes: As for :func:`~fullshard.program.train.setup.model.prepare_model`.
        before: What was chosen before; it stands for ``auto`` in ``config`` and comes first.
    """
    found = (
        *before,
        precision_choice(config, devices),
        _tf32(config, devices),
        loss_choice(model, config, memory_bytes),
        _searched(config),
        _frozen(config, model),
        _tables(config, devices),
    )
    # Of two for one setting the first, which was chosen before.
    return tuple({one.setting: one for one in reversed(found) if one is not None}.values())[::-1]


def _tf32(config: RunConfig, devices: Devices) -> Choice:
    uses = config.training.tf32
    why = "for matrix products of float32" if devices.gpu else "without effect: ranks compute on CPUs"
    return Choice("training.tf32", str(uses).lower(), why)


def _searched(config: RunConfig) -> Choice | None:
    """Return the result of ``sharding: auto``, which is recorded in the settings."""
    found = config.sharding.auto
    if isinstance(found, bool):
        return None
    return Choice("sharding", " ".join(found) or "the run file's own settings", "the fastest settings found that fit")


def _frozen(config: RunConfig, model: nn.Module) -> Choice | None:
    if config.sharding.frozen != "auto":
        return None
    runtime = runtime_of(model)
    lanes = [lane for unit in runtime.units for lane in unit.lanes if not lane.trainable]
    if not lanes:
        return None
    kept = all(lane.layout.world_size == 1 for lane in lanes)
    less = "at most" if kept else "more than"
    return Choice("sharding.frozen", "replicate" if kept else "shard", f"{less} a quarter of a rank's memory")


def _tables(config: RunConfig, devices: Devices) -> Choice | None:
    if config.sharding.tables != "auto":
        return None
    if devices.gpu:
        return Choice("sharding.tables", "gather", "ranks compute on GPUs")
    return Choice("sharding.tables", "home or gather", "on CPUs, whichever sends fewer bytes for a batch")
