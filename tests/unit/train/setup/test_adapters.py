"""Laws of adapters: a sharded run is peft's own unsharded one, and what is saved is peft's own layout."""

import json

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from fullshard import save, unsharded
from fullshard.config import RunConfig
from fullshard.data import CollateSpec, LengthStats, RowRef, TokenizedSet, collate
from fullshard.errors import ConfigError, ModelError
from fullshard.models import AdapterSpec, add_adapter, build_model, train_tokenizer
from fullshard.testing import run_ranks
from fullshard.train.run.step import StepSpec
from fullshard.train.setup.model import outline_model, prepare_model, shard_model
from fullshard.train.setup.optimizers import make_optimizer
from support.one_step import train_step

pytestmark = [
    # peft's own, where the tests use it by itself
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True` and a tied layer"),
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`"),
]

KINDS = ("lora", "dora", "ia3", "prompt", "prefix")
T5 = {
    "model_type": "t5",
    "d_model": 16,
    "d_kv": 4,
    "d_ff": 24,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 2,
    "dropout_rate": 0.0,
}
GPT2 = {"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64}
GPT2 |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
STATS = LengthStats(mean=0.0, longest=0, truncated=0, limit=0)
ROWS = TokenizedSet(
    source_ids=[[5, 6, 1], [7, 8, 9, 10, 1], [11, 1], [12, 13, 14, 1]],
    target_ids=[[20, 1], [21, 22, 23, 24, 1], [15, 16, 1], [17, 1]],
    source_stats=STATS,
    target_stats=STATS,
)


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["where is my card", "i lost it again", "what is the rate"] * 2, 60)


@pytest.fixture(scope="module")
def bases(tokenizer, tmp_path_factory):
    """Directories of a T5 and a GPT-2."""
    found = {}
    for name, config in (("t5", T5), ("gpt2", GPT2)):
        found[name] = tmp_path_factory.mktemp(name)
        model = build_model(config, tokenizer, seed=7)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(3 if p.dim() > 1 else 1)  # a new model's logits hardly depend on anything
        model.save_pretrained(found[name])
        tokenizer.save_pretrained(found[name])
    return found


def config_of(base, kind, adapter=None, sharding=None, **training):
    size = {"prompt": {"num_virtual_tokens": 3}, "prefix": {"num_virtual_tokens": 3}, "ia3": {}}.get(kind, {"r": 2})
    values = {
        "output_dir": "unused",
        "model": {"path": str(base), "adapter": {"type": kind, **size, **(adapter or {})}},
        "data": {
            "train_file": "unused.csv",
            "validation_file": "unused.csv",
            "source_column": "a",
            "target_column": "b",
        },
        "training": {"learning_rate": 1e-2, "weight_decay": 0.1, "per_device_eval_batch_size": 1, **training},
        "sharding": sharding or {},
    }
    return RunConfig.model_validate(values)


def batch_of(rows, *, causal):
    return collate([RowRef(row) for row in rows], ROWS, CollateSpec(pad_token_id=0, causal=causal))


def spec_of(step, *, causal):
    return StepSpec(step=step, epoch=0.1, learning_rate=1e-2, max_grad_norm=1.0, causal=causal)


def load_base(base):
    auto = AutoModelForSeq2SeqLM if json.loads((base / "config.json").read_text())["model_type"] == "t5" else None
    return (auto or AutoModelForCausalLM).from_pretrained(base)


def train_plain(base, kind, config, causal, steps=3):
    """peft and torch alone, on all rows at once."""
    settings = dict(config.model.adapter)
    model = add_adapter(load_base(base), AdapterSpec(base=str(base), **settings), seed=config.seed).model
    held = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": [p for p in held if (p.dim() >= 2) == wide], "weight_decay": 0.1 * wide} for wide in (1, 0)]
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]], lr=1e-2)
    batch, losses = batch_of(range(4), causal=causal), []
    for _ in range(steps):
        inputs = {"input_ids": batch.input_ids_BS, "attention_mask": batch.attention_mask_BS}
        loss = model(**inputs, labels=batch.labels_BT).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(held, 1.0)
        optimizer.step()
        losses.append(loss.item())
    return model, losses


