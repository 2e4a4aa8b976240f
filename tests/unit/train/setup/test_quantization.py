"""A quantised run of the program is the unsharded run of peft over bitsandbytes' layers; what cannot be is refused."""

import sys

import pytest
import torch
from transformers.pytorch_utils import Conv1D

from fullshard import Quantize
from fullshard.core.quantized import QuantizedLinear, format_of, formats, rounded
from fullshard.errors import ConfigError
from fullshard.program.config import RunConfig
from fullshard.program.models import train_tokenizer
from fullshard.program.train.dry_run import check_kind
from fullshard.program.train.setup.model import outline_model, prepare_model
from support.adapter_steps import GPT2, T5, config_of, train_plain, train_sharded, weights_of, write_base
from support.quantized import with_bitsandbytes

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),
    pytest.mark.filterwarnings("ignore:MatMul8bitLt"),
]

SKIP = ("lm_head", "wo")
"""``wo`` as transformers does: T5 casts its input to the weight's dtype, which is bytes in bitsandbytes' layer."""
WIDE = T5 | {"d_model": 64, "d_kv": 32, "d_ff": 128}
"""Widths are multiples of 64: of others, bitsandbytes' kernel for CPUs takes wrong scales."""
LLAMA = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
LLAMA |= {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
NF4 = {"type": "nf4", "skip": SKIP}


RUNS = [("lora", "nf4"), ("lora", "int8"), ("ia3", "nf4")]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["where is my card", "i lost it again", "what is the rate"] * 2, 60)


@pytest.fixture(scope="module")
def base(tokenizer, tmp_path_factory):
    directory = tmp_path_factory.mktemp("t5")
    write_base(directory, WIDE, tokenizer, scale=1)
    return directory


def plain_run(base, config, steps=3, change=None, **quantize):
    """The model, the losses, and the steepest gradient's norm of a run by peft alone; of bitsandbytes' layers."""
    policy = Quantize(**{"skip": SKIP, **quantize})
    change = change or (lambda model: with_bitsandbytes(model, policy))
    norms = []
    return *train_plain(base, config.model.adapter.type, config, False, steps, change, norms), max(norms)


def assert_as_plain(plain, losses, steepest, config, tokenizer, steps=3, size=2):
    """Ranks have the losses of the plain run, and its weights; returns the names of these, and a rank's notes.

    AdamW rounds each weight in each step, in another order of sums otherwise: a plain run that begins half a rounding
    away is as far off as ours. Weights may differ by 1e-5. To first order a loss then differs by the gradient times
    the difference of the weights, at most by the product of their norms, which 3,000 weights may carry above 1e-5.
    """
    trained = {name: p for name, p in plain.named_parameters() if p.requires_grad}
    for ours, notes, weights in train_sharded(config, tokenizer, False, lambda m, _: weights_of(m), steps, size):
        apart = {name: (weights[name] - weight).detach() for name, weight in trained.items()}
        for name, difference in apart.items():
            assert difference.abs().max() <= 1e-5, name
        distance = sum(one.square().sum().item() for one in apart.values()) ** 0.5
        assert ours == pytest.approx(losses, abs=max(1e-5, steepest * distance))
        assert not any("loaded in full" in note for note in notes)
    return trained, notes


@pytest.mark.parity
@pytest.mark.parametrize(("kind", "type"), RUNS)
@pytest.mark.parametrize("size", [1, 2])
def test_a_run_equals_peft_over_bitsandbytes_layers(base, tokenizer, kind, type, size):
    double = type == "nf4"
    config = config_of(base, kind, quantization={"type": type, "skip": SKIP, "double_quant": double})
    plain = plain_run(base, config, type=type, double_quant=double)
    _, notes = assert_as_plain(*plain, config, tokenizer, size=size)
    assert f"frozen linear layers are quantised: {f'{type} (double)' if double else type}" in notes


def with_rounded_weights(model, kind):
    """Give linear layers the values that quantising leaves: peft fails in DoRA over bitsandbytes' int8 layers."""
    format = format_of(Quantize(kind))
    with torch.no_grad():
        for name, layer in model.named_modules():
            if type(layer) is torch.nn.Linear and not name.endswith(SKIP):
                layer.weight.copy_(rounded(format, layer.weight, torch.float32))
    return model


@pytest.mark.parity
@pytest.mark.parametrize("type", ["nf4", "int8"])
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.slow
def test_dora_equals_pefts_whose_norms_are_of_the_full_dequantised_weights(base, tokenizer, type, size):
    config = config_of(base, "dora", quantization={"type": type, "skip": SKIP})

    change = None if type == "nf4" else lambda model: with_rounded_weights(model, type)
    plain = plain_run(base, config, 10, change, type=type)
    trained, _ = assert_as_plain(*plain, config, tokenizer, 10, size)
    assert any("magnitude" in name for name in trained)


SAVED = [
    (["final_layer_norm"], SKIP),
    (["wo"], SKIP),
    (["lm_head"], SKIP),
    (["shared"], SKIP),
    # Over bitsandbytes' layers peft cannot train a copy, so there these are not quantised at all.
    (["SelfAttention.o"], ("lm_head", "wo", "SelfAttention.o")),
]


