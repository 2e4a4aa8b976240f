"""Rows laid end to end give the loss and gradients of rows that are padded, to the last digits of float64."""

import pytest
import torch
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from fullshard.core.engine import fully_shard
from fullshard.core.shards import rows_of
from fullshard.core.testing import run_ranks
from fullshard.errors import ModelError
from fullshard.program.models.packing import PACKABLE_CAUSAL, PACKABLE_SEQ2SEQ, enable_packing
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


def test_every_model_type_that_packing_allows_is_tested():
    assert set(CONFIGS) == {*PACKABLE_CAUSAL, *PACKABLE_SEQ2SEQ}


@pytest.mark.parity
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_a_packed_batch_gives_the_loss_and_gradients_of_the_padded_one(kind, attention, monkeypatch):
    if (kind, attention) == ("gemma2", "sdpa"):
        pytest.skip("transformers has no such Gemma 2")
    # Eager attention of most types computes its softmax in float32, which would hide all behind the seventh digit.
    softmax = functional.softmax
    monkeypatch.setattr(functional, "softmax", lambda scores, dim, dtype=None: softmax(scores, dim))
    model = build(kind, attention)
    causal = not model.config.is_encoder_decoder
    padded, packed = rows(causal)
    assert packed.input_ids_BS.shape[0] < padded.input_ids_BS.shape[0]
    assert packed.packing.segments_BS.max() > 1
    assert (packed.target_tokens, packed.tokens) == (padded.target_tokens, padded.tokens)
    ours, theirs = (loss_and_gradients(model, batch, causal) for batch in (packed, padded))
    assert_same(ours, theirs, TOLERANCES.get(kind, 1e-12))


@pytest.mark.parity
@pytest.mark.parametrize("kind", ["t5", "llama"])
def test_packing_stays_exact_when_the_model_is_sharded(kind):
    causal = kind == "llama"
    padded, packed = rows(causal)
    expected = loss_and_gradients(build(kind, "sdpa"), padded, causal)
    models = [build(kind, "sdpa") for _ in range(2)]

    def work(comm):
        model = fully_shard(models[comm.rank], comm)
        loss, _ = loss_and_gradients(model, packed, causal)
        grads = {p.shard_meta.name: (p.shard_meta.row_range, p.grad) for p in model.parameters() if p.grad is not None}
        return loss, {name: (place, rows_of(gradient)) for name, (place, gradient) in grads.items()}

    for loss, grads in run_ranks(2, work):
        assert abs(loss - expected[0]) <= 1e-12 * expected[0]
        for name, ((first, last), gradient) in grads.items():
            # The engine averages over ranks, which have the same rows here.
            torch.testing.assert_close(gradient, expected[1][name][first:last], atol=1e-11, rtol=0)


def test_evaluation_and_generation_are_as_without_packing():
    model = build("t5", "sdpa").eval()
    plain = AutoModelForSeq2SeqLM.from_config(model.config, attn_implementation="sdpa").double().eval()
    plain.load_state_dict(model.state_dict())
    padded, _ = rows(causal=False)
    with torch.no_grad():
        inputs = model_inputs(model, padded, causal=False)
        assert torch.equal(model(**inputs).logits, plain(**inputs).logits)
        prompts = {"input_ids": padded.prompt_ids_BP, "attention_mask": padded.prompt_mask_BP, "max_new_tokens": 5}
        assert torch.equal(model.generate(**prompts), plain.generate(**prompts))


@pytest.mark.parity
@pytest.mark.parametrize("kind", ["mistral", "gemma3_text"])
def test_a_window_as_long_as_the_longest_row_hides_nothing(kind):
    """A sequence of several rows is longer than the window."""
    model = build(
        kind,
        "eager",
        sliding_window=LONGEST,
        **({"layer_types": ["sliding_attention"] * 2} if kind != "mistral" else {}),
    )
    padded, packed = rows(causal=True)
    assert packed.input_ids_BS.shape[1] > LONGEST
    ours, theirs = (loss_and_gradients(model, batch, causal=True) for batch in (packed, padded))
    assert_same(ours, theirs, 1e-6)


def test_models_that_packing_is_not_proven_for_are_refused():
    config = AutoConfig.for_model("bart", **BIG, d_model=16, encoder_layers=1, decoder_layers=1)
    bart = AutoModelForSeq2SeqLM.from_config(config)
    with pytest.raises(ModelError, match=r"type cohere, gemma, .*, mt5, .*, starcoder2, t5; this one is bart"):
        enable_packing(bart, LONGEST)
    build("mistral", "eager", sliding_window=13)
    build("gemma3_text", "eager", sliding_window=12)  # which no layer has
    with pytest.raises(ModelError, match=r"one of 12 tokens: rows may have 13"):
        build("gemma3_text", "eager", sliding_window=12, layer_types=["sliding_attention", "full_attention"])
    with pytest.raises(ModelError, match=r"one of 12 tokens: rows may have 13 \(data.max_source_length"):
        build("mistral", "eager", sliding_window=12)
    model = build("llama", "eager")
    model.config._attn_implementation = "flex_attention"
    with pytest.raises(ModelError, match=r"needs attn_implementation eager or sdpa; got flex_attention"):
        enable_packing(model, LONGEST)
