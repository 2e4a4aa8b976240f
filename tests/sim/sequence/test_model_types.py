"""Every type that sequence_parallel accepts: loss and gradients of shared rows are those of full rows."""

import copy

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from fullshard import sequence_parallel
from fullshard.core.sequence.model import DECODERS, ENCODER_DECODERS
from fullshard.core.testing import run_ranks
from fullshard.program.train.setup.model import model_inputs
from support.packed_models import BIG, CONFIGS, MIXTURES, build, rows
from support.shared_rows import VOCAB, packed, padded

SEQ2SEQ = BIG | {
    f"{part}_{what}": size
    for part in ("encoder", "decoder")
    for what, size in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 24), ("layerdrop", 0.0))
}
SEQ2SEQ |= {"d_model": 16, "max_position_embeddings": 64, "decoder_start_token_id": 2, "forced_eos_token_id": 1}
SEQ2SEQ |= dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), 0.0)
CHANGES = {"gemma3_text": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}}


def model_of(kind, **changes):
    settings = CONFIGS.get(kind, SEQ2SEQ) | CHANGES.get(kind, {}) | {"vocab_size": VOCAB} | changes
    config = AutoConfig.for_model(kind, **settings)
    maker = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    torch.manual_seed(0)
    # gemma2 has no other attention than eager
    model = maker.from_config(config, attn_implementation="eager" if kind in ("gemma2", "qwen2") else "sdpa")
    return (model if kind in MIXTURES else model.double()).train()


def losses_and_gradients(model, batches):
    found = []
    for batch in batches:
        model.zero_grad()
        loss = model(**(batch | {"use_cache": False})).loss
        loss.backward()
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]
        found.append((loss.item(), gradients))
    return found


def assert_alike(model, batches, ranks, tolerance=1e-6):
    """The mean of ``ranks``' gradients is the model's, within that share of its largest."""
    models = [copy.deepcopy(model) for _ in range(ranks)]
    expected = losses_and_gradients(model, batches)
    found = run_ranks(ranks, lambda comm: losses_and_gradients(sequence_parallel(models[comm.rank], comm), batches))
    for index, (loss, gradients) in enumerate(expected):
        assert [of_rank[index][0] for of_rank in found] == pytest.approx([loss] * ranks, rel=1e-6)
        largest = max(gradient.abs().max() for gradient in gradients)
        means = [sum(each) / ranks for each in zip(*(of_rank[index][1] for of_rank in found), strict=True)]
        for (name, _), ours, theirs in zip(model.named_parameters(), means, gradients, strict=True):
            assert (ours - theirs).abs().max() <= tolerance * largest, name


def batches_for(model, **lengths):
    generator, seq2seq = torch.Generator().manual_seed(0), model.config.is_encoder_decoder
    return [padded(generator, seq2seq=seq2seq, **lengths), packed(generator, seq2seq=seq2seq)]


@pytest.mark.parametrize("kind", [*DECODERS, *ENCODER_DECODERS])
def test_each_type_computes_the_loss_and_gradients_of_full_rows(kind):
    model = model_of(kind)
    assert_alike(model, batches_for(model), ranks=2)


@pytest.mark.parametrize(("heads", "of_keys", "ranks"), [(4, 1, 4), (9, 3, 2), (6, 2, 4), (5, 5, 4)])
def test_heads_of_any_number_are_divided(heads, of_keys, ranks):
    model = model_of("llama", hidden_size=4 * heads, num_attention_heads=heads, num_key_value_heads=of_keys)
    assert_alike(model, batches_for(model), ranks)


@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_the_programs_masks_of_packed_rows(kind):
    model, causal = build(kind, "sdpa"), kind == "llama"
    _, batch = rows(causal)
    assert_alike(model, [model_inputs(model, batch, causal=causal) | {"labels": batch.labels_BT}], ranks=2)
