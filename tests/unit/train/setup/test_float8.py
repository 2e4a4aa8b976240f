"""Which layers of a model compute in fp8, and what a run in fp8 refuses; torchao is not needed to see that."""

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    SwitchTransformersConfig,
    SwitchTransformersForConditionalGeneration,
)

from fullshard.errors import ConfigError, ModelError
from fullshard.planner import hardware
from fullshard.program.config import load_run
from fullshard.program.models import AdapterSpec, add_adapter, float8
from fullshard.program.models.float8 import Float8Layers
from fullshard.program.train.dry_run import dry_run
from fullshard.program.train.setup.devices import Devices, for_devices, usable
from fullshard.program.train.setup.float8 import float8_notes, gathers_float8, require_float8
from support.float8_runs import FP8, adapted, make, new

H100 = Devices.of_sheet(hardware("h100"))


@pytest.fixture
def config(tmp_path):
    return load_run(new("llama", tmp_path, **FP8), [])


@pytest.fixture
def installed(monkeypatch):
    monkeypatch.setattr(float8, "find_spec", lambda name: name)


def test_plain_layers_of_blocks_compute_in_fp8_and_the_head_does_not():
    layers = Float8Layers.of(make("llama"))
    assert len(layers.chosen) == 14
    assert layers.left_out == {"lm_head": "outside of the blocks"}
    assert str(layers) == "14 of 15 linear layers compute in fp8; in bf16: 1 outside of the blocks (lm_head)"


def test_the_layers_under_an_adapter_do_and_its_own_are_not_counted():
    spec = AdapterSpec("lora", "base", r=16, target_modules="all-linear")
    layers = Float8Layers.of(add_adapter(make("llama"), spec, seed=0).model)
    assert len(layers.chosen) == 14
    assert all(name.endswith(".base_layer") for name in layers.chosen)
    assert len(layers.left_out) == 1


def test_routers_odd_sides_ties_and_changed_layers_stay_in_bf16():
    sizes = {"d_model": 32, "d_kv": 16, "d_ff": 40, "num_layers": 2, "num_heads": 2, "num_experts": 16}
    switch = Float8Layers.of(SwitchTransformersForConditionalGeneration(SwitchTransformersConfig(**sizes)))
    reasons = set(switch.left_out.values())
    assert reasons == {"outside of the blocks", "in a router", "with a side that is no multiple of 16"}
    assert all("router" in name for name, why in switch.left_out.items() if why == "in a router")
    model = make("llama")
    first, second = model.model.layers
    first.self_attn.q_proj.weight = second.self_attn.q_proj.weight
    first.self_attn.k_proj.forward = lambda hidden: hidden
    assert sorted(set(Float8Layers.of(model).left_out.values()) - reasons) == ["of another kind", "with a tied weight"]


def test_a_model_without_such_layers_is_refused_with_their_number():
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=32, vocab_size=50))  # its matrices are Conv1D
    with pytest.raises(ModelError, match=r"GPT2LMHeadModel has none: 0 of 1 .* 1 outside of the blocks \(lm_head"):
        Float8Layers.of(model).require_any(model)


@pytest.mark.parametrize(
    ("devices", "problem"),
    [
        (Devices.of_sheet(hardware("a100-40gb")), "compute capability 8.9 .*; a100-40gb is older. Set it to bf16"),
        (Devices.of_sheet(hardware("t4")), "t4 is older. Set it to fp32"),
        (Devices(), "ranks compute on CPUs, .*training.allow_emulation: true"),
    ],
)
def test_devices_without_fp8_are_refused(config, installed, devices, problem):
    training = config.training.model_copy(update={"allow_emulation": devices.gpu})
    with pytest.raises(ConfigError, match=problem):
        require_float8(config.model_copy(update={"training": training}), devices)


def test_devices_with_fp8_and_cpus_that_may_emulate_it_are_not(config, installed):
    for devices in (H100, Devices()):
        require_float8(config, devices)
    mixed = [Devices(gpu=True, bf16=True, name="old"), H100]
    assert min(mixed, key=Devices._least).name == "old"
    assert for_devices(config, H100).training.allow_emulation is False  # a GPU emulates nothing
    assert for_devices(config, Devices()).training.allow_emulation is True


def test_without_torchao_the_extra_is_named(config, monkeypatch):
    monkeypatch.setattr(float8, "find_spec", lambda name: None)
    for check in (lambda: require_float8(config, H100), lambda: dry_run(config, 2)):
        with pytest.raises(ConfigError, match=r"torchao, which is not installed: pip install 'fullshard\[fp8\]'"):
            check()


def test_a_line_says_what_makes_it_slow(config):
    layers, slow = float8_notes(make("llama"), config)
    assert layers == f"{Float8Layers.of(make('llama'))}; scales are tensorwise, weights are gathered in fp8"
    assert "emulated" in slow
    _, slow = float8_notes(make("llama"), for_devices(config, H100))
    assert "add compile to speed.ways" in slow
    compiled = config.model_copy(update={"speed": config.speed.model_copy(update={"ways": ("compile",)})})
    assert len(float8_notes(make("llama"), for_devices(compiled, H100))) == 1


@pytest.mark.parametrize(
    ("changes", "gathers"),
    [
        (["speed.ways=[compile]"], True),
        (["training.fp8_scales=rowwise"], False),
        (["model.adapter.options={use_dora: true}"], False),
    ],
)
def test_weights_are_gathered_in_fp8_unless_rows_have_scales_or_dora_reads_them(tmp_path, changes, gathers):
    assert gathers_float8(load_run(adapted("t5", tmp_path, **FP8), changes)) is gathers


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ("training.precision=bf16", "fp8_scales needs precision: fp8; got bf16"),
        ("model.quantization=nf4", "model.quantization: nf4 keeps the same layers in its own format"),
    ],
)
def test_contradictions_in_the_run_file_are_refused(tmp_path, change, problem):
    path = adapted("t5", tmp_path, **FP8, training__fp8_scales="rowwise")
    with pytest.raises(ConfigError, match=problem):
        load_run(path, [change])


def test_a_trained_model_is_used_in_bf16(config):
    settled, notes = usable(config, H100)
    assert (settled.training.precision, notes) == ("bf16", ())
    old = Devices.of_sheet(hardware("t4"))
    assert usable(config, old)[0].training.precision == "fp32"


def test_a_plan_for_a_card_counts_products_in_fp8():
    rates = hardware("h100").flops_per_s
    assert rates[torch.float8_e5m2] == rates[torch.float8_e4m3fn] > 1.9 * rates[torch.bfloat16]
