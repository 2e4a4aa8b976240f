"""Changes of a model are exact, and only of what they name."""

import copy

import pytest
import torch
from torch import nn
from transformers import MT5Config, MT5ForConditionalGeneration, UMT5Config, UMT5ForConditionalGeneration

from fullshard import fully_shard
from fullshard.errors import ModelError
from fullshard.models import (
    build_model,
    build_skeleton,
    compile_blocks,
    load_model,
    require_fp16_fit,
    set_attention_dropout,
    train_tokenizer,
)
from fullshard.testing import run_ranks
from support.models import bart, gpt2, t5, tiny_t5_config

DYNAMO = pytest.mark.filterwarnings("ignore")  # torch's compiler warns of its own doings
TINY = {"vocab_size": 50, "d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.3}


def with_dropout():
    return type(t5())(tiny_t5_config(dropout_rate=0.3))


def output(model, seed=0):
    tokens = torch.arange(3, 13).view(2, 5)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return model(input_ids=tokens, decoder_input_ids=tokens).logits


def test_attention_dropout_is_that_of_attention_weights_and_no_other():
    torch.manual_seed(0)
    model = with_dropout().train()
    by_hand, ours = copy.deepcopy(model), copy.deepcopy(model)
    for stack in (by_hand.encoder, by_hand.decoder):
        for block in stack.block:
            block.layer[0].SelfAttention.dropout = 0.0
            if hasattr(block.layer[1], "EncDecAttention"):
                block.layer[1].EncDecAttention.dropout = 0.0
    set_attention_dropout(ours, 0.0)
    assert torch.equal(output(ours), output(by_hand))
    assert not torch.equal(output(ours), output(model))
    assert not torch.equal(output(ours, 0), output(ours, 1))
    assert {m.p for m in ours.modules() if isinstance(m, nn.Dropout)} == {0.3}


@pytest.mark.parametrize(
    "make",
    [
        lambda: MT5ForConditionalGeneration(MT5Config(**TINY)),
        lambda: UMT5ForConditionalGeneration(UMT5Config(**TINY)),
    ],
)
def test_attention_dropout_knows_t5s_kin(make):
    torch.manual_seed(0)
    model = make().train()
    set_attention_dropout(model, 0.0)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    assert torch.equal(output(model, 0), output(model, 1))


def test_other_models_have_an_option_of_their_own():
    with pytest.raises(ModelError, match=r"this is bart\. Its own option is attention_dropout"):
        set_attention_dropout(bart(), 0.0)
    with pytest.raises(ModelError, match=r"this is gpt2\. Its own option is attn_pdrop"):
        set_attention_dropout(gpt2(), 0.0)


def test_fp16_is_refused_for_t5_with_the_reason():
    with pytest.raises(ModelError, match=r"beyond float16's 65,504.*training\.allow_fp16"):
        require_fp16_fit("t5")
    require_fp16_fit("gpt2")


def test_attention_is_computed_as_asked_where_the_model_offers_it(tmp_path):
    tokenizer = train_tokenizer(["some words to learn from"], 60)
    config = {"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2}
    built = build_model(config, tokenizer, attention="eager", seed=0)
    assert built.config._attn_implementation == "eager"
    built.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    for load in (load_model, build_skeleton):
        assert load(tmp_path, tokenizer, attention="sdpa").config._attn_implementation == "sdpa"
        assert load(tmp_path, tokenizer, attention="eager").config._attn_implementation == "eager"
    small = {"model_type": "t5", "d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    with pytest.raises(ModelError, match=r"does not offer attn_implementation 'flash_attention_2'; it offers eager"):
        build_model(small, tokenizer, attention="flash_attention_2", seed=0)


@DYNAMO
def test_compiled_blocks_keep_names_and_values():
    torch.manual_seed(0)
    model = t5()
    names = [name for name, _ in model.named_parameters()]
    expected = output(model)
    compile_blocks(model, backend="eager")
    assert [name for name, _ in model.named_parameters()] == names
    assert len([module for module in model.modules() if module._compiled_call_impl is not None]) == 4
    torch.testing.assert_close(output(model), expected)


@DYNAMO
@pytest.mark.parametrize(
    ("make", "backend"),
    [(gpt2, "eager"), pytest.param(gpt2, "inductor", marks=[pytest.mark.slow, pytest.mark.timeout(600)])],
)
def test_a_sharded_model_of_compiled_blocks_gives_the_same_gradients(make, backend):
    torch.manual_seed(0)
    reference = make()
    model = copy.deepcopy(reference)
    tokens = torch.arange(3, 13).view(2, 5)

    def loss(one):
        inputs = {"decoder_input_ids": tokens} if one.config.is_encoder_decoder else {}
        return one(input_ids=tokens, **inputs).logits.square().mean()

    loss(reference).backward()
    compile_blocks(model, backend=backend)
    run_ranks(1, lambda comm: loss(fully_shard(model, comm)).backward())
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-5, rtol=1e-4)


def test_a_model_without_blocks_is_not_compiled():
    with pytest.raises(ModelError, match="Linear has no transformer blocks"):
        compile_blocks(nn.Linear(2, 2))
