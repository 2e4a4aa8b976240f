"""Laws of the loss: what it is, and that computing it in the output head changes nothing but the memory."""

import copy
import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Gemma2Config, Gemma2ForCausalLM
from transformers.trainer_pt_utils import LabelSmoother

from fullshard import fully_shard
from fullshard.core.comm import MemoryMeter, device_memory_bytes, logits_at_once, planned_memory
from fullshard.core.comm.memory import LOGITS_AT_ONCE
from fullshard.core.testing import run_ranks
from fullshard.errors import ModelError
from fullshard.program.models import (
    PLAIN,
    Objective,
    fuse_head,
    fused_head_of,
    loss as loss_module,
    model_loss,
    summed_loss,
)
from support.models import VOCAB, bart, gpt2, t5, t5_untied
from support.parity import assert_gradients, replicas, sharded_gradients

BOTH = Objective(label_smoothing=0.1, z_loss=1e-2)


def batch(rows=4, length=7):
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(3, VOCAB, (rows, length), generator=generator)
    labels = tokens.clone()
    labels[0, 3:] = -100
    labels[-1] = -100
    return tokens, labels


def forward_of(model, tokens):
    inputs = {"decoder_input_ids": tokens} if model.config.is_encoder_decoder else {}
    return lambda: model(input_ids=tokens, use_cache=False, **inputs).logits


def loss_of(model, tokens, labels, objective=PLAIN):
    return model_loss(model, forward_of(model, tokens), labels, objective)


def test_the_loss_is_the_written_formula():
    torch.manual_seed(0)
    logits, (_, labels) = torch.randn(4, 7, VOCAB, dtype=torch.float64), batch()
    expected = 0.0
    for row, label in zip(logits.flatten(0, 1), labels.flatten(), strict=True):
        if label != -100:
            lse = row.exp().sum().log()
            expected += lse - 0.9 * row[label] - 0.1 * row.mean() + 1e-2 * lse**2
    assert summed_loss(logits, labels, BOTH).item() == pytest.approx(expected.item(), rel=1e-12)
    assert summed_loss(logits, torch.full_like(labels, -100), BOTH).item() == 0


def test_label_smoothing_is_hugging_faces_too():
    logits, (_, labels) = torch.randn(4, 7, VOCAB, dtype=torch.float64), batch()
    theirs = LabelSmoother(epsilon=0.1)({"logits": logits}, labels)
    ours = summed_loss(logits, labels, Objective(label_smoothing=0.1)) / (labels != -100).sum()
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-6)  # it adds up in float32


@pytest.mark.parametrize("objective", [PLAIN, BOTH])
@pytest.mark.parametrize("make", [t5, t5_untied, bart, gpt2])
def test_the_fused_head_gives_the_loss_and_gradients_of_all_logits(make, objective, monkeypatch):
    monkeypatch.setitem(LOGITS_AT_ONCE, "cpu", 64 * VOCAB)  # chunks of 64 rows, and a last one of fewer
    torch.manual_seed(0)
    model = make().double()
    fused = copy.deepcopy(model)
    fuse_head(fused)
    tokens, labels = batch(rows=20)
    plain = loss_of(model, tokens, labels, objective)
    (plain * 0.5).backward()
    loss = loss_of(fused, tokens, labels, objective)
    assert loss.dtype == torch.float64
    (loss * 0.5).backward()
    assert loss.item() == pytest.approx(plain.item(), rel=1e-13)
    for (name, ours), theirs in zip(fused.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-12, rtol=1e-12, msg=name)


def test_the_fused_head_agrees_in_the_precision_it_computes_in():
    torch.manual_seed(0)
    model = t5()
    fused = copy.deepcopy(model)
    fuse_head(fused)
    tokens, labels = batch()
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 3e-2)):
        plain, ours = model.to(dtype), fused.to(dtype)
        loss, expected = loss_of(ours, tokens, labels), loss_of(plain, tokens, labels)
        assert loss.dtype == torch.float32
        assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
        for one in (loss, expected):
            one.backward()
        for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, atol=tolerance * b.grad.abs().max().item(), rtol=0)
            a.grad = b.grad = None


@pytest.mark.parametrize("expected", [1.0039, 0.50195])
def test_in_16_bits_gradients_have_no_error_in_common(expected):
    torch.manual_seed(0)
    head = torch.nn.Linear(32, 64)
    hidden, labels = torch.randn(1, 400, 32).bfloat16(), torch.randint(64, (1, 400))
    factor = 1.0039  # 1 in bfloat16

    def gradients(dtype):
        own, rows = copy.deepcopy(head).bfloat16().to(dtype), hidden.to(dtype, copy=True).requires_grad_()
        fused = loss_module.FusedHead(own)
        with fused.loss_context(labels, BOTH, expected):
            loss = fused(rows)
        (loss * factor).backward()
        assert own.weight.grad.dtype == rows.grad.dtype == dtype
        return [one.grad.double() for one in (rows, own.weight, own.bias)]

    for ours, exact in zip(gradients(torch.bfloat16), gradients(torch.float64), strict=True):
        common = (ours * exact).sum() / exact.square().sum()
        assert common.item() == pytest.approx(1, abs=4e-4)