def train_sharded(config, tokenizer, causal, then, steps=3, size=2):
    ready = [prepare_model(config, tokenizer) for _ in range(size)]

    def work(comm):
        model, weights, notes = ready[comm.rank].model, ready[comm.rank].weights, ready[comm.rank].notes
        shard_model(model, config, comm, weights=weights)
        optimizer, losses = make_optimizer(model, config), []
        rows = range(comm.rank, 4, size)
        for step in range(1, steps + 1):
            report = train_step(model, optimizer, [batch_of(rows, causal=causal)], comm, spec_of(step, causal=causal))
            losses.append(report.loss)
        return losses, notes, then(model, comm)

    return run_ranks(size, work)


def weights_of(model):
    with unsharded(model):
        return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parity
@pytest.mark.parametrize("optimizer", ["adafactor", "muon", "adamw_8bit", "adamw_bf16"])
def test_an_adapter_is_trained_alike_by_any_optimizer_on_two_ranks_and_on_one(bases, tokenizer, optimizer):
    config = config_of(bases["t5"], "lora", optimizer=optimizer)
    alone, two = (train_sharded(config, tokenizer, False, lambda *_: None, size=size)[0][0] for size in (1, 2))
    assert two == pytest.approx(alone, rel=1e-5 if optimizer != "muon" else 1e-3)
    assert alone[-1] < alone[0]


@pytest.mark.parity
@pytest.mark.parametrize(
    ("name", "kind", "frozen"),
    [
        *((name, kind, "shard") for name in ("t5", "gpt2") for kind in KINDS),
        ("t5", "lora", "replicate"),
        ("t5", "prefix", "auto"),
    ],
)
def test_a_sharded_run_with_an_adapter_is_pefts_unsharded_run(bases, tokenizer, tmp_path, name, kind, frozen):
    base, causal = bases[name], name == "gpt2"
    config = config_of(base, kind, sharding={"frozen": frozen})
    plain, losses = train_plain(base, kind, config, causal)
    prompt = batch_of([1], causal=causal)
    asked = {"input_ids": prompt.prompt_ids_BP, "attention_mask": prompt.prompt_mask_BP, "max_new_tokens": 4}
    asked |= {"do_sample": False, "pad_token_id": 0}
    expected = plain.eval().generate(**asked)

    def then(model, comm):
        texts = model.eval().generate(**asked)
        save(model, tmp_path / "adapter", tokenizer=tokenizer)
        return weights_of(model), texts

    for ours, notes, (weights, texts) in train_sharded(config, tokenizer, causal, then):
        assert ours == pytest.approx(losses, abs=1e-5)
        assert texts.tolist() == expected.tolist()
        assert any(f"{kind} adapter" in note and "parameters are trained" in note for note in notes)
        assert any("loaded in full" in note for note in notes) == (kind == "dora")
        for key, weight in plain.named_parameters():
            torch.testing.assert_close(weights[key], weight, atol=1e-5, rtol=0, msg=key)
    assert_saved_as_peft_does(plain, base, tmp_path, prompt, causal)


def assert_saved_as_peft_does(plain, base, tmp_path, batch, causal):
    saved = tmp_path / "adapter"
    plain.save_pretrained(tmp_path / "theirs")
    theirs, ours = (load_file(path / "adapter_model.safetensors") for path in (tmp_path / "theirs", saved))
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, atol=1e-5, rtol=0, msg=name)
    configs = [json.loads((path / "adapter_config.json").read_text()) for path in (saved, tmp_path / "theirs")]
    assert configs[0] == configs[1]
    assert configs[0]["base_model_name_or_path"] == str(base)
    assert not (saved / "config.json").exists()
    assert (saved / "tokenizer.json").exists()
    loaded = PeftModel.from_pretrained(load_base(base), saved).eval()
    inputs = {"input_ids": batch.input_ids_BS, "attention_mask": batch.attention_mask_BS}
    inputs |= {} if causal else {"decoder_input_ids": batch.labels_BT}
    with torch.no_grad():
        torch.testing.assert_close(loaded(**inputs).logits, plain.eval()(**inputs).logits, atol=1e-4, rtol=0)


