"""Laws of adapters: a sharded run is peft's own unsharded one, and what is saved is peft's own layout."""

import json

import pytest
import torch
from safetensors.torch import load_file

from fullshard import save
from fullshard.errors import ConfigError, ModelError
from fullshard.program.config import RunConfig
from fullshard.program.train.setup.model import UnreadWeights, outline_model, prepare_model
from support.adapter_steps import T5, assert_loads_as, batch_of, config_of, train_plain, train_sharded, weights_of

pytestmark = [
    # peft's own, where the tests use it by itself
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True` and a tied layer"),
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`"),
]

KINDS = ("lora", "dora", "ia3", "prompt", "prefix")


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
        assert not any("loaded in full" in note for note in notes)
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
    assert_loads_as(saved, plain, base, batch, causal, atol=1e-4, rtol=0)


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


def test_what_a_snapshot_fills_is_neither_made_nor_read_and_what_is_frozen_is(bases, tokenizer):
    stored = config_of(bases["t5"], "lora").model_dump()
    stored["model"] |= {"adapter": None}
    new = {**stored, "model": {**stored["model"], "path": None, "config": T5, "tokenizer": {"vocab_size": 60}}}
    for config in map(RunConfig.model_validate, (stored, new)):
        made, filled = prepare_model(config, tokenizer), prepare_model(config, tokenizer, filled=True)
        assert isinstance(filled.weights, UnreadWeights)
        assert all(param.is_meta for param in filled.model.parameters())
        shapes = [{n: tuple(p.shape) for n, p in one.model.named_parameters()} for one in (made, filled)]
        assert shapes[0] == shapes[1]
    adapted = prepare_model(config_of(bases["t5"], "lora"), tokenizer, filled=True)
    assert not isinstance(adapted.weights, UnreadWeights)


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


def test_modules_that_are_trained_in_full_start_from_the_files(bases, tokenizer):
    config = config_of(bases["t5"], "lora", {"options": {"modules_to_save": ["final_layer_norm"]}})
    stored = load_file(bases["t5"] / "model.safetensors")
    name = "base_model.model.encoder.final_layer_norm.modules_to_save.default.weight"
    assert prepare_model(config, tokenizer).model.get_parameter(name).is_meta
    for _, notes, weights in train_sharded(config, tokenizer, False, lambda m, _: weights_of(m), steps=0):
        assert not any("loaded in full" in note for note in notes)
        assert torch.equal(weights[name], stored["encoder.final_layer_norm.weight"])


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
