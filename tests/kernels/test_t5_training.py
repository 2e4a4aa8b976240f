"""A T5 trained with the way t5_attention, in Triton's interpreter, is the eager one: every model of the family."""

import copy

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForSeq2SeqLM, Pop2PianoForConditionalGeneration

from fullshard import fully_shard
from fullshard.core.sequence import sequence_parallel
from fullshard.core.testing import run_ranks
from fullshard.program.models import AdapterSpec, add_adapter, enable_activation_checkpointing, set_attention_dropout
from fullshard.program.models.packing import enable_packing
from fullshard.program.speed import Facts, apply_ways, compiled
from fullshard.program.train.setup.model import model_inputs
from support.one_step import batch_from, tokenized
from support.packed_models import LONGEST, T5, assert_same, loss_and_gradients
from support.philox import kept

FACTS = Facts(torch.device("cpu"), torch.float32, packing=True, longest=LONGEST)
SMALL = T5 | {"num_heads": 2, "num_layers": 1, "num_decoder_layers": 1}
WIDE = SMALL | {"d_model": 64, "d_kv": 32, "d_ff": 128}
KINDS = {
    "t5": SMALL | {"num_layers": 2},
    "mt5": SMALL | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    "umt5": SMALL | {"feed_forward_proj": "gated-gelu", "num_layers": 2},
    "longt5": SMALL | {"local_radius": 5, "encoder_attention_type": "local"},
    "switch_transformers": SMALL
    | {"num_experts": 2, "expert_capacity": 64, "num_sparse_encoder_layers": 1, "router_jitter_noise": 0.0}
    | {"num_sparse_decoder_layers": 1},
    "pop2piano": SMALL,
}
PACKS = ("t5", "mt5")
LENGTHS = [(9, 4), (3, 6)]


def build(kind="t5", **changes):
    config = AutoConfig.for_model(kind, **KINDS[kind] | changes)
    maker = Pop2PianoForConditionalGeneration._from_config if kind == "pop2piano" else AutoModelForSeq2SeqLM.from_config
    torch.manual_seed(0)
    plain = maker(config, attn_implementation="eager").train()
    for name, parameter in plain.named_parameters():
        if "relative_attention_bias" in name:
            torch.nn.init.normal_(parameter)
    if kind in PACKS:
        enable_packing(plain, LONGEST)
    return plain


def pair(kind="t5", change=lambda model: model, **changes):
    """An eager model, and its copy with the way."""
    plain = change(build(kind, **changes))
    way = copy.deepcopy(plain)
    apply_ways(way, ["t5_attention"], FACTS)
    return way, plain


def batch(*, packed):
    generator = torch.Generator().manual_seed(1)
    make = lambda length: torch.randint(2, 40, (length,), generator=generator).tolist()  # noqa: E731
    rows = tokenized([make(s) for s, _ in LENGTHS], [make(t) for _, t in LENGTHS])
    return batch_from(rows, range(len(LENGTHS)), causal=False, packed=packed)


def dropped_by_philox(monkeypatch):
    """Let torch's dropout draw a seed as the way does, and drop by it."""

    def dropout(weights, p=0.5, training=True, inplace=False):
        if not p or not training:
            return weights
        seed = int(torch.randint(2**63 - 1, (1,)))
        return weights * kept(seed, *weights.shape, p) / (1 - p)

    monkeypatch.setattr(functional, "dropout", dropout)


@pytest.mark.parity
@pytest.mark.parametrize(("packed", "rate"), [(False, 0.0), (True, 0.0), (True, 0.1)])
def test_ten_steps_are_those_of_the_eager_model(packed, rate, monkeypatch):
    way, plain = pair(**WIDE)
    if rate:
        dropped_by_philox(monkeypatch)
        for model in (way, plain):
            set_attention_dropout(model, rate)
    rows = batch(packed=packed)
    for model in (way, plain):
        torch.manual_seed(5)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for _ in range(10):
            loss_and_gradients(model, rows, causal=False)
            optimizer.step()
    for (name, one), other in zip(way.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=0, msg=name)


@pytest.mark.parity
@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients_of_every_kind_are_those_of_eager_attention(kind):
    way, plain = pair(kind)
    for packed in (False, True)[: 2 if kind in PACKS else 1]:
        rows = batch(packed=packed)
        assert_same(*(loss_and_gradients(model, rows, causal=False) for model in (way, plain)), 1e-5)


