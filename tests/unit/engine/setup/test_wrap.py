"""Which modules become units, and where tied parameters go."""

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from fullshard.core.engine.setup.wrap import ROOT_NAME, assign_parameters, check_parameters, find_units
from fullshard.core.policy import TransformerBlocks
from fullshard.errors import WrapError
from support.models import Block, TinyLM, bart, gpt2, t5, t5_untied


def names(model, wrap="auto"):
    return [name for name, _ in find_units(model, wrap)]


def unit_of(model, wrap="auto"):
    """Name of each parameter's unit, by the parameter's first name."""
    specs = assign_parameters(model, find_units(model, wrap), frozenset())
    return {param.names[0]: unit.name for unit in specs for param in unit.params}


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (t5, ["encoder.block.0", "encoder.block.1", "decoder.block.0", "decoder.block.1"]),
        (bart, [f"model.{side}.layers.{i}" for side in ("encoder", "decoder") for i in range(2)]),
        (gpt2, ["transformer.h.0", "transformer.h.1", "transformer.h.2"]),
        (TinyLM, [f"blocks.{i}" for i in range(4)]),
    ],
)
def test_repeated_blocks_are_found(make, expected):
    assert sorted(names(make())) == sorted(expected)


SEQ2SEQ = {
    "bart",
    "blenderbot",
    "led",
    "m2m_100",
    "marian",
    "mbart",
    "mt5",
    "pegasus",
    "switch_transformers",
    "t5",
    "umt5",
}
CAUSAL = {
    "bloom",
    "codegen",
    "falcon",
    "gemma2",
    "gpt2",
    "gpt_bigcode",
    "gpt_neo",
    "gpt_neox",
    "gptj",
    "granite",
    "llama",
}
CAUSAL |= {
    "mamba",
    "mistral",
    "mixtral",
    "mpt",
    "olmo",
    "opt",
    "phi",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "stablelm",
    "xglm",
}
LAYERS = {
    "num_layers",
    "num_decoder_layers",
    "encoder_layers",
    "decoder_layers",
    "num_hidden_layers",
    "n_layer",
    "n_layers",
}


def with_layers(kind, count):
    """A model of a type on the meta device, with as many layers in each stack."""
    config = AutoConfig.for_model(kind)
    if kind == "gpt_neo":
        config = AutoConfig.for_model(kind, attention_types=[[["global"], count]], num_layers=count)
    for name in LAYERS:
        if hasattr(config, name):
            setattr(config, name, count)
    make = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    with torch.device("meta"):
        return make.from_config(config)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # gpt_bigcode, before 5.23
@pytest.mark.parametrize("kind", sorted(SEQ2SEQ | CAUSAL))
def test_a_model_of_one_layer_has_the_blocks_of_a_larger_one(kind):
    larger = [name.removesuffix(".0") for name in names(with_layers(kind, 2)) if name.endswith(".0")]
    assert larger
    assert [name.removesuffix(".0") for name in names(with_layers(kind, 1)) if name.endswith(".0")] == larger


def pair():
    return nn.ModuleList([Block(3, 3), nn.Sequential(nn.Linear(3, 3), nn.ReLU())])


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (nn.ModuleList([pair(), pair()]), ["0.0", "0.1", "1.0", "1.1"]),
        (nn.ModuleList([nn.ModuleDict({"a": Block(3, 3)}), nn.ModuleDict({"a": Block(3, 3)})]), ["0.a", "1.a"]),
        (nn.ModuleDict({"stage": nn.ModuleList([nn.ModuleList([Block(3, 3)])])}), ["stage.0.0"]),
        (nn.ModuleDict({"a": Block(3, 3), "b": Block(3, 3), "head": nn.Linear(3, 3)}), ["a", "b"]),
        (nn.ModuleDict({"tokens": nn.Embedding(3, 3), "places": nn.Embedding(3, 3)}), []),
        (Block(3, 3), []),
    ],
)
def test_lists_in_lists_and_dicts_have_no_forward_but_what_is_in_them_has(model, expected):
    assert names(model) == expected


