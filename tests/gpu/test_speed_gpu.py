"""Ways of attention on CUDA devices: which kernel runs, and its values beside eager attention."""

import copy

import pytest
import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from fullshard.program.speed import Facts, apply_ways
from support.packed_models import LONGEST, build, loss_and_gradients, rows

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

CUDA = torch.device("cuda")
DTYPES = {torch.float32: 2e-3, torch.bfloat16: 5e-2}  # flex multiplies float32 in TF32
WIDE = {"t5": {"d_model": 64, "d_kv": 32, "num_heads": 2}, "llama": {"hidden_size": 64, "head_dim": 32}}
"""Heads that every kernel takes."""


@pytest.fixture(autouse=True)
def a_device():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")


def compared(kind, way, dtype, *, packed):
    """Losses and gradients of a model with a way, of the eager model, and of it in float64."""
    plain = build(kind, "eager", **WIDE[kind])
    causal = kind == "llama"
    batch = rows(causal)[packed]
    exact = loss_and_gradients(plain, batch, causal)
    plain = plain.to(CUDA, dtype)
    ours = copy.deepcopy(plain)
    apply_ways(ours, [way], Facts(CUDA, dtype, packed, LONGEST))
    return [loss_and_gradients(model, batch.to(CUDA), causal) for model in (ours, plain)], exact


def assert_as_near(ours, exact, tolerance):
    """All gradients together, as a vector, are within ``tolerance`` of the exact ones; and so is the loss."""
    assert abs(ours[0].double().cpu() - exact[0]) <= tolerance * exact[0]
    found, wanted = (torch.cat([g.double().cpu().flatten() for g in one[1].values()]) for one in (ours, exact))
    assert (found - wanted).norm() <= tolerance * wanted.norm()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_t5_has_the_loss_and_gradients_of_eager_attention(dtype, packed):
    both, exact = compared("t5", "bias_sdpa", dtype, packed=packed)
    for one in both:
        assert_as_near(one, exact, DTYPES[dtype])


@pytest.mark.parametrize("way", ["flex", "varlen"])
def test_packed_rows_of_a_causal_model_have_the_loss_and_gradients_of_masks(way):
    both, exact = compared("llama", way, torch.bfloat16, packed=True)
    for one in both:
        assert_as_near(one, exact, DTYPES[torch.bfloat16])


def test_the_memory_efficient_kernel_returns_the_biass_gradient(monkeypatch):
    """No other kernel is allowed, and each layer's attention is recorded under its name."""
    kernels, attend = [], functional.scaled_dot_product_attention

    def noted(*args, **kwargs):
        output = attend(*args, **kwargs)
        kernels.append(output.grad_fn.name())
        return output

    monkeypatch.setattr(functional, "scaled_dot_product_attention", noted)
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        (ours, _), _ = compared("t5", "bias_sdpa", torch.bfloat16, packed=False)
    assert kernels == ["ScaledDotProductEfficientAttentionBackward0"] * 6
    for stack in ("encoder", "decoder"):
        gradient = ours[1][f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"]
        assert gradient.abs().max() > 0
