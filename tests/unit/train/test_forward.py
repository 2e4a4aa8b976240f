"""Rows laid end to end give the loss and gradients of rows that are padded, to the last digits of float64."""

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForSeq2SeqLM

from fullshard.core.engine import fully_shard
from fullshard.core.shards import rows_of
from fullshard.core.testing import run_ranks
from fullshard.errors import ModelError
from fullshard.program.models.packing import PACKABLE_CAUSAL, PACKABLE_SEQ2SEQ, enable_packing
from fullshard.program.train.setup.model import loss_sum, model_inputs
from support.packed_models import BIG, CONFIGS, LONGEST, TOLERANCES, assert_same, build, loss_and_gradients, rows
from support.releases import opt_reads_nothing


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


class Reads(TorchDispatchMode):
    """Counts how often the CPU reads a tensor, for which it would wait for a GPU."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["llama", "gemma2", "qwen3", pytest.param("opt", marks=opt_reads_nothing)])
def test_the_forward_of_a_causal_model_reads_nothing(kind):
    model = build(kind, "eager")
    batch, _ = rows(causal=True)
    with Reads() as reads:
        loss_sum(model, batch, causal=True)
    assert reads.count == 0
