"""Rotary parameters under their earlier names: what transformers 4.57 computes of them are the positions of the run."""

import copy
import json

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from fullshard.state.saving.earlier_names import add_earlier_names

PLAIN, LINEAR = {"rope_type": "default"}, {"rope_type": "linear", "factor": 8.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
LONG = {"rope_type": "longrope", "short_factor": [1.5] * 8, "long_factor": [2.0] * 8}


def by_layer(full, sliding=PLAIN, theta=2e6, local=2e4):
    return {"full_attention": {"rope_theta": theta, **full}, "sliding_attention": {"rope_theta": local, **sliding}}


GEMMA = {"rope_theta": 2e6, "rope_local_base_freq": 2e4}
LONG_SAVED = {"type": "longrope", "short_factor": [1.5] * 8, "long_factor": [2.0] * 8}
CASES = {  # options, names of before as transformers 4.57 reads them
    "gemma3_text": ({"rope_parameters": by_layer(LINEAR), "head_dim": 16}, {**GEMMA, "rope_scaling": LINEAR}),
    "gemma3n_text": ({"rope_parameters": by_layer(PLAIN), "head_dim": 16}, GEMMA),
    "modernbert-decoder": (
        {"rope_parameters": by_layer(PLAIN), "cls_token_id": 1, "sep_token_id": 2},
        {"global_rope_theta": 2e6, "local_rope_theta": 2e4},
    ),
    "olmo3": ({"rope_parameters": by_layer(YARN, theta=5e5, local=5e5)}, {"rope_theta": 5e5, "rope_scaling": YARN}),
    "qwen3": ({"rope_parameters": {"rope_theta": 1e6, **YARN}}, {"rope_theta": 1e6, "rope_scaling": YARN}),
    "phi3": (
        {
            "rope_parameters": {"rope_theta": 3e4, **LONG, "original_max_position_embeddings": 4096},
            "max_position_embeddings": 8192,
            "original_max_position_embeddings": 4096,
        },
        {"rope_theta": 3e4, "rope_scaling": LONG_SAVED},
    ),
    "gpt_neox": (
        {"rope_parameters": {**PLAIN, "rope_theta": 5e4, "partial_rotary_factor": 0.5}},
        {"rotary_emb_base": 5e4, "rotary_pct": 0.5},
    ),
    "stablelm": (
        {"rope_parameters": {**PLAIN, "rope_theta": 5e4, "partial_rotary_factor": 0.5}},
        {"rope_theta": 5e4, "partial_rotary_factor": 0.5},
    ),
}
SMALL = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
SMALL |= {"num_key_value_heads": 2, "vocab_size": 64, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}


def saved(config):
    values = json.loads(config.to_json_string())
    before = set(values)
    add_earlier_names(config, values)
    return values, {key: value for key, value in values.items() if key not in before}


@pytest.mark.filterwarnings("error:The positions")
@pytest.mark.parametrize("kind", CASES)
def test_each_kind_has_the_names_that_its_class_had(kind):
    options, names = CASES[kind]
    config = CONFIG_MAPPING[kind](**SMALL, **copy.deepcopy(options))
    values, added = saved(config)
    assert added.items() >= {key: value for key, value in names.items() if key not in options}.items()
    assert {key: values[key] for key in names} == names
    again = type(config).from_dict(values).rope_parameters  # transformers 5 reads both forms as before
    assert all(again[key] == value for key, value in config.rope_parameters.items())


def test_gemmas_positions_are_those_of_the_run_by_the_formula_of_4_57():
    options, _ = CASES["gemma3_text"]
    kinds = ["full_attention", "sliding_attention"]
    config = CONFIG_MAPPING["gemma3_text"](**SMALL, **copy.deepcopy(options), layer_types=kinds)
    values, _ = saved(config)
    rotary = AutoModelForCausalLM.from_config(config).model.rotary_emb
    steps = torch.arange(0, 16, 2) / 16
    # Gemma3RotaryEmbedding of 4.57.3: the factor divides those of full attention only.
    full = 1 / values["rope_theta"] ** steps / values["rope_scaling"]["factor"]
    torch.testing.assert_close(rotary.full_attention_inv_freq, full)
    torch.testing.assert_close(rotary.sliding_attention_inv_freq, 1 / values["rope_local_base_freq"] ** steps)


def test_parts_of_a_configuration_have_them_too():
    part = {**SMALL, "head_dim": 16, "rope_parameters": {**PLAIN, "rope_theta": 3e4}}
    config = CONFIG_MAPPING["t5gemma"](encoder=part, decoder={**part, "rope_parameters": {**PLAIN, "rope_theta": 4e4}})
    values, _ = saved(config)
    assert (values["encoder"]["rope_theta"], values["decoder"]["rope_theta"]) == (3e4, 4e4)


def test_positions_that_have_no_earlier_form_are_said():
    config = CONFIG_MAPPING["gemma3_text"](**SMALL, rope_parameters=by_layer(PLAIN, LINEAR))
    with pytest.warns(UserWarning, match="gemma3_text .* transformers 5"):
        saved(config)