def test_a_large_model_without_blocks_is_refused_and_a_small_one_is_one_unit():
    """1,000 x 1,000 elements are the most that small blocks are merged to."""
    assert names(nn.Linear(1000, 1000, bias=False)) == []
    with pytest.raises(WrapError, match=r"1,001,000 parameters would be one unit.*above 1,000,000"):
        names(nn.Linear(1000, 1001, bias=False))


def test_leaf_modules_are_blocks_only_where_nothing_larger_repeats():
    assert names(nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))) == ["0", "2"]
    model = nn.ModuleDict(
        {"mlp": nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), "blocks": nn.ModuleList([Block(3, 3), Block(3, 3)])}
    )
    assert names(model) == ["blocks.0", "blocks.1"]


def test_classes_by_name_by_type_and_by_base():
    model = TinyLM(layers=2)
    assert names(model, TransformerBlocks("Block")) == ["blocks.0", "blocks.1"]
    assert names(model, TransformerBlocks({Block})) == ["blocks.0", "blocks.1"]
    assert names(model, lambda module: isinstance(module, nn.LayerNorm)) == ["blocks.0.norm", "blocks.1.norm"]


def test_a_predicate_that_matches_nothing_is_an_error():
    with pytest.raises(WrapError, match="none of the"):
        names(TinyLM(), lambda module: False)


def test_t5s_shared_table_has_all_its_names_and_belongs_to_the_root():
    model = t5()
    specs = assign_parameters(model, find_units(model, "auto"), frozenset())
    (table,) = [p for p in specs[0].params if "shared.weight" in p.names]
    assert set(table.names) == {
        "shared.weight",
        "encoder.embed_tokens.weight",
        "decoder.embed_tokens.weight",
        "lm_head.weight",
    }
    assert len(table.slots) == 4


def test_an_untied_head_is_a_parameter_of_its_own():
    owners = unit_of(t5_untied())
    assert owners["lm_head.weight"] == ROOT_NAME
    assert owners["shared.weight"] == ROOT_NAME


def test_a_weight_tied_across_units_goes_to_the_unit_that_holds_both():
    model = nn.Sequential(TinyLM(layers=3), nn.Linear(2, 2))
    model[0].blocks[0].up.weight = model[0].blocks[2].up.weight
    owners = unit_of(model, TransformerBlocks({Block, TinyLM}))
    assert owners["0.blocks.0.up.weight"] == "0"
    assert owners["0.blocks.0.down.weight"] == "0.blocks.0"
    assert owners["1.weight"] == ROOT_NAME


def test_a_block_used_at_two_places_is_one_unit():
    block = Block(4, 4)
    model = nn.ModuleDict({"a": nn.ModuleList([block, Block(4, 4)]), "b": block})
    specs = assign_parameters(model, find_units(model, "auto"), frozenset())
    assert sorted(unit.name for unit in specs) == [ROOT_NAME, "a.0", "a.1"]
    assert "b.up.weight" in next(p for u in specs for p in u.params if "a.0.up.weight" in p.names).names


def test_parameters_without_elements_and_models_without_parameters_are_refused():
    with pytest.raises(WrapError, match="no parameters"):
        check_parameters(assign_parameters(nn.ReLU(), [], frozenset()))
    empty = nn.Linear(3, 1)
    empty.weight = nn.Parameter(torch.empty(0, 3))
    with pytest.raises(WrapError, match=r"shape \(0, 3\)"):
        check_parameters(assign_parameters(empty, [], frozenset()))


def test_ignored_parameters_stay_out():
    model = TinyLM()
    ignored = frozenset(model.unused.parameters())
    specs = assign_parameters(model, find_units(model, "auto"), ignored)
    assert all(p.param not in ignored for unit in specs for p in unit.params)
