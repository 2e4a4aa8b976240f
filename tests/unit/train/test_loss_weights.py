"""A row's weight multiplies the loss of its tokens and their number: weight k is the row k times."""

import copy
import dataclasses

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from fullshard.core.testing import run_ranks
from fullshard.program.models import Objective, fuse_head
from fullshard.program.models.packing import enable_packing
from fullshard.program.train.run.step import StepSpec
from fullshard.program.train.setup.model import losses
from support.one_step import batch_from, one_step, tokenized

SOURCES = [[5, 6, 1], [7, 8, 9, 10, 1], [11, 1], [12, 13, 14, 1]]
TARGETS = [[20, 1], [21, 22, 23, 24, 1], [25, 26, 1], [27, 1]]
WEIGHTS = (2.0, 1.0, 3.0, 1.0)
REPEATED = [row for row, often in enumerate(WEIGHTS) for _ in range(int(often))]
SMALL = {"vocab_size": 40, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1}
T5 = {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
CONFIGS = {
    "t5": SMALL | T5 | {"decoder_start_token_id": 0},
    "gpt2": SMALL
    | {"n_positions": 40, "n_embd": 16, "n_layer": 2, "n_head": 4}
    | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
}
BOTH = Objective(label_smoothing=0.1, z_loss=0.01)


def rows(weights=WEIGHTS):
    found = tokenized(SOURCES, TARGETS)
    return found if weights is None else dataclasses.replace(found, weights=np.asarray(weights))


def model_of(kind, dtype=torch.float64):
    config = AutoConfig.for_model(kind, **CONFIGS[kind])
    torch.manual_seed(0)
    maker = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    model = maker.from_config(config, attn_implementation="eager").to(dtype)
    enable_packing(model, longest=64)
    return model.train()


def batch_of(numbers, some, kind, *, packed=False, fillers=()):
    return batch_from(some, numbers, causal=kind == "gpt2", packed=packed, fillers=fillers)


def loss_and_gradients(model, batch, kind, objective):
    model.zero_grad()
    loss, _ = losses(model, batch, None, causal=kind == "gpt2", objective=objective)
    loss.backward()
    return loss.item(), [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("objective", [Objective(), BOTH], ids=["plain", "both terms"])
@pytest.mark.parametrize("fused", [False, True], ids=["logits", "fused"])
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_it_is_the_loss_of_each_row_as_often_as_its_weight_says(kind, packed, fused, objective):
    model = model_of(kind)
    repeated = batch_of(REPEATED, rows(None), kind)
    expected, gradients = loss_and_gradients(model, repeated, kind, objective)
    if fused:
        fuse_head(model)
    batch = batch_of(range(4), rows(), kind, packed=packed)
    found, ours = loss_and_gradients(model, batch, kind, objective)
    assert found == pytest.approx(expected, rel=1e-12)
    for one, other in zip(ours, gradients, strict=True):
        # T5's normalisation computes in float32.
        assert torch.allclose(one, other, rtol=0, atol=1e-6 if kind == "t5" else 1e-12)
    assert batch.target_weight == repeated.target_weight == repeated.target_tokens == 2 * 2 + 5 + 3 * 3 + 2
    assert batch.target_tokens == 12


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_weight_need_not_be_a_whole_number_and_fillers_weigh_nothing(kind):
    weights, model = (0.25, 1.5, 2.0, 0.5), model_of(kind)
    total = count = without = 0.0
    for row, weight in enumerate(weights):
        alone = batch_of([row], rows(None), kind)
        loss = weight * losses(model, alone, None, causal=kind == "gpt2")[0].item()
        total, without = total + loss, loss if row == 2 else without
        count += weight * alone.target_tokens
    batch = batch_of(range(4), rows(weights), kind)
    assert batch.target_weight == pytest.approx(count)
    assert losses(model, batch, None, causal=kind == "gpt2")[0].item() == pytest.approx(total, rel=1e-12)
    filled = batch_of([0, 1, 2, 3, 2], rows(weights), kind, fillers=[2])
    assert filled.target_weight == pytest.approx(count - 2.0 * 3)  # both places of a filler row are fillers here
    assert losses(model, filled, None, causal=kind == "gpt2")[0].item() == pytest.approx(total - without, rel=1e-12)


def step_of(models, deal, some, kind):
    spec = StepSpec(step=1, epoch=0.5, learning_rate=1e-2, max_grad_norm=1.0, causal=kind == "gpt2")

    def work(comm):
        return one_step(
            models[comm.rank], comm, [batch_of(some_rows, some, kind) for some_rows in deal[comm.rank]], spec
        )

    return run_ranks(len(deal), work)


@pytest.mark.parametrize("deal", [[[[0, 1, 2, 3]]], [[[0, 1]], [[2, 3]]], [[[3], [0]], [[1], [2]]]])
@pytest.mark.parametrize("kind", CONFIGS)
def test_a_sharded_step_is_the_unsharded_step_of_repeated_rows(kind, deal):
    model = model_of(kind, torch.float32)
    models = [copy.deepcopy(model) for _ in deal]
    batch = batch_of(REPEATED, rows(None), kind)
    loss = losses(model, batch, None, causal=kind == "gpt2")[0] / batch.target_tokens
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    torch.optim.SGD(model.parameters(), lr=1e-2).step()
    for report, ours in step_of(models, deal, rows(), kind):
        assert report.loss == pytest.approx(loss.item(), abs=1e-6)
        assert report.grad_norm == pytest.approx(norm.item(), rel=1e-5)
        assert report.target_tokens == 12
        for name, weight in model.named_parameters():
            assert torch.allclose(ours[name], weight, rtol=0, atol=1e-6), name


def test_equal_weights_change_nothing():
    losses_of = [
        loss_and_gradients(model_of("t5"), batch_of(range(4), one, "t5"), "t5", Objective())[0]
        for one in (rows(None), rows((1.0,) * 4))
    ]
    assert losses_of[0] == pytest.approx(losses_of[1], rel=1e-14)
