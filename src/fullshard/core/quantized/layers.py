"""Choice of a model's linear layers to quantise, and their conversion into quantised layers, which can be undone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any

import torch
from torch import nn

from fullshard.core.layout.names import plain_name
from fullshard.core.policy import Quantize
from fullshard.core.quantized.formats import BLOCK, NF4, OUTER_BLOCK, Int8, bitsandbytes, format_of, loaded
from fullshard.core.quantized.linear import Held, QuantizedLinear, Workspace
from fullshard.errors import ConfigError

_WRAPPED = ("base_layer", "original_module")
"""Attributes in which peft keeps the wrapped layer; its other children are the adapter's."""


class QuantizedLayers:
    """The quantised layers of one model; made before the model is sharded."""

    def __init__(self, model: nn.Module, quantize: Quantize | None) -> None:
        """Convert layers of bitsandbytes, and those that ``quantize`` chooses, into quantised layers; any rank.

        Layers that ``quantize`` chooses must be on the meta device: their codes come with the weights.

        Raises:
            ConfigError: There is nothing to quantise, ``skip`` has a name that no module has, bitsandbytes is missing,
                or a layer is in a format that is not supported. Nothing has changed.
        """
        self._before: list[tuple[nn.Module, type[nn.Module], dict[str, Any]]] = []
        with self.undone_on_error():
            self._adopt(model)
            if quantize is not None:
                require_skip(model, quantize, "Quantize(skip=…)")
                self._quantise(model, quantize)
        _share_workspace(model)

    @contextmanager
    def undone_on_error(self) -> Iterator[None]:
        """Restore the model if the context raises."""
        try:
            yield
        except BaseException:
            self.undo()
            raise

    def undo(self) -> None:
        """Restore the class and parameters of every layer."""
        while self._before:
            layer, kind, state = self._before.pop()
            layer.__class__ = kind
            layer.__dict__.clear()
            layer.__dict__.update(state)

    def _take_over(self, layer: Any, held: Held) -> None:
        self._before.append((layer, type(layer), dict(layer.__dict__)))
        QuantizedLinear.take_over(layer, held)

    def _quantise(self, model: nn.Module, quantize: Quantize) -> None:
        """Convert the chosen layers into quantised layers on the meta device."""
        format = format_of(quantize)
        compute = None if quantize.compute_dtype is None else getattr(torch, quantize.compute_dtype)
        for layer in chosen_layers(model, quantize):
            if hasattr(layer.weight, "placements"):
                raise ConfigError(
                    f"Quantize would quantise a {type(layer).__name__} of {_shape(layer)} that tensor parallelism "
                    "divides: each of its ranks would get the full layer. Leave out quantize=, or name it in skip=."
                )
            with torch.device("meta"):
                codes = torch.empty(format.codes_shape(_shape(layer)), dtype=torch.uint8)
                scales = torch.empty(format.scales_bytes(_shape(layer)), dtype=torch.uint8)
            self._take_over(layer, Held(format, codes, scales, layer.weight.dtype, compute))

    def _adopt(self, model: nn.Module) -> None:
        """Convert layers of bitsandbytes, keeping their codes and scales."""
        library = loaded()
        if library is None:
            return
        for path, layer in model.named_modules():
            if isinstance(layer, library.nn.Linear4bit):
                self._take_over(layer, _from_4bit(plain_name(path), layer))
            elif isinstance(layer, library.nn.Linear8bitLt):
                self._take_over(layer, _from_8bit(plain_name(path), layer))


def _share_workspace(model: nn.Module) -> None:
    """Make all quantised layers, including those of blocks sharded before, use one workspace."""
    layers = [layer for layer in model.modules() if isinstance(layer, QuantizedLinear)]
    shared = Workspace(max((layer.before.numel() for layer in layers), default=0))
    for layer in layers:
        layer.workspace = shared


def _shape(layer: nn.Linear) -> tuple[int, int]:
    return layer.out_features, layer.in_features


def chosen_layers(model: nn.Module, quantize: Quantize) -> list[nn.Linear]:
    """Return the layers to quantise: plain, frozen, not tied, not the adapter's, not skipped.

    Raises:
        ConfigError: There are none, or one has values already.
    """
    # Excluded: a head that computes the loss, or a replaced forward, reads the weight itself.
    open_ones = {name: one for name, one in quantisable(model, quantize).items() if "forward" not in vars(one)}
    frozen = {name: layer for name, layer in open_ones.items() if not layer.weight.requires_grad}
    if open_ones and not frozen:
        raise ConfigError(
            f"Quantised weights are frozen, and all {len(open_ones)} linear layers that Quantize({quantize.type!r}) "
            f"would quantise are trainable (first: {plain_name(next(iter(open_ones)))}). Add an adapter first "
            "(peft.get_peft_model, which freezes the model), or train without quantize=."
        )
    if not frozen:
        plain = sum(type(one) is nn.Linear for one in model.modules())
        raise ConfigError(
            f"Quantize({quantize.type!r}) has nothing to quantise: {type(model).__name__} has {plain} plain "
            f"nn.Linear layers, and all are tied to other modules or in skip={quantize.skip}."
        )
    full = [plain_name(name) for name, layer in frozen.items() if not layer.weight.is_meta]
    if full:
        raise ConfigError(
            f"Pretrained(…, quantize=…) quantises while it reads, and {len(full)} layers have memory already (first: "
            f"{full[0]}). Build the model on the meta device: with torch.device('meta')."
        )
    return list(frozen.values())


