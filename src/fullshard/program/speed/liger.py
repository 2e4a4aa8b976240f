"""Liger's kernels: norms, gated layers and rotary positions of the models that it knows, and T5's norm."""

from __future__ import annotations

import sys
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import torch

from fullshard.program.models import base_of

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

    from fullshard.program.speed.way import Facts, Part

_T5_NORMS = ("T5LayerNorm", "MT5LayerNorm", "UMT5LayerNorm", "LongT5LayerNorm")
"""Norms of the T5 family, which Liger does not replace itself: RMS norms that compute as Llama's do."""

_ROPE = "apply_rotary_pos_emb"
"""The function that attention looks up in the file of transformers that it is written in."""


class Liger:
    """Compute norms, SwiGLU, GeGLU and rotary positions by Liger's Triton kernels. The loss stays fullshard's."""

    name = "liger"
    purpose = "Liger's kernels for norms, SwiGLU, GeGLU and rotary positions; for T5 the norms"
    part: Part = "kernels"
    exact = False

    def misfit(self, model: PreTrainedModel, facts: Facts) -> str | None:
        """See :meth:`Way.misfit`."""
        if find_spec("liger_kernel") is None:
            return "liger-kernel is not installed (the extra `kernels`: pip install 'fullshard[kernels]')"
        if facts.device.type != "cuda":
            return f"Liger's kernels run on GPUs, and the ranks compute on the {facts.device.type}"
        base = base_of(model)
        if not _t5_norms(base) and base.config.model_type not in _known():
            return f"Liger has no kernels for models of the type {base.config.model_type}"
        return None

    def apply(self, model: PreTrainedModel, facts: Facts) -> None:
        """See :meth:`Way.apply`."""
        base = base_of(model)
        rms_norm = _liger(".functional").liger_rms_norm

        def forward(norm: Any, hidden_states: torch.Tensor) -> torch.Tensor:
            return rms_norm(hidden_states, norm.weight, norm.variance_epsilon)

        for norm in _t5_norms(base):
            norm.forward = MethodType(forward, norm)
        if base.config.model_type in _known():
            _replace(base)


def _liger(name: str) -> Any:
    """Return a module of liger-kernel, which is optional."""
    return import_module(f"liger_kernel.transformers{name}")


def _known() -> Any:
    """Return the types of models that Liger knows."""
    return _liger(".monkey_patch").MODEL_TYPE_TO_APPLY_LIGER_FN


def _t5_norms(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if type(module).__name__ in _T5_NORMS]


def _replace(model: PreTrainedModel) -> None:
    """Let Liger replace what it knows in ``model``, and only there.

    Liger also replaces classes and the rotary function in transformers' file, for all models of the process. Later ones
    would compute by it too, and so would plans, whose tensors have no memory. So the file gets its own back, and only
    this model's attention sees Liger's rotary function.
    """
    theirs = vars(sys.modules[type(model).__module__])
    before = dict(theirs)
    try:
        _liger("")._apply_liger_kernel_to_instance(model=model, cross_entropy=False, fused_linear_cross_entropy=False)
        rope = theirs.get(_ROPE)
    finally:
        theirs.update(before)
    if rope is before.get(_ROPE):
        return
    seeing = cache(_seeing)  # one function for all blocks, so that the compiler makes one graph of them
    for module in model.modules():
        forward = type(module).forward
        if isinstance(forward, FunctionType) and forward.__globals__ is theirs and _ROPE in forward.__code__.co_names:
            module.forward = MethodType(seeing(forward, rope), module)


def _seeing(function: FunctionType, rope: Any) -> FunctionType:
    """Return a function that sees another rotary function in its file."""
    seen = {**function.__globals__, _ROPE: rope}
    del seen["__name__"]  # the compiler would look values up in the module of this name
    copy = FunctionType(function.__code__, seen, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
