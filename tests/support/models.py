"""Small models for the tests, and a batch and loss for each; those without transformers are in ``tiny_lm``."""

import torch
import torch.nn.functional as F
from torch import nn
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from support.tiny_lm import (
    VOCAB as VOCAB,
    Block as Block,
    SkippingLM as SkippingLM,
    TinyLM as TinyLM,
    batches as batches,
    lm_loss as lm_loss,
    lm_with_frozen_parts as lm_with_frozen_parts,
    two_forwards_loss as two_forwards_loss,
)


def seq2seq_loss(model, tokens):
    logits = model(input_ids=tokens, decoder_input_ids=tokens[:, :-1]).logits
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def causal_loss(model, tokens):
    logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def tiny_t5_config(**changes):
    settings = {"vocab_size": VOCAB, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    return T5Config(**(settings | {"dropout_rate": 0.0, "decoder_start_token_id": 0} | changes))


def t5():
    return T5ForConditionalGeneration(tiny_t5_config())


def t5_untied():
    """T5 1.1: gated feed-forward, and a head of its own."""
    model = T5ForConditionalGeneration(tiny_t5_config(feed_forward_proj="gated-gelu"))
    model.lm_head.weight = nn.Parameter(torch.randn(VOCAB, 32))
    return model


def bart(**changes):
    sizes = {"layers": 2, "attention_heads": 4, "ffn_dim": 48}
    settings = {f"{part}_{what}": size for part in ("encoder", "decoder") for what, size in sizes.items()}
    settings |= {"vocab_size": VOCAB, "d_model": 32, "max_position_embeddings": 32}
    settings |= dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), 0.0)
    settings |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    settings |= {"decoder_start_token_id": 2, "forced_eos_token_id": 2}
    return BartForConditionalGeneration(BartConfig(**(settings | changes)))


def gpt2(**changes):
    settings = {"vocab_size": VOCAB, "n_positions": 32, "n_embd": 32, "n_layer": 3, "n_head": 4}
    settings |= {
        "bos_token_id": 1,
        "eos_token_id": 2,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    }
    return GPT2LMHeadModel(GPT2Config(**(settings | changes)))


def llama(**changes):
    settings = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    settings |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**(settings | changes)))


def t5_checkpointed(*, reentrant):
    model = t5()
    # transformers renamed the method; the old name warns
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": reentrant})
    return model.train()


def t5_frozen_encoder():
    model = t5()
    model.encoder.block.requires_grad_(False)
    return model


KINDS = {
    "lm": (TinyLM, lm_loss),
    "lm_two_forwards": (TinyLM, two_forwards_loss),
    "lm_frozen_parts": (lm_with_frozen_parts, lm_loss),
    "lm_checkpoint": (lambda: TinyLM(reentrant=False), lm_loss),
    "lm_checkpoint_reentrant": (lambda: TinyLM(reentrant=True), lm_loss),
    "lm_checkpoint_two_forwards": (lambda: TinyLM(reentrant=False), two_forwards_loss),
    "lm_reentrant_two_forwards": (lambda: TinyLM(reentrant=True), two_forwards_loss),
    "t5": (t5, seq2seq_loss),
    "t5_untied": (t5_untied, seq2seq_loss),
    "t5_checkpoint": (lambda: t5_checkpointed(reentrant=False), seq2seq_loss),
    "t5_checkpoint_reentrant": (lambda: t5_checkpointed(reentrant=True), seq2seq_loss),
    "t5_frozen_encoder": (t5_frozen_encoder, seq2seq_loss),
    "bart": (bart, seq2seq_loss),
    "gpt2": (gpt2, causal_loss),
}
