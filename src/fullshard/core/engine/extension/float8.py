"""The scales of torchao's float8 weights, computed ahead for all of a model."""

from __future__ import annotations

import math

import torch
from torch import nn

from fullshard.core.engine.extension.extension_lane import ExtensionParam
from fullshard.core.engine.registry import runtime_of
from fullshard.core.torch_private import foreach_norm

SCALE = "_precomputed_scale"
"""The attribute that torchao's ``WeightWithDynamicFloat8CastTensor`` reads before it computes a scale itself."""

_SMALLEST = 1e-12  # torchao's smallest maximum, so that zeros have a scale


@torch.no_grad()
def precompute_float8_scales(model: nn.Module) -> None:
    """Compute the scales of all of torchao's float8 weights of a sharded model, in one collective for each group.

    Call it on every rank after each step of the optimizer, as torchao's ``precompute_float8_dynamic_scale_for_fsdp``,
    whose place it takes and whose bits it gives. Without it, each weight's scale costs an all-reduce in each gather, as
    it does once a weight has changed, such as by loading, until the next call; optimizers that change weights without
    raising their version, as fused ones do, are not noticed. A model without such weights is left alone.

    Args:
        model: Sharded, with weights of torchao's ``Float8LinearConfig(enable_fsdp_float8_all_gather=True)``.
    """
    params = [param for _, param in runtime_of(model).all_params() if isinstance(param, ExtensionParam)]
    params = [param for param in params if param.lane.extension.takes(SCALE)]
    if not params:
        return
    norms = foreach_norm([param.sharded for param in params], ord=math.inf)
    alike: dict[tuple[torch.dtype, torch.dtype, torch.device], list[tuple[ExtensionParam, torch.Tensor]]] = {}
    for param, norm in zip(params, norms, strict=True):
        key = norm.dtype, param.lane.extension.get("_dtype"), param.lane.device.device
        alike.setdefault(key, []).append((param, norm))
    for (dtype, target, device), members in alike.items():
        largest = torch.stack([norm for _, norm in members]).to(device)
        # In float64, as in torchao: otherwise compiled and eager code would give other bits.
        scales = torch.finfo(target).max / largest.clamp(min=_SMALLEST).double()
        if dtype == torch.float16:
            scales = scales.clamp(max=torch.finfo(torch.float16).max)
        for (param, _), scale in zip(members, scales.float().unbind(), strict=True):
            param.lane.extension.set(SCALE, scale, param.sharded)
