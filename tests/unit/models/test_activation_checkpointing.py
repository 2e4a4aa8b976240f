"""Activation checkpointing recomputes blocks and changes nothing else."""

import pytest
import torch

from fullshard.errors import ModelError
from fullshard.models import build_model, enable_activation_checkpointing

T5 = {
    "model_type": "t5", "d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0,
}  # fmt: skip


def loss_gradients_and_calls(model, ids):
    calls = []
    model.encoder.block[0].layer[1].register_forward_pre_hook(lambda *_: calls.append(1))
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}, len(calls)


def test_gradients_are_equal_and_blocks_run_twice(tokenizer):
    ids = torch.tensor([tokenizer("My card has not arrived").input_ids])
    plain = build_model(T5, tokenizer, seed=1)
    checkpointed = build_model(T5, tokenizer, seed=1)
    enable_activation_checkpointing(checkpointed)
    loss, gradients, calls = loss_gradients_and_calls(plain, ids)
    other_loss, other_gradients, other_calls = loss_gradients_and_calls(checkpointed, ids)
    assert (calls, other_calls) == (1, 2)
    torch.testing.assert_close(loss, other_loss)
    torch.testing.assert_close(gradients, other_gradients)


def test_generation_still_works(tokenizer):
    ids = torch.tensor([tokenizer("My card has not arrived").input_ids])
    plain = build_model(T5, tokenizer, seed=1).eval()
    expected = plain.generate(input_ids=ids, max_new_tokens=4, do_sample=False)
    enable_activation_checkpointing(plain)
    assert torch.equal(plain.eval().generate(input_ids=ids, max_new_tokens=4, do_sample=False), expected)


def test_model_without_support(tokenizer):
    model = build_model(T5, tokenizer, seed=1)
    model.supports_gradient_checkpointing = False
    with pytest.raises(ModelError, match="T5ForConditionalGeneration does not support activation checkpointing"):
        enable_activation_checkpointing(model)
