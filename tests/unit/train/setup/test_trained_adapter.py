"""``model.adapter.path``: a run goes on with a trained adapter as peft does unsharded."""

import json

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from fullshard import save
from fullshard.errors import ModelError
from fullshard.program.config import RunConfig
from fullshard.program.train.reporting.card import CardSink
from fullshard.program.train.setup.model import outline_model, prepare_model
from fullshard.state.saving.export import ExportOptions, choose_checkpoint, export
from support.adapter_steps import (
    assert_loads_as,
    batch_of,
    config_of,
    load_base,
    steps_alone,
    train_plain,
    train_sharded,
    weights_of,
)
from support.interrupted_run import run

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True` and a tied layer"),
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`"),
]


def trained(base, kind, causal, directory, options=None):
    """Save an adapter that peft has trained for two steps."""
    config = config_of(base, kind, options, adam_epsilon=1e-3)
    train_plain(base, kind, config, causal, steps=2)[0].save_pretrained(directory)
    return directory


def going_on(base, directory, **more):
    values = config_of(base, "lora", adam_epsilon=1e-3, **more).model_dump(by_alias=True)
    return RunConfig.model_validate({**values, "model": {"path": str(base), "adapter": {"path": str(directory)}}})


CASES = [
    ("t5", "lora", {"r": 3, "lora_alpha": 5}),
    ("t5", "lora", {"options": {"modules_to_save": ["final_layer_norm"], "use_rslora": True}}),
    ("t5", "dora", None),
    ("gpt2", "ia3", None),
    # peft saves the base's table with these
    ("gpt2", "lora", {"target_modules": ["wte", "c_attn"], "options": {"fan_in_fan_out": True}}),
    ("gpt2", "lora", {"target_modules": ["lm_head"]}),
    ("t5", "lora", {"target_modules": ["shared", "q"]}),
    ("t5", "lora", {"target_modules": ["lm_head"]}),
]


@pytest.mark.parity
@pytest.mark.parametrize(("name", "kind", "options"), CASES)
def test_two_ranks_go_on_as_peft_does(bases, tokenizer, tmp_path, name, kind, options):
    base, causal = bases[name], name == "gpt2"
    before = trained(base, kind, causal, tmp_path / "before", options)
    config = going_on(base, before)
    plain = peft.PeftModel.from_pretrained(load_base(base), before, is_trainable=True).train()
    losses = steps_alone(plain, config, causal)

    def then(model, comm):
        save(model, tmp_path / "after", tokenizer=tokenizer)
        return weights_of(model)

    for ours, notes, weights in train_sharded(config, tokenizer, causal, then):
        assert ours == pytest.approx(losses, abs=1e-5)
        assert any(note.startswith(f"{kind} adapter of {before}, trained over {base}: ") for note in notes)
        for key, weight in plain.named_parameters():
            torch.testing.assert_close(weights[key], weight, atol=1e-5, rtol=0, msg=key)
    first, last = (json.loads((tmp_path / one / "adapter_config.json").read_text()) for one in ("before", "after"))
    assert first == last
    assert_loads_as(tmp_path / "after", plain, base, batch_of([1], causal=causal), causal, atol=1e-4, rtol=0)
    outline = {n: (tuple(p.shape), p.requires_grad) for n, p in outline_model(config, tokenizer).named_parameters()}
    made = {n: (tuple(p.shape), p.requires_grad) for n, p in prepare_model(config, tokenizer).model.named_parameters()}
    assert outline == made


