"""What cannot fit by arithmetic is refused before it is planned, at every size; what a plan lets start is not."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from fullshard.core.comm import lacking
from fullshard.errors import MemoryLimitError
from fullshard.planner import hardware
from fullshard.planner.ranks import PlannedComm
from fullshard.program.config import load_run
from fullshard.program.train import memory_check
from fullshard.program.train.memory_check import check_memory, least_memory, needed_bytes
from fullshard.program.train.plan import plan_prepared
from fullshard.program.train.setup.prepare import prepare
from support.planned import RUNS, write_run

SIZES = {"6B": (4096, 11008, 32), "66B": (8192, 28672, 80)}


def large(size):
    width, inner, layers = SIZES[size]
    return {
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
    }


@pytest.mark.parametrize("compiled", ["false", "true"])
@pytest.mark.parametrize("size", SIZES)
def test_what_cannot_fit_is_refused_without_a_plan(tmp_path, monkeypatch, size, compiled):
    """AdamW in fp32 holds 16 bytes a parameter; the last block has no gradient yet while it is gathered."""
    path = write_run(tmp_path, model={"config": large(size), "tokenizer": {"vocab_size": 60}})
    monkeypatch.setattr(memory_check, "plan_prepared", lambda *_, **__: pytest.fail("it was planned"))
    config = load_run(path, [f"training.torch_compile={compiled}"])
    data = prepare(config)
    with torch.device("meta"):
        theirs = LlamaForCausalLM(LlamaConfig(vocab_size=len(data.tokenizer), **large(size)))
    parameters = sum(parameter.numel() for parameter in theirs.parameters())
    least = least_memory(config, data, 2, 0, "cpu")
    assert 16 * parameters / 2 <= least.nbytes <= 1.03 * 16 * parameters / 2
    monkeypatch.setattr(memory_check, "free_memory", lambda device: {"machine: x": least.nbytes})
    with pytest.raises(MemoryLimitError) as caught:
        check_memory(lambda more: load_run(path, more), data, PlannedComm(0, 2, torch.device("cpu")), print)
    gib = f"{2 * least.nbytes / 2**30:.2f} GiB"
    assert f"need at least {gib} for tensors" in str(caught.value)
    assert f"has {least.nbytes / 2**30:.2f} GiB left" in str(caught.value)
    assert "training.optimizer=adamw_8bit: " in str(caught.value)


SETTINGS = [
    ("run", ["sharding.strategy=shard_grad_op", "training.precision=bf16"]),
    ("run", ["sharding.strategy=no_shard", "training.optimizer=adafactor"]),
    ("run", ["training.optimizer=muon"]),
    ("directory", ["training.optimizer=adamw_8bit"]),
    ("adapter", ["sharding.frozen=auto"]),
    ("nf4", []),
    ("packed", ["training.optimizer=adamw_bf16"]),
    ("table", []),
    ("table", ["sharding.tables=gather"]),
    ("accumulating", ["sharding.tables=gather"]),
]


@pytest.mark.parametrize(("kind", "settings"), SETTINGS)
@pytest.mark.parametrize("gpu", [None, "a10g"])
def test_it_is_never_more_than_the_plan(tmp_path, kind, settings, gpu):
    """The plan was compared with measured peaks; a run that it lets start must not be refused."""
    config = load_run(RUNS[kind](tmp_path), settings)
    data, device = prepare(config), "cpu" if gpu is None else "cuda"
    plan = plan_prepared(config, data, 2, gpu and hardware(gpu), roughly=0)
    assert 0 < least_memory(config, data, 2, 0, device).nbytes <= needed_bytes(plan, device)


def test_of_a_small_model_with_short_rows_it_is_the_most(tmp_path):
    """Its largest unit alone takes more than the gradients of all."""
    path = write_run(tmp_path, training={"eval_strategy": "no", "per_device_train_batch_size": 1})
    config = load_run(path, ["model.config.d_model=512", "model.config.d_ff=2048", "data.max_source_length=4"])
    data = prepare(config)
    plan = plan_prepared(config, data, 2, roughly=0)
    least = least_memory(config, data, 2, 0, "cpu")
    assert least.parts["shards"] + least.parts["optimizer_state"] <= plan.peak_bytes
    assert least.nbytes > 0.75 * plan.peak_bytes


def test_offloaded_shards_do_not_count_for_a_gpu(tmp_path):
    config = load_run(write_run(tmp_path), ["sharding.cpu_offload=true"])
    data = prepare(config)
    assert set(least_memory(config, data, 2, 0, "cuda").parts) == {"gathered_units"}
    assert least_memory(config, data, 2, 0, "cpu").parts["shards"] > 0


def test_parts_for_images_may_have_no_gradients(tmp_path):
    """A text does not reach them; a parameter without a gradient has no optimizer state either."""
    text = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = {"model_type": "gemma3", "text_config": text | {"num_key_value_heads": 2, "head_dim": 32}}
    model["vision_config"] = text | {"image_size": 28, "patch_size": 14}
    path = write_run(tmp_path, model={"config": model, "tokenizer": {"vocab_size": 60}})
    config = load_run(path)
    parts = least_memory(config, prepare(config), 1, 0, "cpu").parts
    assert parts["optimizer_state"] == parts["gradient_shards"] == 0
    assert parts["shards"] > 0


def test_ranks_share_the_pools_that_they_name():
    assert lacking([(5, {"a": 9}), (5, {"a": 11})]) == ("a", 10, 9)
    assert lacking([(5, {"a": 9}), (5, {"b": 5})]) is None
    assert lacking([(5, {})]) is None
