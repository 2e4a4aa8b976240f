"""Quantisation of a run's frozen linear layers, and checks before memory is used."""

from __future__ import annotations

from pathlib import Path

from torch import nn
from transformers import PreTrainedModel

from fullshard.core.comm import Comm, together
from fullshard.core.layout.names import plain_name
from fullshard.core.policy import Quantize
from fullshard.core.quantized import QuantizedLayers, QuantizedLinear, format_of, quantisable, require_skip
from fullshard.errors import ConfigError, ModelError
from fullshard.program.config import RunConfig
from fullshard.program.models import base_of
from fullshard.state.storage import Base, content_of


def quantize_of(config: RunConfig) -> Quantize | None:
    """Return the library's policy for ``model.quantization``; None if weights are not quantised."""
    settings = config.model.quantization
    return None if settings is None else Quantize(**dict(settings))


def describe_quantization(config: RunConfig) -> str | None:
    """Return ``nf4`` or ``nf4 (double)``, as checkpoints name it; None if weights are not quantised."""
    quantize = quantize_of(config)
    if quantize is None:
        return None
    double = quantize.double_quant and quantize.type == "nf4"
    return f"{quantize.type} (double)" if double else quantize.type


def quantization_notes(config: RunConfig) -> tuple[str, ...]:
    """Return the note for the user, if weights are quantised."""
    quantised = describe_quantization(config)
    return () if quantised is None else (f"frozen linear layers are quantised: {quantised}",)


def require_kernels(config: RunConfig) -> None:
    """Check that the package for the run's weight format is installed; any process.

    Raises:
        ConfigError: bitsandbytes is missing or too old.
    """
    quantize = quantize_of(config)
    if quantize is not None:
        format_of(quantize)


def require_quantizable(model: nn.Module, config: RunConfig) -> None:
    """Check that the run's model can be quantised, before its adapter is added; any rank.

    Raises:
        ConfigError: bitsandbytes is missing or too old, or ``skip`` has a name that no module has.
    """
    require_kernels(config)
    quantize = quantize_of(config)
    if quantize is not None:
        require_skip(model, quantize, "model.quantization.skip")


def quantises_head(model: PreTrainedModel, config: RunConfig) -> bool:
    """Return True if the output head is quantised: it can then neither compute the fused loss nor keep its rows home.

    ``model`` has no adapter yet.

    Raises:
        ConfigError: It is quantised, but ``fused_cross_entropy`` needs it.
    """
    quantize, head = quantize_of(config), model.get_output_embeddings()
    if quantize is None:
        return False
    name = next((name for name, one in quantisable(model, quantize).items() if one is head), None)
    if name is not None and config.training.fused_cross_entropy is True:
        raise ConfigError(
            f"training.fused_cross_entropy computes the loss in {name}, whose full rows it reads, but "
            f"model.quantization.skip={list(quantize.skip)} would quantise it. Add {name} to skip, or set "
            "fused_cross_entropy: false."
        )
    return name is not None


def require_by_shard(config: RunConfig, reason: str) -> None:
    """Refuse to quantise weights that must be loaded in full: quantisation happens while they are read by shard.

    Raises:
        ConfigError: Quantisation is set.
    """
    settings = config.model.quantization
    if settings is not None:
        raise ConfigError(
            f"model.quantization: {settings.type} quantises weights while each rank reads its part of them. Here "
            f"every rank would load all of {config.model.path}: {reason}. Change that, or leave quantization out."
        )


def quantise_outline(model: nn.Module, config: RunConfig) -> None:
    """Quantise the layers of a model on the meta device, with its adapter, as the run does while it reads them.

    Raises:
        ConfigError: There is nothing to quantise.
    """
    quantize = quantize_of(config)
    if quantize is not None:
        QuantizedLayers(model, quantize)


def quantised_base(model: nn.Module, config: RunConfig, directory: Path | None, comm: Comm) -> Base | None:
    """Return the base that the run's checkpoints name instead of holding it; None if it is not quantised.

    Every rank calls it; rank 0 reads the files for their digest. ``model`` is sharded, with its adapter; ``directory``
    is ``model.path`` resolved.

    Raises:
        ModelError: The files cannot be read.
    """
    quantize = quantize_of(config)
    if quantize is None:
        return None
    assert directory is not None, "the schema requires model.path"
    layers = [
        plain_name(name).replace(".base_layer", "").replace(".original_module", "") + ".weight"
        for name, module in base_of(model).named_modules()
        if isinstance(module, QuantizedLinear)
    ]

    def read() -> str:
        try:
            return content_of(directory) if comm.rank == 0 else ""
        except OSError as error:
            raise ModelError(f"{directory} cannot be read: {error}.") from error

    content = comm.all_gather_object(together(comm, read))[0]
    name = str(config.model.path)
    return Base(name, str(directory), content, quantize.type, quantize.double_quant, tuple(layers))
