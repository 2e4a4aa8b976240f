"""A liger-kernel of plain torch, which replaces what the real one replaces for Llama, and counts its kernels' calls."""

import sys
from collections import Counter
from importlib.machinery import ModuleSpec
from types import ModuleType

import torch
from transformers.models.llama import modeling_llama

CALLS = Counter()
ROPE = modeling_llama.apply_rotary_pos_emb


class RMSNormFunction(torch.autograd.Function):
    """Keeps its weight for backward, and puts the gradient of its input into that of its output, as Liger's does."""

    @staticmethod
    def forward(ctx, hidden, weight, eps):
        CALLS["norm"] += 1
        rstd = torch.rsqrt(hidden.float().pow(2).mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(hidden, weight, rstd)
        return weight * (hidden * rstd).to(hidden.dtype)

    @staticmethod
    def backward(ctx, grad):
        hidden, weight, rstd = ctx.saved_tensors
        normed = hidden * rstd
        of_weight = (grad * normed).flatten(0, -2).sum(0)
        scaled = grad * weight
        grad.copy_(rstd * (scaled - normed * (scaled * normed).mean(-1, keepdim=True)))
        return grad, of_weight, None


def liger_rms_norm(X, W, eps, offset=0.0, casting_mode="llama", in_place=True):
    assert (offset, casting_mode, in_place) == (0.0, "llama", True)
    return RMSNormFunction.apply(X, W, eps)


class LigerRMSNorm(torch.nn.Module):
    def forward(self, hidden_states):
        return RMSNormFunction.apply(hidden_states, self.weight, self.variance_epsilon)


class LigerSwiGLUMLP(torch.nn.Module):
    def forward(self, x):
        CALLS["mlp"] += 1
        return self.down_proj(torch.nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


def liger_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    CALLS["rope"] += 1
    return ROPE(q, k, cos, sin, unsqueeze_dim)


def _bind(module, forward):
    module.__dict__["forward"] = forward.__get__(module, type(module))


def apply_liger_kernel_to_instance(model, cross_entropy=True, fused_linear_cross_entropy=True):
    assert not cross_entropy
    assert not fused_linear_cross_entropy
    if model.config.model_type != "llama":
        return
    modeling_llama.LlamaRMSNorm, modeling_llama.LlamaMLP = LigerRMSNorm, LigerSwiGLUMLP
    modeling_llama.apply_rotary_pos_emb = liger_rotary_pos_emb
    _bind(model.model.norm, LigerRMSNorm.forward)
    for layer in model.model.layers:
        _bind(layer.mlp, LigerSwiGLUMLP.forward)
        _bind(layer.input_layernorm, LigerRMSNorm.forward)
        _bind(layer.post_attention_layernorm, LigerRMSNorm.forward)


def install(monkeypatch):
    """Make ``import liger_kernel`` find this one while a test runs, and forget the calls so far."""
    CALLS.clear()
    names = {
        "liger_kernel": {},
        "liger_kernel.transformers": {"_apply_liger_kernel_to_instance": apply_liger_kernel_to_instance},
        "liger_kernel.transformers.functional": {"liger_rms_norm": liger_rms_norm},
        "liger_kernel.transformers.monkey_patch": {"MODEL_TYPE_TO_APPLY_LIGER_FN": {"llama": None}},
    }
    for name, members in names.items():
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
