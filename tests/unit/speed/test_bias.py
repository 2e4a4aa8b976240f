"""T5's attention by bias_sdpa: values and gradients of eager attention, from one tensor a stack."""

import copy

import pytest
import torch
from torch.nn import functional
from transformers import AutoConfig, AutoModelForSeq2SeqLM

from fullshard import MixedPrecision, fully_shard, unsharded
from fullshard.core.testing import run_ranks
from fullshard.errors import ModelError
from fullshard.program.models import enable_activation_checkpointing, set_attention_dropout
from fullshard.program.models.packing import enable_packing
from fullshard.program.speed import WAYS, Facts, apply_ways
from fullshard.program.train.setup.model import model_inputs
from support.packed_models import LONGEST, T5, assert_same, build, loss_and_gradients, rows

CPU = torch.device("cpu")
FACTS = Facts(CPU, torch.float32, packing=True, longest=LONGEST)
CONFIGS = {
    "t5": T5,
    "mt5": T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    "umt5": T5 | {"feed_forward_proj": "gated-gelu"},
    "longt5": T5 | {"local_radius": 5, "encoder_attention_type": "local"},
    "switch_transformers": T5
    | {"num_experts": 2, "expert_capacity": 64, "num_sparse_encoder_layers": 1, "router_jitter_noise": 0.0},
}


def pair(kind="t5", dtype=torch.float64, **changes):
    """An eager model, and its copy with the way."""
    config = AutoConfig.for_model(kind, **CONFIGS[kind] | changes)
    torch.manual_seed(0)
    plain = AutoModelForSeq2SeqLM.from_config(config, attn_implementation="eager").to(dtype).train()
    if kind in ("t5", "mt5"):
        enable_packing(plain, LONGEST)
    way = copy.deepcopy(plain)
    apply_ways(way, ["bias_sdpa"], FACTS)
    return way, plain


@pytest.fixture
def attended(monkeypatch):
    """The masks that attention is called with."""
    masks, attend = [], functional.scaled_dot_product_attention

    def noted(query, key, value, mask=None, **kwargs):
        masks.append(mask)
        return attend(query, key, value, mask, **kwargs)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", noted)
    return masks


@pytest.mark.parity
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("kind", CONFIGS)
def test_loss_and_gradients_are_those_of_eager_attention(kind, recompute):
    way, plain = pair(kind)
    if recompute:
        enable_activation_checkpointing(way)
    for batch in rows(causal=False)[: 2 if kind in ("t5", "mt5") else 1]:
        assert_same(*(loss_and_gradients(model, batch, causal=False) for model in (way, plain)), 1e-12)


@pytest.mark.parity
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_ten_steps_on_two_ranks_are_those_of_the_eager_model(packed, recompute):
    way, plain = pair(dtype=torch.float32)
    batch = rows(causal=False)[packed]
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for _ in range(10):
        loss_and_gradients(plain, batch, causal=False)
        optimizer.step()
    if recompute:
        enable_activation_checkpointing(way)
    ways = [way, copy.deepcopy(way)]

    def work(comm):
        model = fully_shard(ways[comm.rank], comm)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(10):
            loss_and_gradients(model, batch, causal=False)  # both ranks have these rows, so the mean is theirs
            optimizer.step()
        with unsharded(model):
            return {name: p.detach().clone() for name, p in model.named_parameters()}

    trained = run_ranks(2, work)[0]
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(trained[name], parameter, atol=1e-5, rtol=0)


@pytest.mark.parametrize("packed", [False, True])
def test_layers_of_a_stack_share_one_aligned_tensor(packed, attended):
    way, _ = pair(dtype=torch.float32)
    loss_and_gradients(way, rows(causal=False)[packed], causal=False)
    encoder, decoder, cross = attended[:2], attended[2::2], attended[3::2]
    for masks in (encoder, decoder, cross):
        assert masks[0] is masks[1]
        assert masks[0].stride(-1) == 1
        assert all(stride % 8 == 0 for stride in masks[0].stride()[:-1])
    assert cross[0].shape[1] == 1
    assert not cross[0].requires_grad
    if not packed:
        assert decoder[0].shape[0] == 1  # rows have no masks of their own: the tensor is expanded


def test_cross_attention_without_padding_has_no_mask(attended):
    way, _ = pair(dtype=torch.float32)
    tokens = torch.arange(2, 18).view(2, 8)
    way(input_ids=tokens, labels=tokens, use_cache=False)
    assert [mask is None for mask in attended] == [False, False, False, True, False, True]


def test_texts_and_evaluation_are_as_before():
    way, plain = (model.eval() for model in pair())
    padded, _ = rows(causal=False)
    prompts = {"input_ids": padded.prompt_ids_BP, "attention_mask": padded.prompt_mask_BP, "max_new_tokens": 6}
    with torch.no_grad():
        inputs = model_inputs(plain, padded, causal=False)
        torch.testing.assert_close(way(**inputs).logits, plain(**inputs).logits)
        for beams in (1, 2):
            assert torch.equal(way.generate(**prompts, num_beams=beams), plain.generate(**prompts, num_beams=beams))


def test_attention_dropout_is_applied_in_training_only():
    way, _ = pair(dtype=torch.float32, dropout_rate=0.5)
    padded, _ = rows(causal=False)
    inputs = model_inputs(way, padded, causal=False)

    def logits(seed):
        torch.manual_seed(seed)
        return way(**inputs).logits

    for module in way.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    assert not torch.equal(logits(0), logits(1))
    set_attention_dropout(way, 0.0)
    assert torch.equal(logits(0), logits(1))


@pytest.mark.parity
def test_mixed_precision_rounds_like_eager_attention():
    batch = rows(causal=False)[0]

    def trained(model):
        def work(comm):
            sharded = fully_shard(model, comm, mp_policy=MixedPrecision(param="bfloat16", reduce="float32"))
            loss_and_gradients(sharded, batch, causal=False)
            return torch.cat([p.grad.flatten().float() for p in sharded.parameters()])

        return run_ranks(1, work)[0]

    exact = pair(dtype=torch.float32)[1]
    exact = torch.cat([g.flatten() for g in loss_and_gradients(exact, batch, causal=False)[1].values()])
    way, plain = (trained(model).norm() for model in pair(dtype=torch.float32))
    assert abs(way - exact.norm()) <= 2 * abs(plain - exact.norm()) + 1e-2 * exact.norm()


def test_models_without_a_trained_bias_are_refused():
    with pytest.raises(ModelError, match=r"bias_sdpa does not apply: .*\(longt5, mt5, .*this one is llama\."):
        apply_ways(build("llama", "sdpa"), ["bias_sdpa"], FACTS)
    facts = Facts(torch.device("cuda"), torch.bfloat16, packing=False, longest=LONGEST)
    assert "d_kv 4 in bfloat16 is 8" in WAYS["bias_sdpa"].misfit(pair()[1], facts)
