"""What a plan says of evaluation, saving and resuming, and of what the host keeps."""

from dataclasses import replace

import pytest
from transformers import T5Config, T5ForConditionalGeneration

from fullshard.planner import hardware
from fullshard.program.config import TrainingConfig, load_run
from fullshard.program.train import around_steps
from fullshard.program.train.plan import plan_prepared, plan_run, prepare_plan
from fullshard.program.train.run.loop import saves_between_steps
from support.planned import write_directory_run, write_run
from support.tiny_run import MODEL

LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


def planned(path, *overrides, ranks=2, **options):
    config = load_run(path, list(overrides))
    return plan_prepared(config, prepare_plan(config), ranks, roughly=0, **options)


@pytest.mark.parametrize(
    ("model", "beams"), [("t5", 1), ("llama", 1), *(pytest.param(one, 3, marks=pytest.mark.slow) for one in ("t5",))]
)
def test_of_a_few_tokens_the_memory_of_the_last_one_is_told(tmp_path, monkeypatch, model, beams):
    changes = {"model": {"config": LLAMA, "tokenizer": {"vocab_size": 60}}} if model == "llama" else {}
    path = write_run(tmp_path, evaluation={"max_new_tokens": 24, "num_beams": beams}, **changes)
    told = planned(path).phase_peaks
    short = planned(path, "evaluation.max_new_tokens=5").phase_peaks
    monkeypatch.setattr(around_steps, "_TOKENS", 1000)
    assert planned(path).phase_peaks == told
    assert told["generation"] > short["generation"]


def test_text_is_planned_where_a_metric_needs_it(tmp_path):
    path = write_run(tmp_path)
    assert "generation" in planned(path).phase_peaks
    assert "generation" not in planned(path, "evaluation.metric=perplexity").phase_peaks
    assert not {"evaluation", "generation"} & planned(path, "training.eval_strategy=no").phase_peaks.keys()


@pytest.mark.parametrize(
    ("save", "evaluation", "found"),
    [
        (("no", None), ("epoch", None), False),
        (("epoch", None), ("epoch", None), False),
        (("epoch", None), ("no", None), True),
        (("epoch", None), ("steps", 5), True),
        (("steps", 10), ("steps", 5), False),
        (("steps", 5), ("steps", 10), True),
    ],
)
def test_copies_are_kept_where_a_checkpoint_is_written_while_training_goes_on(save, evaluation, found):
    settings = TrainingConfig(
        save_strategy=save[0], save_steps=save[1], eval_strategy=evaluation[0], eval_steps=evaluation[1]
    )
    assert saves_between_steps(settings, evaluates=evaluation[0] != "no") is found


def test_host_memory_counts_on_cpu_ranks_and_not_on_a_gpu(tmp_path):
    path = write_directory_run(tmp_path, training={"eval_strategy": "no"})
    plan = planned(path)
    kept = plan.host["checkpoint_copies"] + plan.host["snapshots"]
    assert plan.highest_bytes == plan.phase_peaks["saving"] + kept
    assert plan.bytes_in("before_first_step") == plan.phase_peaks["before_first_step"] + plan.host["snapshots"]
    assert plan.bytes_in("forward", snapshots=False) == plan.phase_peaks["forward"] + plan.host["checkpoint_copies"]
    assert replace(plan, device=hardware("l4")).highest_bytes == plan.phase_peaks["saving"]
    assert "host: snapshots for restarts" in str(plan)


def test_machines_keep_snapshots_of_their_partners(tmp_path):
    path = write_run(tmp_path)
    one, several = (planned(path, ranks_each=each).host["snapshots"] for each in (2, 1))
    assert several == 2 * one


def test_offloaded_shards_are_the_hosts_on_a_gpu_and_change_nothing_on_the_cpu(tmp_path):
    path, offload = write_run(tmp_path), "sharding.cpu_offload=true"
    assert planned(path, offload).as_dict() == planned(path).as_dict()
    without, plan = (planned(path, *more, device=hardware("l4")) for more in ([], [offload]))
    assert (plan.parts["shards"], plan.parts["optimizer_state"], plan.parts["gradient_shards"]) == (0, 0, 0)
    held = without.parts["shards"] + without.parts["optimizer_state"]
    assert held + without.parts["shards"] <= plan.host["offloaded"] < 1.5 * (held + without.parts["shards"])
    assert plan.phase_peaks["backward"] <= without.phase_peaks["backward"] - held
    assert plan.parts["gathered_units"] == without.parts["gathered_units"]


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op"])
def test_a_rough_plan_of_equal_batches_is_the_exact_one(tmp_path, strategy):
    config = load_run(write_run(tmp_path), [f"sharding.strategy={strategy}"])
    data = prepare_plan(config)
    assert plan_prepared(config, data, 1, roughly=0).as_dict() == plan_prepared(config, data, 1).as_dict()


def test_compiled_blocks_are_planned_uncompiled_and_the_figures_are_upper_bounds(tmp_path):
    plain, compiled = (
        plan_run(load_run(write_run(tmp_path), [f"training.torch_compile={on}"]), 2) for on in ("false", "true")
    )
    theirs = T5ForConditionalGeneration(T5Config(**MODEL | {"vocab_size": 62}))
    # Blocks this small share a unit, and a unit's gradients are held until its last block's graph has returned.
    unit = 4 * sum(parameter.numel() for parameter in theirs.decoder.block.parameters())
    assert compiled.compiled_bytes == unit == compiled.peak_bytes - plain.peak_bytes
    assert compiled.phase_peaks == plain.phase_peaks | {"backward": plain.phase_peaks["backward"] + unit}
    assert sum(compiled.parts.values()) == compiled.peak_bytes
    assert compiled.sent_bytes == plain.sent_bytes
    assert [str(plan).count("upper bound") for plan in (plain, compiled)] == [0, 1]