def test_a_head_at_rest_gives_logits_and_a_frozen_one_gets_no_gradient():
    torch.manual_seed(0)
    model = t5_untied()
    tokens, labels = batch()
    expected = forward_of(model, tokens)()
    fuse_head(model)
    assert torch.equal(forward_of(model, tokens)(), expected)
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in t5_untied().named_parameters()]
    model.lm_head.requires_grad_(False)
    loss_of(model, tokens, labels).backward()
    assert model.lm_head.weight.grad is None
    assert model.shared.weight.grad.abs().sum() > 0
    with torch.no_grad():
        loss = loss_of(model, tokens, torch.full_like(labels, -100))
    assert (loss.item(), loss.requires_grad) == (0.0, False)


@pytest.mark.parity
@pytest.mark.parametrize("make", [t5, bart, gpt2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sharded_the_fused_head_gives_the_unsharded_gradients(make, dtype):
    """``t5`` ties the head to the embedding, so that its weight lives with the root."""
    reference, models = replicas(lambda: make().to(dtype), 2)
    tokens, labels = batch()
    loss_of(reference, tokens, labels, BOTH).backward()

    def work(comm):
        model = models[comm.rank]
        fuse_head(model)
        model = fully_shard(model, comm)
        rows = slice(2 * comm.rank, 2 * comm.rank + 2)
        # The engine averages over ranks.
        (loss_of(model, tokens[rows], labels[rows], BOTH) * comm.size).backward()
        return sharded_gradients(model)

    assert_gradients(run_ranks(2, work), reference, 1e-12 if dtype == torch.float64 else 1e-5)


def test_logits_are_never_in_memory_as_a_whole():
    """With a vocabulary that makes everything else small beside them."""
    torch.manual_seed(0)
    vocabulary, rows, width = 20_000, 1200, 8
    head = torch.nn.Linear(width, vocabulary, bias=False)
    model = torch.nn.Module()
    model.config = gpt2().config
    model.get_output_embeddings = lambda: head
    hidden = torch.randn(1, rows, width, requires_grad=True)
    labels = torch.randint(vocabulary, (1, rows))
    logits_bytes = rows * vocabulary * 4

    def peak():
        with MemoryMeter(torch.device("cpu")) as meter:
            model_loss(model, lambda: head(hidden), labels, PLAIN).backward()
        return meter.peak_bytes - meter.start_bytes

    plain = peak()
    head.forward = loss_module.FusedHead(head)
    fused = peak()
    assert plain > 2 * logits_bytes
    # Three chunks' worth of logits; and the gradient of the weight, twice while it is handed over.
    assert fused < 3.2 * LOGITS_AT_ONCE["cpu"] * 4 + 2 * vocabulary * width * 4 + 2**20


def test_a_plan_for_a_gpu_computes_as_many_logits_at_once_as_a_gpu():
    cpu = torch.device("cpu")
    assert logits_at_once(cpu) == 2**23
    host = device_memory_bytes(cpu)
    with planned_memory(24 << 30):
        assert logits_at_once(cpu) == logits_at_once(torch.device("cuda")) == 2**27
        assert device_memory_bytes(cpu) == 24 << 30
    assert logits_at_once(cpu) == 2**23
    assert device_memory_bytes(cpu) == host


class NumbersRead(TorchDispatchMode):
    """Counts operators whose result's size or value the host has to know, for which it waits on a GPU."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.nonzero.default, torch.ops.aten._local_scalar_dense.default):
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_fused_loss_reads_no_number_if_it_is_told_how_many_targets_there_are():
    torch.manual_seed(0)
    model = t5()
    fuse_head(model)
    tokens, labels = batch()
    count = int((labels != -100).sum())

    def loss(targets):
        run = lambda: model(input_ids=tokens, decoder_input_ids=model._shift_right(labels)).logits  # noqa: E731
        return model_loss(model, run, labels, BOTH, targets=targets)

    with NumbersRead() as told:
        first = loss(count)
    with NumbersRead() as counted:
        second = loss(None)
    assert torch.equal(first, second)
    assert told.names == []
    assert len(counted.names) == 1


def test_models_that_change_logits_after_the_head_are_refused():
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "head_dim": 8,
    }
    config = {"vocab_size": VOCAB, "num_key_value_heads": 1, **sizes}
    with pytest.raises(ModelError, match="Gemma2ForCausalLM changes the logits after it"):
        fuse_head(Gemma2ForCausalLM(Gemma2Config(**config)))
    uncapped = Gemma2ForCausalLM(Gemma2Config(**config, final_logit_softcapping=None))
    fuse_head(uncapped)
    assert fused_head_of(uncapped) is not None
    biased = bart()
    fuse_head(biased)
    biased.final_logits_bias[0, 3] = 0.5
    with pytest.raises(ModelError, match="adds a bias to the logits"):
        loss_of(biased, *batch())
    odd = t5()
    odd.lm_head = torch.nn.Sequential(odd.lm_head)
    with pytest.raises(ModelError, match=r"plain linear output layer; .* is Sequential"):
        fuse_head(odd)


def test_the_head_is_looked_at_without_memory():
    for make in (t5, bart, gpt2):
        with torch.device("meta"):
            model = make()
        fuse_head(model)
        assert model.training
        assert all(p.is_meta for p in model.parameters())


def test_backward_runs_once():
    model = t5()
    fuse_head(model)
    loss = loss_of(model, *batch())
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="runs once"):
        loss.backward()
    assert math.isfinite(loss.item())
