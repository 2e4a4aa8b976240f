"""The first numbers of a plan are never more than the plan, and near to it where the model is most of it."""

import pytest

from fullshard.planner import hardware
from fullshard.program.config import load_run
from fullshard.program.train.first_numbers import first_numbers
from fullshard.program.train.run_plan import needed_bytes, plan_prepared
from fullshard.program.train.setup.prepare import prepare
from support.planned import RUNS, write_run

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


def numbers(path, *overrides, ranks=2, gpu=False):
    config = load_run(path, overrides)
    data = prepare(config)
    return first_numbers(config, data.tokenizer, ranks, gpu=gpu), config, data


@pytest.mark.parametrize(("kind", "settings"), SETTINGS)
@pytest.mark.parametrize("gpu", [None, "a10g"])
@pytest.mark.slow
def test_they_are_never_more_than_the_plan(tmp_path, kind, settings, gpu):
    """The plan was compared with measured peaks; a run that it lets start must not be refused."""
    found, config, data = numbers(RUNS[kind](tmp_path), *settings, gpu=gpu is not None)
    plan = plan_prepared(config, data, 2, gpu and hardware(gpu), roughly=0)
    assert 0 < found.nbytes <= needed_bytes(plan, "cpu" if gpu is None else "cuda")


def test_of_a_small_model_with_short_rows_they_are_the_most(tmp_path):
    """Its largest unit alone takes more than the gradients of all."""
    path = write_run(tmp_path, training={"eval_strategy": "no", "per_device_train_batch_size": 1})
    shape = ["model.config.d_model=512", "model.config.d_ff=2048", "data.max_source_length=4"]
    found, config, data = numbers(path, *shape)
    plan = plan_prepared(config, data, 2, roughly=0)
    assert (found.shards, found.optimizer_state) == (plan.parts["shards"], plan.parts["optimizer_state"])
    assert 0.75 * plan.peak_bytes < found.nbytes <= plan.peak_bytes


def test_offloaded_shards_do_not_count_for_a_gpu(tmp_path):
    path = write_run(tmp_path)
    assert set(numbers(path, "sharding.cpu_offload=true", gpu=True)[0].least) == {"gathered_units"}
    assert numbers(path, "sharding.cpu_offload=true")[0].least["shards"] > 0


def test_parts_for_images_may_have_no_gradients(tmp_path):
    """A text does not reach them; a parameter without a gradient has no optimizer state either."""
    text = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = {"model_type": "gemma3", "text_config": text | {"num_key_value_heads": 2, "head_dim": 32}}
    model["vision_config"] = text | {"image_size": 28, "patch_size": 14}
    path = write_run(tmp_path, model={"config": model, "tokenizer": {"vocab_size": 60}})
    least = numbers(path, ranks=1)[0].least
    assert least["optimizer_state"] == least["gradient_shards"] == 0
    assert least["shards"] > 0