def quantisable(model: nn.Module, quantize: Quantize) -> dict[str, nn.Linear]:
    """Return the plain linear layers, trainable or not, that are not tied, an adapter's or skipped, by name."""
    alone = not_tied(model)
    adapters = adapter_modules(model)
    return {
        name: layer
        for name, layer in model.named_modules()
        if type(layer) is nn.Linear
        and id(layer) not in adapters
        and alone(layer.weight)
        and not _is_skipped(name, quantize.skip)
    }


def not_tied(model: nn.Module) -> Callable[[torch.Tensor], bool]:
    """Return a function that tells whether a parameter of the model belongs to one module only."""
    uses = Counter(id(p) for m in model.modules() for p in m._parameters.values() if p is not None)
    return lambda parameter: uses[id(parameter)] == 1


def adapter_modules(model: nn.Module) -> set[int]:
    """Return the ids of the modules that peft added to the model."""
    return {
        id(inside)
        for module in model.modules()
        if any(key in module._modules for key in _WRAPPED)
        for key, child in module._modules.items()
        if key not in _WRAPPED and child is not None
        for inside in child.modules()
    }


_USUAL_SKIP = Quantize().skip
"""The default of ``skip``, which not every model has."""


def require_skip(model: nn.Module, quantize: Quantize, setting: str) -> None:
    """Check that ``skip`` has only names of modules, except for the default's; any rank.

    Args:
        model: The model, with its adapter or without.
        quantize: The policy.
        setting: Name of the setting in which the user wrote ``skip``.

    Raises:
        ConfigError: A name matches no module.
    """
    names = [plain_name(name) for name, _ in model.named_modules()]
    for one in quantize.skip:
        if one in _USUAL_SKIP or any(_is_skipped(name, (one,)) for name in names):
            continue
        leaves = [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]
        last = sorted({name.rpartition(".")[2] for name in leaves})
        known = dict.fromkeys([*last, *(part for name in names if name for part in (name.rpartition(".")[2], name))])
        near = ", ".join(get_close_matches(one, known, n=3)) or "none"
        example = f" such as {leaves[0]}" if leaves else ""
        raise ConfigError(
            f"{setting} has {one!r}, which is no module of {type(model).__name__}. Names like it: {near}. Its linear "
            f"layers end in {', '.join(last)}; a name is one of these, or successive parts{example}."
        )


def _is_skipped(name: str, skip: tuple[str, ...]) -> bool:
    """Return whether one of ``skip`` is a part of the name or successive parts: ``lm_head``, ``decoder.block.0``."""
    return any(f".{one}." in f".{plain_name(name)}." for one in skip)


def _from_4bit(name: str, layer: Any) -> Held:
    """Return what a ``Linear4bit`` holds.

    Raises:
        ConfigError: It is not nf4, has other blocks than bitsandbytes' default, or is not quantised.
    """
    weight, state = layer.weight, getattr(layer.weight, "quant_state", None) or layer.quant_state
    if state is None:
        raise ConfigError(
            f"{name} is a Linear4bit that is not quantised yet. Move the model to its device before fully_shard "
            "(model.to('cpu') quantises too), or build it of nn.Linear and pass weights=Pretrained(…, quantize=…)."
        )
    if state.quant_type != NF4.type:
        raise ConfigError(
            f"{name} is a Linear4bit of {state.quant_type}; of bitsandbytes' 4-bit formats fullshard shards nf4 only "
            '(the default is fp4). Quantise the model with BitsAndBytesConfig(bnb_4bit_quant_type="nf4", …) or '
            'Linear4bit(…, quant_type="nf4").'
        )
    if getattr(state, "packing_format_for_cpu", False):
        data, state = bitsandbytes().functional._convert_weight_packed_for_cpu_inverse(weight.data, state)
    else:
        data = weight.data
    if state.blocksize != BLOCK or (state.nested and state.state2.blocksize != OUTER_BLOCK):
        raise ConfigError(
            f"{name} has blocks of {state.blocksize} weights; fullshard shards bitsandbytes' default, {BLOCK} (and "
            f"{OUTER_BLOCK} scales with double quantisation). Quantise the model with that."
        )
    format = NF4(double=state.nested)
    codes = data.contiguous().view(torch.uint8).reshape(format.codes_shape(_shape(layer)))
    if state.nested:
        offset = state.offset.to(state.state2.absmax).reshape(1)
        parts = [state.state2.absmax.view(torch.uint8), offset.view(torch.uint8), state.absmax]
        scales = torch.cat([part.reshape(-1) for part in parts])
    else:
        scales = state.absmax.float().contiguous().view(torch.uint8)
    return Held(format, codes, scales, state.dtype, layer.compute_dtype)


def _from_8bit(name: str, layer: Any) -> Held:
    """Return what a ``Linear8bitLt`` holds.

    Raises:
        ConfigError: It keeps float16 weights, has an outlier threshold, or is not quantised.
    """
    weight, state = layer.weight, layer.state
    codes = weight.data if weight.CB is None else weight.CB
    largest = state.SCB if weight.SCB is None else weight.SCB
    if state.has_fp16_weights or codes.dtype != torch.int8 or largest is None:
        raise ConfigError(
            f"{name} is a Linear8bitLt without int8 weights. Make it with has_fp16_weights=False and move the model to "
            "its device before fully_shard (model.to('cpu') quantises too)."
        )
    scales = largest.float().contiguous().view(torch.uint8)
    # float32, to which bitsandbytes dequantises, because it does not keep the weight's original dtype.
    return Held(Int8(), codes.contiguous().view(torch.uint8), scales, torch.float32, None)
