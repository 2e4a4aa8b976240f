"""``speed.ways: auto``: what a run takes on which devices, and that what is written is taken as it is."""

import re

import pytest
import torch

from fullshard.planner import hardware
from fullshard.program.config import load_run
from fullshard.program.train.run_plan import plan_prepared
from fullshard.program.train.setup.devices import Devices
from fullshard.program.train.setup.prepare import prepare
from fullshard.program.train.setup.ways import STEPS_A_SHAPE, ways_choice
from support.planned import write_run

T5 = {"model_type": "t5", "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.1}
LLAMA = {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
LLAMA |= {"hidden_size": 32, "intermediate_size": 64}
H100 = Devices.of_sheet(hardware("h100"))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The settings and data of a run of a T5 and of a Llama."""
    found = {}
    for name, model in {"t5": T5, "llama": LLAMA}.items():
        directory = tmp_path_factory.mktemp(name)
        path = write_run(directory, model={"config": model, "tokenizer": {"vocab_size": 60}})
        found[name] = path, prepare(load_run(path))
    return found


def chosen(runs, name, *overrides, devices=H100, device=None):
    path, data = runs[name]
    config = load_run(path, ["training.precision=bf16", *overrides])
    settled, choices = ways_choice(config, data, 2, devices, device)
    return settled.ways, choices


@pytest.mark.parametrize(
    ("model", "steps", "ways"),
    [
        ("t5", 50, ("t5_attention",)),
        ("t5", 5_000, ("t5_attention", "compile")),
        ("llama", 50, ()),
        ("llama", 5_000, ("compile",)),
    ],
)
def test_the_model_and_the_planned_steps_decide(runs, model, steps, ways):
    found, (choice,) = chosen(runs, model, f"training.max_steps={steps}")
    assert found == ways
    assert choice.override == f"speed.ways=[{', '.join(ways)}]"
    assert load_run(runs[model][0], [choice.override]).speed.ways == ways
    assert f"{steps:,} steps" in choice.why


def test_blocks_are_compiled_from_the_number_of_steps_that_is_told(runs):
    _, (choice,) = chosen(runs, "llama", "training.max_steps=1")
    needed = int(re.search(r"([\d,]+) repay", choice.why)[1].replace(",", ""))
    assert needed in [STEPS_A_SHAPE * shapes for shapes in range(1, 7)]
    for steps, ways in ((needed - 1, ()), (needed, ("compile",))):
        assert chosen(runs, "llama", f"training.max_steps={steps}")[0] == ways


def test_ranks_on_cpus_take_none(runs):
    assert chosen(runs, "t5", "training.max_steps=5000", devices=Devices())[0] == ()


@pytest.mark.parametrize("written", [(), ("bias_sdpa",), ("compile",)])
def test_what_is_written_is_taken_as_it_is(runs, written):
    found, choices = chosen(runs, "t5", f"speed.ways=[{', '.join(written)}]", "training.max_steps=5000")
    assert (found, choices) == (written, ())


@pytest.mark.parametrize(
    ("override", "ways"),
    [
        ("model.attn_implementation=sdpa", ("compile",)),
        ("training.torch_compile=false", ("t5_attention",)),
        ("training.activation_offload=true", ("t5_attention",)),
        ("sharding.sequence_parallel=2", ("t5_attention",)),
    ],
)
def test_settings_that_stand_against_a_way_leave_it_out(runs, override, ways):
    found, (choice,) = chosen(runs, "t5", override, "training.max_steps=5000")
    assert found == ways
    assert override.partition("=")[0] in choice.why


def test_adapters_that_peft_makes_of_weights_do_not_stand_in_the_way(runs):
    for init in ("pissa", "olora", "true"):
        found, _ = chosen(runs, "t5", f"model.adapter={{type: lora, options: {{init_lora_weights: {init}}}}}")
        assert found == ("t5_attention",)
    found, (choice,) = chosen(runs, "t5", "model.adapter={type: prefix}")
    assert found == ()
    assert "prefix" in choice.why


def test_a_gpu_without_the_kernel_is_told(runs):
    found, (choice,) = chosen(runs, "t5", "training.max_steps=50", device=torch.device("cpu"))
    assert found == ()
    assert "triton" in choice.why or "CUDA" in choice.why


def test_a_plan_takes_them_too(runs):
    path, data = runs["t5"]
    config = load_run(path, ["training.precision=bf16", "training.max_steps=50", "training.save_strategy=no"])
    plan = plan_prepared(config, data, 1, hardware("h100"), roughly=0)
    by_hand = config.model_copy(update={"speed": config.speed.model_copy(update={"ways": ("t5_attention",)})})
    assert plan.peak_bytes == plan_prepared(by_hand, data, 1, hardware("h100"), roughly=0).peak_bytes
    none = config.model_copy(update={"speed": config.speed.model_copy(update={"ways": ()})})
    assert plan.peak_bytes < plan_prepared(none, data, 1, hardware("h100"), roughly=0).peak_bytes
    assert "speed.ways" in {choice.setting for choice in plan.chosen}
