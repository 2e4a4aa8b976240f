"""``model.freeze`` and ``model.train``: steps are those of the unsharded model with the same parameters frozen."""

import re

import pytest
import torch
from safetensors.torch import load_file

from fullshard import save
from fullshard.errors import ConfigError
from fullshard.program.config import RunConfig
from fullshard.program.train.first_numbers import lay_out
from fullshard.program.train.setup.model import outline_model, prepare_model
from fullshard.program.train.setup.optimizers import expected_state_bytes
from support.adapter_steps import config_of, load_base, steps_alone, train_sharded, weights_of


def config_with(base, model, **more):
    values = config_of(base, "lora", adam_epsilon=1e-3, **more).model_dump(by_alias=True)
    return RunConfig.model_validate({**values, "model": {"path": str(base), **model}})


CASES = [
    ("t5", {"freeze": ["encoder.*", "shared.weight"]}, ("encoder.", "shared.")),
    ("t5", {"freeze": ["*layer_norm*"], "attention_dropout": 0}, ("layer_norm",)),
    # the output layer is tied to the embeddings
    ("gpt2", {"train": ["transformer.h.1.*", "lm_head.weight"]}, ("transformer.wpe", "transformer.h.0", "ln_f")),
]


@pytest.mark.parametrize(("name", "model", "frozen"), CASES)
def test_two_ranks_train_what_the_unsharded_model_trains(bases, tokenizer, name, model, frozen):
    base, causal = bases[name], name == "gpt2"
    config = config_with(base, model, gradient_checkpointing=True)
    plain = load_base(base).train()
    held = {key for key, param in plain.named_parameters() if any(part in key for part in frozen)}
    for key, param in plain.named_parameters():
        param.requires_grad_(key not in held)
    before = {key: param.detach().clone() for key, param in plain.named_parameters()}
    losses = steps_alone(plain, config, causal)
    for ours, notes, weights in train_sharded(config, tokenizer, causal, lambda one, _: weights_of(one)):
        assert ours == pytest.approx(losses, abs=1e-5)
        trained = sum(value.numel() for key, value in before.items() if key not in held)
        total = sum(value.numel() for value in before.values())
        assert f"{trained:,} of {total:,} parameters are trained ({trained / total:.3%})" in notes
        for key, param in plain.named_parameters():
            torch.testing.assert_close(weights[key], param, atol=1e-5, rtol=0, msg=key)
            assert torch.equal(weights[key], before[key]) == (key in held)


def test_frozen_weights_are_published_as_they_were_in_bf16_too(bases, tokenizer, tmp_path):
    config = config_with(bases["t5"], {"freeze": "encoder.*"}, precision="bf16")
    train_sharded(config, tokenizer, False, lambda model, _: save(model, tmp_path, tokenizer=tokenizer), steps=1)
    before, after = (load_file(path / "model.safetensors") for path in (bases["t5"], tmp_path))
    same = {name for name in before if torch.equal(before[name], after[name])}
    # the encoder's embeddings are the table that it shares with the decoder
    assert same == {name for name in before if name.startswith(("encoder.", "shared."))}


def test_a_note_names_the_tied_tables(bases, tokenizer):
    notes = prepare_model(config_with(bases["t5"], {"freeze": "encoder.block.*"}), tokenizer).notes
    assert not any("tied" in note for note in notes)
    notes = prepare_model(config_with(bases["t5"], {"freeze": "encoder.*"}), tokenizer).notes
    assert "also shared.weight, which is tied to one of them" in notes[0]


def test_frozen_parameters_have_no_optimizer_state(bases, tokenizer):
    model = {"freeze": ["*.block.*", "*final_layer_norm.weight"]}
    config = config_with(bases["t5"], model)
    (left,) = [p for p in outline_model(config, tokenizer).parameters() if p.requires_grad]
    held = expected_state_bytes(lay_out(config, tokenizer, 1), config)
    assert held == 8 * left.numel() + 4


@pytest.mark.parametrize(
    ("model", "problem"),
    [
        ({"freeze": ["encoder"]}, "model.freeze: encoder matches no parameter. Did you mean encoder.*?"),
        ({"train": ["shard.weight"]}, "model.train: shard.weight matches no parameter. Did you mean shared.weight"),
        ({"freeze": ["zzz"]}, "model.freeze: zzz matches no parameter. Did you mean "),
        ({"freeze": ["*"]}, "model.freeze leaves no parameter to train. Change its patterns."),
    ],
)
def test_patterns_that_do_nothing_or_too_much_are_refused(bases, tokenizer, model, problem):
    for make in (prepare_model, outline_model):
        with pytest.raises(ConfigError, match=f"^{re.escape(problem)}"):
            make(config_with(bases["t5"], model), tokenizer)
