"""The interface of a source of weights, and the tensors that a model reads from it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import nn

from fullshard.core.layout.names import plain_name
from fullshard.core.policy import Quantize
from fullshard.core.quantized import QuantizedLinear


@dataclass
class WantedTensor:
    """A tensor of a model's saved state.

    Attributes:
        shape: Full shape.
        dtype: Dtype of the model's tensor.
        required: Whether the source must have it; otherwise the model's value stays if the source has none.
        buffer: True if it is a buffer.
        names: Its names in the model; several when it is tied.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    required: bool
    buffer: bool
    names: list[str] = field(default_factory=list)


class WeightReader(Protocol):
    """Weights that fit a model, on one rank."""

    def has(self, name: str) -> bool:
        """Return whether there is a tensor of this name."""
        ...

    def read(self, name: str, start: int, out: torch.Tensor) -> None:
        """Fill ``out``, (numel,), contiguous, on any device, with a run of the flattened tensor from ``start`` on.

        Raises:
            UserError: It cannot be read.
        """
        ...


class WeightSource(Protocol):
    """Weights of a model by name, such as :class:`fullshard.Pretrained`; every rank has its own source.

    A source may have an attribute ``quantize``, a :class:`fullshard.Quantize`: how the model's frozen linear layers are
    quantised while they are read. The source itself names and reads their weights as they were before.
    """

    def open(self, model: nn.Module, wanted: list[WantedTensor]) -> WeightReader:
        """Check names, shapes and dtypes without reading values; no communication.

        Raises:
            UserError: They do not fit the model, or cannot be read.
        """
        ...


def wanted_tensors(model: nn.Module, left_out: frozenset[nn.Parameter] = frozenset()) -> list[WantedTensor]:
    """Return the saved state of a model: every parameter and persistent buffer with its names; any rank.

    Args:
        model: A model that is sharded, partly sharded or not sharded.
        left_out: Parameters that are not sharded: if a source has none, those with values keep them.
    """
    found: dict[int, WantedTensor] = {}
    for name, tensor, is_buffer in _named_state(model):
        one = found.get(id(tensor))
        if one is None:
            meta = getattr(tensor, "shard_meta", None)
            shape = tuple(tensor.shape) if meta is None else meta.global_shape
            required = tensor.is_meta or tensor not in left_out
            one = found[id(tensor)] = WantedTensor(shape, tensor.dtype, required, is_buffer)
        one.names.append(name)
    return list(found.values())


def quantize_of(source: WeightSource | None) -> Quantize | None:
    """Return how a source's weights are to be quantised, or None."""
    return getattr(source, "quantize", None)


def _named_state(model: nn.Module) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Yield every name of each parameter and persistent buffer, the tensor, and whether it is a buffer.

    A quantised layer has its unquantised weight in place of codes and scales.
    """
    for path, module in model.named_modules(remove_duplicate=False):
        path = plain_name(path)
        prefix = f"{path}." if path else ""
        for key, param in module._parameters.items():
            if param is not None and not (isinstance(module, QuantizedLinear) and key != "bias"):
                yield prefix + key, param, False
        if isinstance(module, QuantizedLinear):
            yield prefix + "weight", module.before, False
        for key, buffer in module._buffers.items():
            if buffer is not None and key not in module._non_persistent_buffers_set:
                yield prefix + key, buffer, True
