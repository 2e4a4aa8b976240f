"""T5's attention dropout changes nothing else, and fp16 is refused for T5's family."""

import copy

import pytest
import torch
from torch import nn
from transformers import MT5Config, MT5ForConditionalGeneration, UMT5Config, UMT5ForConditionalGeneration

from fullshard.errors import ModelError
from fullshard.program.models import require_fp16_fit, set_attention_dropout
from support.models import bart, gpt2, t5, tiny_t5_config

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
    [lambda: MT5ForConditionalGeneration(MT5Config(**TINY)), lambda: UMT5ForConditionalGeneration(UMT5Config(**TINY))],
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
    with pytest.raises(ModelError, match=r"exceed float16's maximum of 65,504.*training\.allow_fp16"):
        require_fp16_fit("t5")
    require_fp16_fit("gpt2")
