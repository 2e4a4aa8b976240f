"""fp8 in a run: what it needs, refused before work is done, and what the user is told."""

from __future__ import annotations

from torch import nn

from fullshard.errors import ConfigError
from fullshard.program.config import RunConfig
from fullshard.program.models.float8 import Float8Layers, compute_in_float8, require_torchao
from fullshard.program.train.setup.devices import Devices


def require_float8(config: RunConfig, devices: Devices) -> None:
    """Check that a run in fp8 can compute on these devices; any process.

    Raises:
        ConfigError: torchao is missing, a GPU has no fp8, or the ranks compute on CPUs without ``allow_emulation``.
    """
    if config.training.precision != "fp8":
        return
    require_torchao()
    if devices.gpu and not devices.fp8:
        raise ConfigError(
            f"training.precision is fp8, which needs GPUs of compute capability 8.9 or newer (Ada, Hopper, Blackwell); "
            f"{devices.name} is older. Set it to {'bf16' if devices.bf16 else 'fp32'}."
        )
    if not devices.gpu and not config.training.allow_emulation:
        raise ConfigError(
            "training.precision is fp8, and the ranks compute on CPUs, which have no fp8. Set it to fp32 or bf16, or "
            "for tests training.allow_emulation: true, which computes its products in fp32 from rounded numbers."
        )


def use_float8(model: nn.Module, config: RunConfig, ranks: int) -> None:
    """Convert the model's layers if the run is in fp8; every rank calls it, before the model is sharded.

    ``config`` is that of the ranks' devices; ``ranks`` is their number.

    Raises:
        ConfigError: torchao is not installed.
        ModelError: No layer of the model can compute in fp8.
    """
    if config.training.precision == "fp8":
        scales, emulate = config.training.fp8_scales, config.training.allow_emulation
        compute_in_float8(model, scales=scales, emulate=emulate, ranks=ranks if gathers_float8(config) else None)


def gathers_float8(config: RunConfig) -> bool:
    """Return whether a run gathers weights in fp8: not with a scale for each row, nor if DoRA reads the weights."""
    training, adapter = config.training, config.model.adapter
    reads = adapter is not None and (adapter.type == "dora" or adapter.options.get("use_dora", False))
    return training.precision == "fp8" and training.fp8_scales == "tensorwise" and not reads


def float8_notes(model: nn.Module, config: RunConfig) -> tuple[str, ...]:
    """Return lines for the user if the run is in fp8: which layers are, and what makes it slow; any process.

    ``config`` is that of the ranks' devices.
    """
    if config.training.precision != "fp8":
        return ()
    training = config.training
    gathered = "fp8" if gathers_float8(config) else "bf16"
    lines = [f"{Float8Layers.of(model)}; scales are {training.fp8_scales}, weights are gathered in {gathered}"]
    if training.allow_emulation:
        lines.append("fp8 is emulated: products are computed in fp32 from rounded numbers, slower than without it")
    elif "compile" not in config.ways:
        lines.append(
            "fp8 without compiled blocks is slower than with them, and may be slower than bf16: add compile to "
            "speed.ways"
        )
    return tuple(lines)
