"""The unit table without ranks is the table that ranks print."""

import sys
from dataclasses import replace
from functools import partial

import pytest

from fullshard import units
from fullshard.core.engine.setup import wrap as wrapping
from fullshard.core.testing import run_ranks
from fullshard.errors import CheckpointError, ConfigError, MemoryLimitError, ModelError, UserError, WrapError
from fullshard.planner import hardware
from fullshard.program.config import RunConfig, load_run
from fullshard.program.train import dry_run as dry_run_module
from fullshard.program.train.dry_run import dry_run, inspect_units
from fullshard.program.train.run.assemble import assemble
from fullshard.program.train.search import search
from fullshard.program.train.setup import prepare
from fullshard.program.train.setup.model import make_model
from fullshard.program.train.setup.prepare import prepare_tokenizer
from fullshard.state.saving import full
from support.planned import write_run
from support.tiny_run import MODEL, settings


def config(directory, **changes):
    return RunConfig.model_validate(settings(directory, **changes))


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("wrap", ["auto", "none", ["T5Block"]])
def test_equals_what_ranks_have(tmp_path, size, wrap, one_at_a_time):
    settings_ = config(tmp_path, sharding__wrap=wrap)
    tables = run_ranks(size, lambda comm: units(assemble(settings_, comm).model))
    table = inspect_units(settings_, size)
    assert all(table == other for other in tables)
    assert table.world_size == size


def test_a_model_too_large_for_this_machine_takes_no_memory(tmp_path):
    large = MODEL | {"d_model": 8192, "d_ff": 65536, "num_layers": 48, "num_decoder_layers": 48, "num_heads": 128}
    table = inspect_units(config(tmp_path, model={"config": large, "tokenizer": {"vocab_size": 60}}), 1024)
    assert sum(row.parameters for row in table.rows) > 100e9
    assert len(table.rows) == 97


def test_a_directory_is_read(tmp_path):
    settings_ = config(tmp_path)
    tokenizer = prepare_tokenizer(settings_)
    make_model(settings_, tokenizer).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    table = inspect_units(config(tmp_path, model={"path": str(tmp_path / "model")}), 2)
    assert table == inspect_units(settings_, 2)


def test_wrapping_errors_come_out(tmp_path):
    with pytest.raises(WrapError, match="T5Block"):
        inspect_units(config(tmp_path, sharding__wrap=["T5Blok"]), 2)


@pytest.mark.parametrize(
    ("wrap", "remedies"),
    [
        ("auto", ["set sharding.wrap: none", "sharding.wrap: [Block, ...]", "T5Block"]),
        (10**9, ["sharding.wrap: 1000000000 makes no unit", "or set sharding.wrap: none"]),
    ],
)
def test_wrapping_errors_have_the_run_files_remedies(tmp_path, monkeypatch, wrap, remedies):
    monkeypatch.setattr(wrapping, "_repeated_blocks", lambda model: [])  # as in a large model without blocks
    monkeypatch.setattr(wrapping, "ONE_UNIT_NUMEL", 0)
    with pytest.raises(WrapError) as caught:
        inspect_units(config(tmp_path, sharding__wrap=wrap), 2)
    text = str(caught.value)
    assert all(remedy in text for remedy in remedies)
    assert not any(word in text for word in ("wrap=", "TransformerBlocks", "MinNumel"))


LLAMA = {"model_type": "llama", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
LLAMA |= {"num_attention_heads": 2, "num_key_value_heads": 1}
BART = {"model_type": "bart", "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 16}
BART |= {"decoder_ffn_dim": 16, "encoder_attention_heads": 2, "decoder_attention_heads": 2}


@pytest.mark.parametrize("model", [LLAMA, BART], ids=["llama", "bart"])
def test_buffers_without_values_are_laid_out_too(tmp_path, model):
    found = dry_run(config(tmp_path, model={"config": model, "tokenizer": {"vocab_size": 60}}), 2)
    assert found.total_steps == 4
    assert "ready for the first step" in str(found)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"evaluation__metric": "accuracy"}, "accuracy needs a label set"),
        ({"training__packing": True, "model": {"config": BART, "tokenizer": {"vocab_size": 60}}}, "training.packing"),
        ({"training__report_to": ["wandb"]}, "wandb, which is not installed"),
        ({"training__checkpoints_to": "nothing://bucket/run"}, "nothing:// cannot be opened"),
    ],
    ids=["metric", "packing", "tracker", "store"],
)
def test_a_dry_run_refuses_what_the_run_would_refuse_before_its_first_step(tmp_path, changes, problem, monkeypatch):
    monkeypatch.setattr(prepare, "MOST_LABELS", 1)
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match=problem):
        dry_run(config(tmp_path, **changes), 2)


def test_shards_in_host_memory_are_laid_out_as_others(tmp_path):
    assert inspect_units(config(tmp_path, sharding__cpu_offload=True), 2) == inspect_units(config(tmp_path), 2)