def test_the_frozen_model_is_kept_in_the_compute_dtype_and_the_adapter_in_fp32(bases, tokenizer):
    config = config_of(bases["t5"], "lora", precision="bf16")

    def then(model, comm):
        return {(p.requires_grad, p.dtype) for p in model.parameters()}

    for losses, _, dtypes in train_sharded(config, tokenizer, False, then):
        assert dtypes == {(True, torch.float32), (False, torch.bfloat16)}
        assert losses[-1] < losses[0]


@pytest.mark.parametrize("option", ["gradient_checkpointing", "fused_cross_entropy"])
def test_an_adapter_goes_with(bases, tokenizer, option):
    plain = train_sharded(config_of(bases["t5"], "lora"), tokenizer, False, lambda *_: None)
    changed = train_sharded(config_of(bases["t5"], "lora", **{option: True}), tokenizer, False, lambda *_: None)
    assert changed[0][0] == pytest.approx(plain[0][0], abs=1e-5)


def test_the_units_are_known_without_weights(bases, tokenizer):
    config = config_of(bases["t5"], "lora")
    outline, ready = outline_model(config, tokenizer), prepare_model(config, tokenizer)
    shapes = [
        {name: (tuple(p.shape), p.requires_grad) for name, p in m.named_parameters()} for m in (outline, ready.model)
    ]
    assert shapes[0] == shapes[1]
    assert any(requires for _, requires in shapes[0].values())


def test_what_cannot_work_is_refused(bases, tokenizer):
    def refused(error, match, config):
        with pytest.raises(error, match=match):
            prepare_model(config, tokenizer)

    t5, gpt2 = bases["t5"], bases["gpt2"]
    refused(ConfigError, "is incompatible with gradient_check", config_of(t5, "prefix", gradient_checkpointing=True))
    refused(ConfigError, "per_device_eval_batch_size", config_of(gpt2, "prompt", per_device_eval_batch_size=2))
    refused(ModelError, "not_there", config_of(t5, "lora", {"options": {"not_there": 1}}))
    refused(ModelError, "has r, which lora sets", config_of(t5, "lora", {"options": {"r": 1}}))
    refused(ModelError, "prefix_projection", config_of(t5, "prefix", {"options": {"prefix_projection": True}}))
    refused(ModelError, "bias must be none or all", config_of(t5, "lora", {"options": {"bias": "lora_only"}}))
    refused(ModelError, "Target modules", config_of(t5, "lora", {"target_modules": ["nothing"]}))
    whole = config_of(t5, "lora", {"target_modules": ["lm_head"]}, fused_cross_entropy=True)
    refused(ModelError, "changes the output layer", whole)
    new = config_of(t5, "lora").model_dump()
    new["model"] |= {"path": None, "config": T5, "tokenizer": {"vocab_size": 60}}
    refused(ConfigError, "model.adapter needs model.path", RunConfig.model_validate(new))


def test_modules_that_are_trained_whole_start_from_the_files(bases, tokenizer):
    """peft copies them, so that the model is loaded whole."""
    config = config_of(bases["t5"], "lora", {"options": {"modules_to_save": ["final_layer_norm"]}})
    ready = prepare_model(config, tokenizer)
    assert any("peft computes" in note for note in ready.notes)
    stored = load_file(bases["t5"] / "model.safetensors")
    name = "base_model.model.encoder.final_layer_norm.modules_to_save.default.weight"
    assert torch.equal(ready.model.get_parameter(name), stored["encoder.final_layer_norm.weight"])


def test_every_rank_starts_with_the_same_adapter_whatever_the_random_state(bases, tokenizer):
    config = config_of(bases["t5"], "lora")
    first = prepare_model(config, tokenizer)
    torch.manual_seed(123)
    state = torch.get_rng_state()
    second = prepare_model(config, tokenizer)
    assert torch.equal(torch.get_rng_state(), state)
    values = [{n: p for n, p in one.model.named_parameters() if p.requires_grad} for one in (first, second)]
    assert all(torch.equal(value, values[1][name]) for name, value in values[0].items())
    other = prepare_model(config.model_copy(update={"seed": 1}), tokenizer)
    assert any(not torch.equal(p, other.model.get_parameter(n)) for n, p in values[0].items())
