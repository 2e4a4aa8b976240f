"""The way ``liger`` on a CUDA device, with Liger's own kernels: loss and gradients of the plain model."""

import copy

import pytest
import torch

from fullshard.program.speed import Facts, apply_ways
from support.models import causal_loss, llama, seq2seq_loss, t5

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("make", "loss_of"), [(t5, seq2seq_loss), (llama, causal_loss)], ids=["t5", "llama"])
def test_loss_and_gradients_are_those_of_the_plain_model(make, loss_of, dtype):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    pytest.importorskip("liger_kernel")
    device = torch.device("cuda")
    torch.manual_seed(0)
    plain = make().to(dtype).train()
    model = copy.deepcopy(plain)
    apply_ways(model, ["liger"], Facts(device, dtype, packing=False, longest=8))
    tokens = torch.arange(1, 17, device=device).reshape(2, 8)
    found = []
    for one in (model, plain):
        loss = loss_of(one.to(device), tokens)
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in one.parameters())])
    tolerance = 1e-5 if dtype == torch.float32 else 0.03
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)
