"""FlexAttention's scores and blocks: forward by torch on the CPU, gradients by a dense reference of its signature."""

import copy

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from transformers import AutoConfig, AutoModelForCausalLM, masking_utils
from transformers.integrations import flex_attention as transformers_flex

from fullshard.errors import ModelError
from fullshard.program.models import enable_activation_checkpointing
from fullshard.program.speed import WAYS, Facts, apply_ways, flex
from fullshard.program.train.setup.model import model_inputs
from support.packed_models import LONGEST, assert_same, build, loss_and_gradients, rows

FACTS = Facts(torch.device("cuda"), torch.float64, packing=True, longest=LONGEST)


def dense(query, key, value, *, score_mod=None, block_mask=None, scale=None, **options):
    """FlexAttention by its definition: each score and each mask is computed."""
    if query.shape[1] != key.shape[1]:
        key, value = (one.repeat_interleave(query.shape[1] // key.shape[1], 1) for one in (key, value))
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scale is None else scale)
    sizes = scores.shape
    places = [torch.arange(n).view([-1 if i == axis else 1 for i in range(4)]) for axis, n in enumerate(sizes)]
    if score_mod is not None:
        scores = score_mod(scores, *places)
    if block_mask is not None:
        scores = scores.masked_fill(~block_mask.mask_mod(*places), float("-inf"))
    return scores.softmax(-1) @ value


@pytest.fixture(params=["llama", "gemma"])
def kind(request):
    return request.param


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch):
    plain = lambda *args, _compile=False, **kwargs: create_block_mask(*args, **kwargs)  # noqa: E731
    monkeypatch.setattr(masking_utils, "create_block_mask", plain)


def use(monkeypatch, attend):
    monkeypatch.setattr(transformers_flex, "compile_friendly_flex_attention", attend)


def pair(kind):
    plain = build(kind, "eager")
    way = copy.deepcopy(plain)
    apply_ways(way, ["flex"], FACTS)
    return way, plain


@pytest.mark.parity
@pytest.mark.parametrize("recompute", [False, True])
def test_loss_and_gradients_are_those_of_eager_attention(kind, recompute, monkeypatch):
    use(monkeypatch, dense)
    way, plain = pair(kind)
    if recompute:
        enable_activation_checkpointing(way)
    for batch in rows(causal=True):
        ours, theirs = (loss_and_gradients(model, batch, causal=True) for model in (way, plain))
        assert_same(ours, theirs, 1e-6)  # eager attention has a float32 softmax


@pytest.mark.parity
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.filterwarnings("ignore:flex_attention called without", "ignore:The .grad attribute of a Tensor")
def test_torchs_own_forward_gives_the_same(packed, monkeypatch):
    way, plain = (model.float() for model in pair("llama"))
    batch, ran = rows(causal=True)[packed], []

    @torch.no_grad()  # torch has no backward of it on a CPU
    def forward(*inputs, training, **options):
        ran.append(options["block_mask"])
        return flex_attention(*(tensor.detach() for tensor in inputs), **options)

    use(monkeypatch, forward)
    inputs = model_inputs(way, batch, causal=True)
    found, expected = way(**inputs).logits, plain(**model_inputs(plain, batch, causal=True)).logits
    assert len(ran) == 2
    assert all(type(mask).__name__ == "BlockMask" for mask in ran)
    real = batch.labels_BT != -100
    torch.testing.assert_close(found[real], expected[real], atol=1e-5, rtol=0)


def test_texts_and_evaluation_are_as_before():
    way, plain = (model.eval() for model in pair("llama"))
    plain.set_attn_implementation("sdpa")  # eager attention of left-padded rows is nan in float64
    padded, packed = rows(causal=True)
    with torch.no_grad():
        for batch in (padded, packed):
            found, expected = (model(**model_inputs(model, batch, causal=True)).logits for model in (way, plain))
            torch.testing.assert_close(found, expected)
        prompts = {"input_ids": padded.prompt_ids_BP, "attention_mask": padded.prompt_mask_BP, "max_new_tokens": 5}
        assert torch.equal(way.generate(**prompts), plain.generate(**prompts))


def test_packed_rows_skip_the_blocks_between_rows():
    segments = torch.arange(1, 9).repeat_interleave(128)[None]
    blocks = flex._packed_blocks(segments, segments, causal=True)
    assert blocks.sparsity() == pytest.approx(100 * (1 - 8 / 64))


def test_models_whose_evaluation_would_be_wrong_are_refused():
    sizes = {"num_hidden_layers": 1, "num_local_experts": 2, "vocab_size": 40, "hidden_size": 16, "head_dim": 4}
    config = AutoConfig.for_model("gpt_oss", **sizes, intermediate_size=8, num_attention_heads=4, pad_token_id=0)
    sinks, facts = AutoModelForCausalLM.from_config(config), Facts(**{**vars(FACTS), "packing": False})
    assert "transformers' GptOssForCausalLM has none" in WAYS["flex"].misfit(sinks, facts)
    assert "attn_logit_softcapping: 50" in WAYS["flex"].misfit(build("gemma2", "eager"), FACTS)
    assert "no trained bias, which t5 has: use t5_attention" in WAYS["flex"].misfit(build("t5", "eager"), FACTS)
    assert "which mt5 has" in WAYS["flex"].misfit(build("mt5", "eager"), FACTS)
    sizes = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 8}
    config = AutoConfig.for_model("biogpt", **sizes, num_attention_heads=2, attention_probs_dropout_prob=0.25)
    assert "this model's is 0.25" in WAYS["flex"].misfit(AutoModelForCausalLM.from_config(config), facts)


def test_what_it_cannot_do_is_refused():
    cpu = Facts(torch.device("cpu"), torch.float32, packing=False, longest=LONGEST)
    with pytest.raises(ModelError, match="flex does not apply: FlexAttention has no backward on a CPU"):
        apply_ways(build("llama", "eager"), ["flex"], cpu)
    dropping = build("llama", "eager", attention_dropout=0.25)
    assert "this model's is 0.25 (set it to 0 in the model's config)" in WAYS["flex"].misfit(dropping, FACTS)
