"""Reads weights from a source into a model, each rank its own elements: no full parameter is ever in memory."""

from __future__ import annotations

import torch
from torch import nn

from fullshard.core.comm import Mesh, together_in_background
from fullshard.core.engine.full.state import left_out, local_tensors
from fullshard.core.engine.registry import runtime_of
from fullshard.core.engine.setup.quantise import QuantisedPart, quantise_parts, share_scales
from fullshard.core.engine.setup.source import WeightReader, WeightSource, wanted_tensors
from fullshard.core.engine.step.unit import Keep
from fullshard.core.layout.names import plain_name


def open_weights(model: nn.Module, mesh: Mesh, source: WeightSource, ignored: frozenset[nn.Parameter]) -> WeightReader:
    """Check on every rank that the source fits the model, before anything changes; every rank calls it.

    Args:
        model: The root, sharded or not.
        mesh: Its ranks.
        source: This rank's source.
        ignored: Parameters that are not sharded.

    Raises:
        UserError: It does not fit on some rank; raised on every rank with the same text.
    """
    return together_in_background(mesh, lambda: source.open(model, wanted_tensors(model, ignored)))


def give_memory(
    model: nn.Module, ignored: frozenset[nn.Parameter], device: torch.device, reader: WeightReader
) -> frozenset[nn.Parameter]:
    """Allocate unsharded meta tensors that will be read: ignored parameters and persistent buffers.

    Returns:
        The ignored parameters, with replacements for those on the meta device.
    """
    made: dict[int, nn.Parameter] = {}
    for path, module in model.named_modules():
        for key, param in module._parameters.items():
            if param is not None and param.is_meta and param in ignored:
                fresh = nn.Parameter(torch.empty_like(param, device=device), param.requires_grad)
                module._parameters[key] = made.setdefault(id(param), fresh)
        for key, buffer in module._buffers.items():
            kept = key not in module._non_persistent_buffers_set
            name = plain_name(f"{path}.{key}" if path else key)
            if buffer is not None and buffer.is_meta and kept and reader.has(name):
                module._buffers[key] = torch.empty_like(buffer, device=device)
    return frozenset(made.get(id(param), param) for param in ignored)


def fill(model: nn.Module, reader: WeightReader) -> None:
    """Read this rank's elements of every tensor into the model; every rank of a sharded model calls it.

    Raises:
        UserError: Reading failed on some rank; raised on every rank with the same text. What was read by then stays.
    """
    runtime = runtime_of(model)
    for unit in runtime.units:
        unit.keep.discard(Keep.NEXT_PASS)

    def read() -> list[QuantisedPart]:
        for local in local_tensors(model):
            if not reader.has(local.name):
                continue
            reader.read(local.name, local.start, local.tensor)
            if local.tensor.data_ptr() != local.home.data_ptr():
                with torch.no_grad():
                    local.home.copy_(local.tensor.view(local.home.shape))
        return quantise_parts(model, reader, runtime.device.device)

    share_scales(together_in_background(runtime.mesh, runtime.device.for_thread(read)))


def load_weights(model: nn.Module, source: WeightSource) -> None:
    """Replace the weights of a sharded model, in place, by those of a source; every rank calls it.

    Args:
        model: The sharded model.
        source: This rank's source.

    Raises:
        ShardingError: The model is not sharded.
        UserError: The weights do not fit, or cannot be read; raised on every rank with the same text. If they do not
            fit, nothing has changed.
    """
    reader = open_weights(model, runtime_of(model).mesh, source, frozenset(left_out(model).values()))
    fill(model, reader)