def with_adapter(directory, model, **options):
    """The settings of LoRA over a directory's model."""
    new = config(directory, model={"config": model, "tokenizer": {"vocab_size": 60}})
    tokenizer = prepare_tokenizer(new)
    make_model(new, tokenizer).save_pretrained(directory / "model")
    tokenizer.save_pretrained(directory / "model")
    adapter = {"type": "lora", "options": options}
    return config(directory, model={"path": str(directory / "model"), "adapter": adapter}, sharding__wrap="none")


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True` and a tied layer")
@pytest.mark.parametrize(
    "options",
    [
        {"trainable_token_indices": [5, 6]},
        {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
        {"bias": "all"},
    ],
)
def test_an_adapter_is_tried_and_saved_too(tmp_path, options):
    found = dry_run(with_adapter(tmp_path, LLAMA | {"tie_word_embeddings": True}, **options), 2)
    assert "ready for the first step" in str(found)
    assert not any("was not tried" in note for note in found.notes)


def test_an_adapter_whose_first_step_fails_in_peft_is_not_called_ready(tmp_path):
    # peft 0.21 replaces the embeddings of an encoder-decoder by a linear layer, which token ids do not fit
    settings_ = with_adapter(tmp_path, MODEL, modules_to_save=["lm_head"], ensure_weight_tying=True)
    with pytest.raises(ModelError, match=r"The first step would fail in .*: RuntimeError"):
        dry_run(settings_, 2)


def test_an_adapter_that_cannot_be_saved_is_not_called_ready(tmp_path, monkeypatch):
    def refuse(names, config):
        raise CheckpointError("The model has single trained tokens.")

    monkeypatch.setattr(full, "adapter_names", refuse)
    with pytest.raises(CheckpointError, match="single trained tokens"):
        dry_run(with_adapter(tmp_path, LLAMA), 2)


# What the run chooses by itself

H100, A10G, V100 = (hardware(name) for name in ("h100", "a10g", "v100-32gb"))


def chosen(directory, size, device=None, *, load=None, **changes):
    """What a dry run on such devices chose, by setting, and the dry run."""
    settings_ = config(directory, **changes)
    found = dry_run(settings_, size, device=device, load=load)
    assert found.as_dict()["chosen"] == [
        {"setting": one.setting, "value": one.value, "why": one.why} for one in found.chosen
    ]
    return {one.setting: one.value for one in found.chosen}, found


def test_a_dry_run_is_laid_out_in_the_precision_of_its_devices(tmp_path):
    bytes_each = {}
    for name, device in (("cpu", None), ("h100", H100), ("v100", V100)):
        values, found = chosen(tmp_path, 1, device)
        bytes_each[name] = found.gathered
        assert values["training.precision"] == ("bf16" if name == "h100" else "fp32")
    assert bytes_each["cpu"] == bytes_each["v100"] == 2 * bytes_each["h100"]


def test_the_loss_is_fused_where_the_logits_take_a_twentieth_of_the_devices_memory(tmp_path):
    rows, words, tokens = 4, 60, 8
    small, large = (replace(H100, memory_bytes=20 * 4 * rows * tokens * words + more) for more in (-1, 0))
    assert chosen(tmp_path, 2, small)[0]["training.fused_cross_entropy"] == "true"
    assert chosen(tmp_path, 2, large)[0]["training.fused_cross_entropy"] == "false"
    assert "training.fused_cross_entropy" not in chosen(tmp_path, 2, training__fused_cross_entropy=True)[0]


@pytest.mark.parametrize(("memory", "place"), [(1 << 30, "replicate"), (1 << 10, "shard")])
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True` and a tied layer")
def test_frozen_parameters_that_are_replicated_if_they_are_small_are_told(tmp_path, memory, place):
    settings_ = with_adapter(tmp_path, LLAMA)
    sharding = settings_.sharding.model_copy(update={"frozen": "auto"})
    found = dry_run(settings_.model_copy(update={"sharding": sharding}), 2, device=replace(H100, memory_bytes=memory))
    assert {one.setting: one.value for one in found.chosen}["sharding.frozen"] == place


@pytest.mark.slow
def test_what_a_plan_decides_is_decided_too(tmp_path):
    training = {"training__gradient_accumulation_steps": 2, "training__eval_strategy": "no"}
    run = write_run(tmp_path, training__per_device_train_batch_size=2, **training)

    def decided(size, device):
        found = dry_run(load_run(run), size, load=partial(load_run, run), device=device)
        return {one.setting.removeprefix("training."): one.value for one in found.chosen}.items()

    assert decided(8, A10G) >= {"gradient_checkpointing": "false", "accumulate": "unsharded"}.items()
    assert decided(1, H100) >= {"accumulate": "sharded"}.items()
    small = replace(A10G, memory_bytes=A10G.outside_bytes + (1 << 20))
    assert decided(2, small) >= {"accumulate": "sharded"}.items()


@pytest.mark.slow
def test_sharding_auto_is_searched_on_the_devices(tmp_path):
    training = {"training__fused_cross_entropy": False, "training__eval_strategy": "no"}
    run = write_run(tmp_path, sharding="auto", **training)

    def load(more):
        return load_run(run, ["training.gradient_checkpointing=false", *more])

    best = " ".join(search(load, 2, H100)[0].overrides)
    found = dry_run(load(()), 2, load=load, device=H100)
    assert {one.setting: one.value for one in found.chosen}["sharding"] == best
    assert any(note.startswith(f"sharding: auto chose {best}, of ") for note in found.notes)
    with pytest.raises(MemoryLimitError, match="found nothing that fits in"):
        dry_run(load(()), 2, load=load, device=replace(H100, memory_bytes=1 << 10))


def test_bf16_on_gpus_without_it_is_refused_with_the_gpu(tmp_path):
    with pytest.raises(ConfigError, match=r"v100-32gb has no bfloat16 arithmetic\. Set it to fp16 or fp32"):
        chosen(tmp_path, 2, V100, training__precision="bf16")


def test_a_run_that_would_continue_keeps_its_precision(tmp_path, monkeypatch):
    monkeypatch.setattr(dry_run_module, "precision_before", lambda config: "fp32")
    values, found = chosen(tmp_path, 1, A10G)
    assert values["training.precision"] == "fp32"
    (why,) = [choice.why for choice in found.chosen if choice.setting == "training.precision"]
    assert "as at this run's start; a new run takes bf16" in why
