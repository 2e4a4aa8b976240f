"""Small models of every type that packing allows, and the same rows padded and packed."""

import torch
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from fullshard.program.models.packing import enable_packing
from fullshard.program.train.setup.model import model_inputs
from support.one_step import batch_from, tokenized

VOCAB = 40
LENGTHS = [(9, 4), (3, 6), (5, 1), (1, 2), (7, 3), (2, 9), (4, 4)]
LONGEST = 13
BIG = {"vocab_size": VOCAB, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1}
T5 = BIG | {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
T5 |= {"decoder_start_token_id": 0, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 12}
LLAMA = BIG | {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA |= {"num_key_value_heads": 2, "max_position_embeddings": 64, "attention_dropout": 0.0, "head_dim": 4}
NEOX = {key: value for key, value in LLAMA.items() if key not in ("num_key_value_heads", "head_dim")}
GPT2 = BIG | {"n_positions": 20, "n_embd": 16, "n_layer": 2, "n_head": 4}
GPT2 |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
PLAIN = {key: value for key, value in LLAMA.items() if key != "head_dim"}
WITHOUT_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0}
FULL = {"layer_types": ["full_attention"] * 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
CONFIGS = {
    "cohere": PLAIN,
    "gemma": LLAMA,
    "gemma2": LLAMA | FULL | {"query_pre_attn_scalar": 4},
    "gemma3_text": LLAMA | FULL,
    "granite": PLAIN,
    "granitemoe": PLAIN | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "mixtral": LLAMA | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "olmo": PLAIN,
    "olmo2": PLAIN,
    "olmo3": PLAIN | FULL,
    "olmoe": PLAIN | EXPERTS,
    "opt": BIG
    | {"hidden_size": 16, "ffn_dim": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "dropout": 0.0}
    | {"word_embed_proj_dim": 16, "max_position_embeddings": 64},
    "phi": PLAIN | WITHOUT_DROPOUT | {"partial_rotary_factor": 0.5},
    "phi3": PLAIN | WITHOUT_DROPOUT | {"sliding_window": None},
    "qwen2_moe": PLAIN | EXPERTS | {"shared_expert_intermediate_size": 12},
    "qwen3_moe": LLAMA | EXPERTS,
    "smollm3": PLAIN,
    "stablelm": PLAIN | {"partial_rotary_factor": 0.5},
    "starcoder2": PLAIN | {"sliding_window": None, "residual_dropout": 0.0, "embedding_dropout": 0.0},
    "t5": T5,
    "mt5": T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    "gpt2": GPT2,
    "gpt_neox": NEOX | {"hidden_dropout": 0.0},
    "llama": LLAMA,
    "mistral": LLAMA | {"sliding_window": None},
    "qwen2": LLAMA,
    "qwen3": LLAMA,
}


# Norms of these types compute in float32, so that all behind the eighth digit is lost.
TOLERANCES = {"cohere": 1e-7, "gemma": 1e-7, "gemma2": 1e-7, "gemma3_text": 1e-7}
# The experts' grouped product has no float64.
MIXTURES = ("granitemoe", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe")
TOLERANCES |= dict.fromkeys(MIXTURES, 1e-5)


def build(kind, attention, **changes):
    config = AutoConfig.for_model(kind, **(CONFIGS[kind] | changes))
    maker = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    torch.manual_seed(0)
    model = maker.from_config(config, attn_implementation=attention)
    model = model.to(torch.float32 if kind in MIXTURES else torch.float64)
    enable_packing(model, LONGEST)
    return model.train()


def rows(causal):
    generator = torch.Generator().manual_seed(1)
    make = lambda length: torch.randint(2, VOCAB, (length,), generator=generator).tolist()  # noqa: E731
    all_rows = tokenized([make(s) for s, _ in LENGTHS], [make(t) for _, t in LENGTHS])
    return [batch_from(all_rows, range(7), fillers=[4], causal=causal, packed=packed) for packed in (False, True)]


def loss_and_gradients(model, batch, causal):
    model.zero_grad()
    logits, labels = model(**model_inputs(model, batch, causal=causal)).logits, batch.labels_BT
    if causal:
        logits, labels = logits[:, :-1], labels[:, 1:]
    loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(ours, theirs, tolerance=1e-12):
    assert ours[1].keys() == theirs[1].keys()
    assert (ours[0] - theirs[0]).abs() <= tolerance * theirs[0].abs()
    scale = max(gradient.abs().max() for gradient in theirs[1].values())
    for name, gradient in theirs[1].items():
        assert (ours[1][name] - gradient).abs().max() <= tolerance * scale, name