@pytest.mark.parity
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize(("saved", "skip"), SAVED, ids=lambda one: one[-1])
@pytest.mark.parametrize("size", [1, 2])
def test_modules_that_are_trained_in_full_equal_pefts_copies(base, tokenizer, saved, skip, size):
    adapter = {"options": {"modules_to_save": saved}}
    config = config_of(base, "lora", adapter, quantization=NF4)
    plain = plain_run(base, config, steps=10, type="nf4", skip=skip)
    trained, _ = assert_as_plain(*plain, config, tokenizer, 10, size)
    assert any(".modules_to_save." in name for name in trained)


@pytest.mark.parity
@pytest.mark.parametrize("option", ["packing", "fused_cross_entropy", "gradient_checkpointing"])
def test_an_option_of_training_does_not_change_the_run(base, tokenizer, option):
    plain = plain_run(base, config_of(base, "lora"))
    config = config_of(base, "lora", quantization=NF4, **{option: True})
    assert_as_plain(*plain, config, tokenizer)


def test_the_short_form_is_the_type_with_the_other_defaults(base):
    assert config_of(base, "lora", quantization="int8") == config_of(base, "lora", quantization={"type": "int8"})


def test_the_outline_has_the_runs_layers(base, tokenizer):
    config = config_of(base, "lora", quantization=NF4)
    names = [name for name, m in outline_model(config, tokenizer).named_modules() if isinstance(m, QuantizedLinear)]
    assert names
    assert not any(name.rpartition(".")[2] == "wo" or "lm_head" in name for name in names)


@pytest.mark.parametrize("tables", ["gather", "auto", "home"])
def test_a_head_that_is_not_skipped_is_quantised_wherever_tables_are(tokenizer, tables, tmp_path):
    write_base(tmp_path, LLAMA, tokenizer, scale=1)
    every = {"type": "nf4", "skip": []}
    config = config_of(tmp_path, "lora", quantization=every, sharding={"tables": tables})
    assert isinstance(outline_model(config, tokenizer).get_output_embeddings(), QuantizedLinear)

    def head(model, _):
        return type(model.get_output_embeddings())

    gathered = config_of(tmp_path, "lora", quantization=every, sharding={"tables": "gather"})
    runs = [train_sharded(one, tokenizer, True, head) for one in (config, gathered)]
    for (ours, _, kind), (theirs, _, _) in zip(*runs, strict=True):
        assert kind is QuantizedLinear
        assert ours == pytest.approx(theirs, abs=1e-5)


def test_a_head_that_computes_the_loss_is_not_quantised_in_silence(tokenizer, tmp_path):
    write_base(tmp_path, LLAMA, tokenizer, scale=1)
    config = config_of(tmp_path, "lora", quantization={"type": "nf4", "skip": []}, fused_cross_entropy=True)
    with pytest.raises(ConfigError, match="Add lm_head to skip, or set fused_cross_entropy: false"):
        outline_model(config, tokenizer)


def settings(base, **model):
    return config_of(base, "lora").model_dump(by_alias=True) | {"model": {"path": str(base), **model}}


@pytest.mark.parametrize(
    ("model", "match"),
    [
        ({"quantization": "nf4"}, "quantised weights are frozen; add adapter"),
        ({"quantization": "fp8", "adapter": {}}, "'nf4' or 'int8'"),
        (
            {"quantization": "nf4", "adapter": {}, "path": None, "config": T5, "tokenizer": {}},
            "needs path: a model from config",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused(base, model, match):
    with pytest.raises(ValueError, match=match):
        RunConfig.model_validate(settings(base, **model))


@pytest.mark.parametrize(
    ("adapter", "quantization", "match"),
    [
        ({}, {"skip": ["lm_head", "fc1"]}, r"skip has 'fc1', which is no module of T5.*end in k, lm_head, o"),
        ({}, {"skip": ["SelfAtention"]}, r"no module of T5.*Names like it: SelfAttention"),
        (
            {"options": {"init_lora_weights": "pissa"}},
            "nf4",
            "every rank would load all of .*: peft computes .* from its weights. Change that, or leave",
        ),
    ],
)
def test_what_cannot_be_quantised_is_refused_before_weights_are_read(base, tokenizer, adapter, quantization, match):
    config = RunConfig.model_validate(settings(base, adapter=adapter, quantization=quantization))
    with pytest.raises(ConfigError, match=match):
        prepare_model(config, tokenizer)


def test_a_model_without_linear_layers_is_refused(tokenizer, tmp_path):
    write_base(tmp_path, GPT2, tokenizer)
    config = config_of(tmp_path, "lora", quantization="nf4")
    model = outline_model(config_of(tmp_path, "lora"), tokenizer)
    assert any(isinstance(module, Conv1D) for module in model.modules())
    with pytest.raises(ConfigError, match="has nothing to quantise"):
        outline_model(config, tokenizer)


def test_a_missing_package_is_found_before_the_model_is_built(base, monkeypatch):
    config = config_of(base, "lora", quantization="nf4")
    formats.bitsandbytes.cache_clear()
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "bitsandbytes", None)
        with pytest.raises(ConfigError, match=r"need bitsandbytes, which is missing.*fullshard\[quantization\]"):
            check_kind(config)
    formats.bitsandbytes.cache_clear()