def test_what_is_no_such_adapter_is_refused(bases, tokenizer, tmp_path):
    def refused(match, directory):
        for make in (prepare_model, outline_model):
            with pytest.raises(ModelError, match=match):
                make(going_on(bases["t5"], directory), tokenizer)

    refused("has no adapter_config.json", bases["t5"])
    refused("neither in the Hugging Face cache .* Correct model.adapter.path", "no/adapter")
    refused("is a PREFIX_TUNING adapter, which peft loads for", trained(bases["t5"], "prefix", False, tmp_path / "p"))
    before = trained(bases["t5"], "lora", False, tmp_path / "lora")
    for key, value, match in (
        ("peft_type", "LOHA", "is a LOHA adapter"),
        ("init_lora_weights", "pissa", "made with init_lora_weights: pissa"),
        ("bias", "lora_only", "bias must be none or all"),
        ("task_type", "CAUSAL_LM", "is for CAUSAL_LM, and T5ForConditionalGeneration is SEQ_2_SEQ_LM"),
        ("r", 5, "cannot be loaded: .*size mismatch"),
    ):
        settings = json.loads((before / "adapter_config.json").read_text())
        (before / "adapter_config.json").write_text(json.dumps({**settings, key: value}))
        refused(f"(?s){match}", before)
        (before / "adapter_config.json").write_text(json.dumps(settings))
    tensors = load_file(before / "adapter_model.safetensors")
    tensors.pop(next(iter(tensors)))
    save_file(tensors, before / "adapter_model.safetensors", metadata={"format": "pt"})
    refused("Found missing adapter keys", before)


def test_an_adapter_over_another_table_is_refused_with_the_remedy(bases, tokenizer, tmp_path):
    before = trained(bases["gpt2"], "lora", True, tmp_path / "before", {"target_modules": ["lm_head"]})
    file = before / "adapter_model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if "lora" not in name)
    table = tensors[name]

    def refused(match, prepare):
        with pytest.raises(ModelError, match=rf"{match}.*merge_and_unload"):
            prepare(going_on(bases["gpt2"], before))

    more = torch.cat([table, table[:3]])
    save_file({**tensors, name: more}, file, metadata={"format": "pt"})
    rows, width = table.shape
    refused(rf"lm_head.*\({rows + 3}, {width}\).*\({rows}, {width}\)", lambda config: prepare_model(config, tokenizer))
    other = table.clone()
    other[-1, -1] += 1
    save_file({**tensors, name: other}, file, metadata={"format": "pt"})
    refused("weight.*other values", lambda config: train_sharded(config, tokenizer, True, lambda *_: None))


def test_a_recorded_run_has_the_path_alone(bases, tmp_path):
    config = going_on(bases["t5"], tmp_path)
    assert config.as_plain()["model"]["adapter"] == {"path": str(tmp_path)}
    assert RunConfig.model_validate(config.as_plain()) == config


@pytest.mark.usefixtures("unmetered")
def test_a_runs_adapter_is_trained_further_and_merged(bases, tmp_path):
    base = {"path": str(bases["t5"])}
    (tmp_path / "first").mkdir()
    run(tmp_path / "first", model={**base, "adapter": {"type": "lora", "r": 3}}, training__max_steps=2)
    (tmp_path / "second").mkdir()
    model = {**base, "adapter": {"path": str(tmp_path / "first/out")}}
    card = CardSink(tmp_path / "second/out", print)
    memory = run(tmp_path / "second", card, model=model, training__max_steps=2)
    assert "lora adapter" in (tmp_path / "second/out/README.md").read_text()
    assert memory.ended[0].steps == 2
    first, second = (load_file(tmp_path / one / "out/adapter_model.safetensors") for one in ("first", "second"))
    assert first.keys() == second.keys()
    assert any(not torch.equal(value, second[name]) for name, value in first.items())
    export(choose_checkpoint(tmp_path / "second/out"), tmp_path / "merged", ExportOptions(lora="merge"))
    plain = peft.PeftModel.from_pretrained(load_base(bases["t5"]), tmp_path / "second/out").eval()
    ids = torch.tensor([[5, 6, 7, 1]])
    with torch.no_grad():
        ours, theirs = (one(input_ids=ids, labels=ids).logits for one in (load_base(tmp_path / "merged").eval(), plain))
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
