"""T5's kernel on CUDA devices: values and gradients beside eager attention's, memory, equal runs. Not yet run."""

import copy

import pytest
import torch

from fullshard.program.models import enable_activation_checkpointing, set_attention_dropout
from fullshard.program.speed import Facts, apply_ways
from fullshard.program.speed.t5_attention.launch import Attention
from fullshard.program.speed.t5_attention.operator import t5_attention
from support.packed_models import LONGEST, build, loss_and_gradients, rows

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

CUDA = torch.device("cuda")
TOLERANCES = {torch.float32: 2e-3, torch.bfloat16: 5e-2, torch.float16: 2e-2}  # of all gradients as one vector


@pytest.fixture(autouse=True)
def a_device():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")


def models(dtype, width=32, kind="t5"):
    """The eager model in float64 on the CPU, the same on the device, and with the way."""
    exact = build(kind, "eager", d_model=64, d_kv=width, num_heads=2)
    plain = copy.deepcopy(exact).to(CUDA, dtype)
    way = copy.deepcopy(plain)
    apply_ways(way, ["t5_attention"], Facts(CUDA, dtype, packing=True, longest=LONGEST))
    return exact, plain, way


def vector(gradients):
    return torch.cat([one.double().cpu().flatten() for one in gradients.values()])


@pytest.mark.parametrize("width", [32, 64, 80, 128])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_loss_and_gradients_are_as_near_as_eager_attentions(dtype, packed, width):
    exact, plain, way = models(dtype, width)
    batch = rows(causal=False)[packed]
    loss, gradients = loss_and_gradients(exact, batch, causal=False)
    for model in (plain, way):
        found, of_model = loss_and_gradients(model, batch.to(CUDA), causal=False)
        assert abs(found.double().cpu() - loss) <= TOLERANCES[dtype] * loss
        wanted = vector(gradients)
        assert (vector(of_model) - wanted).norm() <= TOLERANCES[dtype] * wanted.norm()


def test_two_runs_and_a_recomputed_one_are_equal_to_the_bit():
    _, _, way = models(torch.bfloat16)
    set_attention_dropout(way, 0.1)
    again = copy.deepcopy(way)
    enable_activation_checkpointing(again)
    results = []
    for model in (way, way, again):
        torch.manual_seed(3)
        loss, gradients = loss_and_gradients(model, rows(causal=False)[1].to(CUDA), causal=False)
        results.append([loss, *gradients.values()])
    for other in results[1:]:
        assert all(torch.equal(one, two) for one, two in zip(results[0], other, strict=True))


@pytest.mark.parametrize(("rows_", "length", "dropout"), [(32, 512, 0.0), (8, 2048, 0.1), (3, 1021, 0.1)])
def test_nothing_of_all_pairs_is_in_memory_at_real_sizes(rows_, length, dropout):
    heads, width = 16, 64
    given = [torch.randn(rows_, length, heads, width, device=CUDA, dtype=torch.bfloat16) for _ in range(3)]
    given = [one.transpose(1, 2).requires_grad_() for one in given]
    table = torch.randn(heads, 32, device=CUDA, requires_grad=True)
    seed = torch.tensor([7], device=CUDA) if dropout else None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    t5_attention(Attention(*given, table, None, seed, False, True, 128, 1.0, dropout)).square().mean().backward()
    assert torch.cuda.max_memory_allocated() - before < 10 * given[0].numel() * 2 + (64 << 20)
    assert all(torch.isfinite(one.grad).all() for one in (*given, table))