def test_nothing_of_all_pairs_of_a_query_and_a_key_is_made():
    """Shapes of all operators' results; both lengths are primes, so that no other size is theirs by chance."""

    class Shapes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            made = func(*args, **(kwargs or {}))
            tensors = made if isinstance(made, tuple) else (made,)
            seen.update(tuple(one.shape) for one in tensors if isinstance(one, torch.Tensor))
            return made

    for kind in ("t5", "umt5"):
        seen = set()
        way, _ = pair(kind)
        tokens = torch.arange(2, 33)[None]
        with Shapes():
            way(input_ids=tokens[:, :29], labels=tokens[:, :23], use_cache=False).loss.backward()
        assert not [shape for shape in seen if {*shape[-2:]} <= {29, 23} and len(shape) > 2]


def test_recomputed_blocks_drop_the_same_weights():
    results = []
    for recompute in (False, True):
        way, _ = pair()
        set_attention_dropout(way, 0.3)
        if recompute:
            enable_activation_checkpointing(way)
        torch.manual_seed(3)
        loss, gradients = loss_and_gradients(way, batch(packed=True), causal=False)
        results.append([loss, *gradients.values()])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_an_adapter_of_every_projection_trains_alike():
    spec = AdapterSpec("lora", "tiny", r=2, target_modules=("q", "k", "v", "o"))
    way, plain = pair(change=lambda model: add_adapter(model, spec, seed=0).model)
    rows = batch(packed=False)
    assert_same(*(loss_and_gradients(model, rows, causal=False) for model in (way, plain)), 1e-5)


@pytest.mark.filterwarnings("default")  # of the compiler
@pytest.mark.parametrize("kind", ["t5", "umt5"])
def test_compiled_blocks_attend_alike(kind, monkeypatch):
    torch._dynamo.reset()
    compile_blocks = compiled.compile_blocks
    monkeypatch.setattr(compiled, "compile_blocks", lambda model: compile_blocks(model, backend="aot_eager"))
    plain = build(kind)
    way = copy.deepcopy(plain)
    apply_ways(way, ["compile", "t5_attention"], FACTS)
    rows = batch(packed=False)
    assert_same(*(loss_and_gradients(model, rows, causal=False) for model in (way, plain)), 1e-5)


@pytest.mark.parity
@pytest.mark.parametrize("packed", [False, True])
def test_ranks_that_share_rows_have_the_gradients_of_full_rows(packed):
    plain, rows = build(), batch(packed=packed)

    def inputs(model):
        return {**model_inputs(model, rows, causal=False), "labels": rows.labels_BT}

    wanted = plain(**inputs(plain))
    wanted.loss.backward()
    models = [build(), build()]

    def work(comm):
        model = sequence_parallel(models[comm.rank], comm)
        apply_ways(model, ["t5_attention"], FACTS)
        model = fully_shard(model, comm)
        loss = model(**inputs(model)).loss
        loss.backward()
        with torch.no_grad():
            torch.testing.assert_close(model(**inputs(model)).loss, loss.detach())
        return loss.detach(), {name: p.grad.full_tensor() for name, p in model.named_parameters() if p.grad is not None}

    loss, gradients = run_ranks(2, work)[0]
    found = {name: p.grad for name, p in plain.named_parameters()}
    assert_same((loss, gradients), (wanted.loss.detach(), found), 1e-5)


def test_sharded_units_are_freed_before_others_read_their_table():
    way, plain = pair()
    rows = batch(packed=True)

    def work(comm):
        model = fully_shard(way, comm)
        loss, _ = loss_and_gradients(model, rows, causal=False)
        return loss, {name: p.grad.full_tensor() for name, p in model.named_parameters()}

    assert_same(run_ranks(1, work)[0], loss_and_gradients(plain, rows, causal=False), 1e-5)


def test_texts_and_evaluation_are_as_before():
    way, plain = (model.eval() for model in pair())
    for packed in (False, True):
        rows = batch(packed=packed)
        with torch.no_grad():
            inputs = model_inputs(plain, rows, causal=False)
            torch.testing.assert_close(way(**inputs).logits, plain(**inputs).logits)
    prompts = {"input_ids": batch(packed=False).prompt_ids_BP, "max_new_tokens": 6}
    with torch.no_grad():
        assert torch.equal(way.generate(**prompts), plain.generate(**prompts))
