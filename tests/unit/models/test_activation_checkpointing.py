"""Activation checkpointing recomputes blocks and changes nothing else."""

import pytest
import torch
from transformers import T5Config, T5ForConditionalGeneration

from fullshard.errors import ModelError
from fullshard.program.models import blocks_of, build_model, enable_activation_checkpointing

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


def recomputed(number, layers):
    model = T5ForConditionalGeneration(T5Config(**T5 | {"num_layers": layers, "vocab_size": 8}))
    enable_activation_checkpointing(model, number)
    return [place for place, block in enumerate(blocks_of(model)) if block.gradient_checkpointing]


def test_a_number_of_blocks_is_spread_over_both_stacks_and_the_deepest_comes_last():
    assert recomputed(0, 3) == []
    assert recomputed(1, 3) == [0]
    assert recomputed(2, 3) == [0, 3]
    assert recomputed(4, 3) == [0, 1, 3, 4]
    assert recomputed(5, 3) == [0, 1, 2, 3, 4]
    assert recomputed(6, 3) == recomputed(None, 3) == [0, 1, 2, 3, 4, 5]


def test_more_blocks_than_there_are():
    with pytest.raises(ModelError, match=r"7 blocks .* T5ForConditionalGeneration has 6\. .*at most 6"):
        recomputed(7, 3)
