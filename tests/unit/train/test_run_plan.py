"""A run's plan: its batch is at least as large as any that it trains on, and so are the phases around its steps."""

import logging
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from transformers import T5Config, T5ForConditionalGeneration

from fullshard.errors import ModelError
from fullshard.planner import hardware
from fullshard.program.config import TrainingConfig, load_run
from fullshard.program.data import steps
from fullshard.program.train import around_steps
from fullshard.program.train.first_numbers import lay_out
from fullshard.program.train.run.loop import saves_between_steps
from fullshard.program.train.run_plan import largest_steps, longest_batch, longest_rows, plan_prepared, prepare_length
from fullshard.program.train.setup.prepare import collate_spec, prepare
from fullshard.program.train.setup.steps import make_plan
from support.planned import plan_run, write_accumulating_run, write_adapter_run, write_directory_run, write_run
from support.tiny_run import MODEL

NO_TEXTS = {"training__eval_strategy": "no"}
"""Plans of evaluations, which write texts, take a third of a plan."""


def rows(*lengths):
    sources, targets = zip(*lengths, strict=True)
    return SimpleNamespace(
        together=1,
        source_ids=SimpleNamespace(lengths=np.array(sources)),
        target_ids=SimpleNamespace(lengths=np.array(targets)),
    )


def test_the_longest_source_and_the_longest_target_come_together():
    assert longest_rows(rows((5, 5), (9, 1), (1, 7), (6, 6)), 2, causal=False) == [1, 2]
    assert longest_rows(rows((5, 5), (9, 1), (1, 7), (6, 6)), 3, causal=False) == [1, 2, 3]


def test_one_row_or_one_sequence_counts_by_its_total():
    assert longest_rows(rows((5, 5), (9, 1), (1, 7), (6, 6)), 1, causal=False) == [3]
    assert longest_rows(rows((5, 5), (9, 1), (1, 7), (6, 6)), 2, causal=True) == [3, 0]


def test_a_small_set_gives_all_its_rows():
    assert longest_rows(rows((5, 5), (9, 1)), 8, causal=False) == [1, 0]


def test_no_batch_of_three_epochs_is_larger(tmp_path):
    config = load_run(write_run(tmp_path, training__train_sampling_strategy="random"), [])
    data = prepare(config)
    planned = longest_batch(config, data, 2)
    plan = make_plan(config, data.train_set, 2, causal=data.causal)
    spec = collate_spec(data.tokenizer, causal=data.causal)
    for epoch in range(3):
        for step in steps(data.train_set, plan.for_epoch(epoch), 0, spec):
            for batch in step:
                for name in ("input_ids_BS", "labels_BT"):
                    size, most = getattr(batch, name).shape, getattr(planned, name).shape
                    assert all(one <= other for one, other in zip(size, most, strict=True))


def test_a_small_set_of_fixed_shapes_has_a_largest_batch(tmp_path):
    changes = {"training__torch_compile": True, "training__per_device_train_batch_size": 16}
    config = load_run(write_run(tmp_path, **changes), [])
    assert longest_batch(config, prepare(config), 2).input_ids_BS.shape[0] == 13, "25 rows on two ranks"


@pytest.mark.parametrize("override", ["training.packing=false", "training.per_device_train_batch_tokens=60"])
def test_rows_of_one_length_are_planned_with_the_mask_that_other_batches_have(tmp_path, override):
    config = load_run(write_directory_run(tmp_path, training={"eval_strategy": "no"}), [override])
    for step in largest_steps(config, prepare_length(config, 9, 5, 1), 1):
        for batch in step:
            assert batch.input_ids_BS.shape[1] == 9
            assert int((batch.attention_mask_BS == 0).sum()) == 1
            assert not bool(batch.attention_mask_BS[-1, -1])


def planned(path, *overrides, ranks=1):
    return plan_run(load_run(path, list(overrides)), ranks)


@pytest.mark.parametrize(
    "overrides",
    [
        ["training.packing=true"],
        ["training.per_device_train_batch_tokens=50"],
        ["training.packing=true", "training.per_device_train_batch_tokens=60"],
    ],
)
def test_of_the_batches_of_a_run_the_largest_by_every_measure_are_planned(tmp_path, overrides):
    config = load_run(write_directory_run(tmp_path, training={"eval_strategy": "no"}), overrides)
    data = prepare(config)
    chosen = [(*b.input_ids_BS.shape, b.labels_BT.shape[1]) for step in largest_steps(config, data, 2) for b in step]
    plan = make_plan(config, data.train_set, 2, causal=False)
    spec = replace(collate_spec(data.tokenizer, causal=False), packed=config.training.packing)
    run = []
    for epoch in range(3):
        for rank in range(2):
            for step in steps(data.train_set, plan.for_epoch(epoch), rank, spec):
                run += [(*b.input_ids_BS.shape, b.labels_BT.shape[1]) for b in step]
    assert set(chosen) <= set(run)
    for measure in (lambda b, s, t: b * (s + t), lambda b, s, t: b * s * s, lambda b, s, t: b * t):
        assert max(measure(*shape) for shape in chosen) == max(measure(*shape) for shape in run)


def test_a_run_that_ends_early_has_the_batches_of_its_steps(tmp_path):
    options = ["training.per_device_train_batch_tokens=50", "training.max_steps=1"]
    config = load_run(write_directory_run(tmp_path, training={"eval_strategy": "no"}), options)
    data = prepare(config)
    step = next(
        steps(
            data.train_set,
            make_plan(config, data.train_set, 1, causal=False),
            0,
            collate_spec(data.tokenizer, causal=False),
        )
    )
    shapes = {(*b.input_ids_BS.shape, b.labels_BT.shape[1]) for b in step}
    assert {
        (*b.input_ids_BS.shape, b.labels_BT.shape[1]) for step in largest_steps(config, data, 1) for b in step
    } <= shapes


@pytest.mark.slow
def test_an_evaluations_peak_grows_with_its_batch(tmp_path):
    path = write_run(tmp_path)
    small, large = (planned(path, f"training.per_device_eval_batch_size={size}") for size in (1, 7))
    assert small.phase_peaks["evaluation"] < large.phase_peaks["evaluation"]
    assert small.peak_bytes == large.peak_bytes
    assert "peak in evaluation" in str(small)
    assert "evaluation" not in planned(path, "training.eval_strategy=no").phase_peaks


@pytest.mark.parametrize(
    "kind", ["lora", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("dora", "ia3", "prompt", "prefix"))]
)
def test_every_adapter_is_planned(tmp_path, kind):
    path = write_directory_run(tmp_path, **NO_TEXTS)
    adapted, full = planned(path, f"model.adapter={{type: {kind}}}"), planned(path)
    assert 0 < adapted.parts["optimizer_state"] < full.parts["optimizer_state"] / 2


def test_the_average_of_the_weights_is_planned(tmp_path):
    path = write_directory_run(tmp_path)
    plain, averaged = planned(path), planned(path, "training.ema_decay=0.9")
    shards = plain.parts["shards"]
    grown = {name: averaged.phase_peaks[name] - peak for name, peak in plain.phase_peaks.items()}
    assert grown["forward"] == grown["optimizer"] == shards
    assert grown["evaluation"] == 2 * shards, "the average, and the weights that it stands for meanwhile"


def test_frozen_weights_are_planned_where_the_run_keeps_them(tmp_path):
    path, more = write_adapter_run(tmp_path), "training.eval_strategy=no"
    kept, sharded = planned(path, more, ranks=2), planned(path, more, "sharding.frozen=shard", ranks=2)
    assert kept.parts["shards"] > 1.5 * sharded.parts["shards"]


def test_an_adapter_that_peft_makes_from_weights_is_refused(tmp_path):
    path = write_directory_run(tmp_path)
    with pytest.raises(ModelError, match="only the run itself reads"):
        planned(path, "model.adapter={type: lora, options: {init_lora_weights: pissa}}")


@pytest.mark.parametrize("fused", ["true", pytest.param("false", marks=pytest.mark.slow)])
def test_fp16_is_planned_as_a_step_that_is_not_skipped(tmp_path, fused):
    path, more = write_run(tmp_path, **NO_TEXTS), f"training.fused_cross_entropy={fused}"
    half = planned(path, "training.precision=fp16", "training.allow_fp16=true", more)
    assert half.parts["optimizer_state"] == planned(path, more).parts["optimizer_state"]
    assert half.phase_peaks["optimizer"] >= half.parts["optimizer_state"] + half.parts["shards"]


def test_three_micro_batches_show_the_memory_of_full_gradients_in_any_number(tmp_path):
    """In the middle one's long encoder all of them are there; in the last one's, the decoder's are reduced."""
    more = ["sharding.tables=gather", "training.gradient_checkpointing=true", "model.config.d_ff=128"]
    config = load_run(write_accumulating_run(tmp_path), [*more, "sharding.wrap=[T5Block]", "data.max_source_length=64"])
    data = prepare_length(config, 64, 4, 4)
    plan = plan_prepared(config, data, 4, roughly=0)
    assert plan.accumulate == "unsharded"
    assert "accumulate: unsharded" in str(plan)
    assert plan.parts["gradient_buffers"] == plan.account["gradients"] == 4 * plan.account["shards"]  # of 4 ranks


def test_the_largest_batch_is_planned_at_its_place_in_a_step(tmp_path):
    """After another micro-batch there are gradients too."""
    options = [
        "training.packing=true",
        "training.gradient_accumulation_steps=3",
        "training.per_device_train_batch_size=2",
    ]
    config = load_run(write_directory_run(tmp_path, training={"eval_strategy": "no"}), options)
    data = prepare(config)
    plan = make_plan(config, data.train_set, 1, causal=False)
    spec = replace(collate_spec(data.tokenizer, causal=False), packed=True)
    run = [step for epoch in range(3) for step in steps(data.train_set, plan.for_epoch(epoch), 0, spec)]
    chosen = largest_steps(config, data, 1)
    assert {step[0].indices for step in chosen} <= {step[0].indices for step in run}
    assert [len(step) for step in chosen] == sorted(len(step) for step in chosen)

    def tokens(batch):
        return len(batch.input_ids_BS) * (batch.input_ids_BS.shape[1] + batch.labels_BT.shape[1])

    for places in (slice(0, 1), slice(1, None)):
        assert max(tokens(b) for step in chosen for b in step[places]) == max(
            tokens(b) for step in run for b in step[places]
        )


LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


def planned_roughly(path, *overrides, ranks=2, **options):
    config = load_run(path, list(overrides))
    return plan_prepared(config, prepare(config), ranks, roughly=0, **options)


@pytest.mark.parametrize(
    ("model", "beams"), [("t5", 1), ("llama", 1), *(pytest.param(one, 3, marks=pytest.mark.slow) for one in ("t5",))]
)
@pytest.mark.slow
def test_of_a_few_tokens_the_memory_of_the_last_one_is_told(tmp_path, monkeypatch, model, beams):
    changes = {"model": {"config": LLAMA, "tokenizer": {"vocab_size": 60}}} if model == "llama" else {}
    path = write_run(tmp_path, evaluation={"max_new_tokens": 24, "num_beams": beams}, **changes)
    told = planned_roughly(path).phase_peaks
    short = planned_roughly(path, "evaluation.max_new_tokens=5").phase_peaks
    monkeypatch.setattr(around_steps, "_TOKENS", 1000)
    assert planned_roughly(path).phase_peaks == told
    assert told["generation"] > short["generation"]


def test_a_plan_passes_on_no_warnings_about_values(tmp_path):
    """Its prompts are padded on the wrong side, which changes no size."""
    config = load_run(write_run(tmp_path, model={"config": LLAMA, "tokenizer": {"vocab_size": 60}}))
    logger, heard = logging.getLogger("transformers"), []
    handler, level = logging.Handler(), logger.level
    handler.emit = lambda record: heard.append(record.getMessage())
    logger.addHandler(handler)
    try:
        assert "generation" in plan_prepared(config, prepare_length(config, None, 12, 2), 2, roughly=0).phase_peaks
    finally:
        logger.removeHandler(handler)
    assert heard == []
    assert logger.level == level


def test_text_is_planned_where_a_metric_needs_it(tmp_path):
    path = write_run(tmp_path)
    assert "generation" in planned_roughly(path).phase_peaks
    assert "generation" not in planned_roughly(path, "evaluation.metric=perplexity").phase_peaks
    assert not {"evaluation", "generation"} & planned_roughly(path, "training.eval_strategy=no").phase_peaks.keys()


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
    plan = planned_roughly(path)
    kept = plan.host["checkpoint_copies"] + plan.host["snapshots"]
    assert plan.highest_bytes == plan.phase_peaks["saving"] + kept
    assert plan.bytes_in("before_first_step") == plan.phase_peaks["before_first_step"] + plan.host["snapshots"]
    assert plan.bytes_in("forward", snapshots=False) == plan.phase_peaks["forward"] + plan.host["checkpoint_copies"]
    assert replace(plan, device=hardware("l4")).highest_bytes == plan.phase_peaks["saving"]
    assert "host: snapshots for restarts" in str(plan)


def test_offloaded_shards_are_the_hosts_on_a_gpu_and_change_nothing_on_the_cpu(tmp_path):
    path, offload = write_run(tmp_path), "sharding.cpu_offload=true"
    assert planned_roughly(path, offload).as_dict() == planned_roughly(path).as_dict()
    without, plan = (planned_roughly(path, *more, device=hardware("l4")) for more in ([], [offload]))
    assert (plan.parts["shards"], plan.parts["optimizer_state"], plan.parts["gradient_shards"]) == (0, 0, 0)
    held = without.parts["shards"] + without.parts["optimizer_state"]
    assert held + without.parts["shards"] <= plan.host["offloaded"] < 1.5 * (held + without.parts["shards"])
    assert plan.phase_peaks["backward"] <= without.phase_peaks["backward"] - held
    assert plan.parts["gathered_units"] == without.parts["gathered_units"]


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op"])
@pytest.mark.slow
def test_a_rough_plan_of_equal_batches_is_the_exact_one(tmp_path, strategy):
    config = load_run(write_run(tmp_path), [f"sharding.strategy={strategy}"])
    data = prepare(config)
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


@pytest.mark.parametrize("way", ["flex", "varlen", "liger"])
@pytest.mark.slow
def test_ways_for_gpus_are_planned_and_laid_out_without_one(tmp_path, way):
    model = {"config": LLAMA, "tokenizer": {"vocab_size": 60}}
    overrides = ["training.packing=true", "training.precision=bf16", "training.eval_strategy=no"]
    path = write_run(tmp_path, model=model)
    with_way, without = (load_run(path, [*overrides, f"speed.ways=[{ways}]"]) for ways in (way, ""))
    data = prepare(with_way)
    lay_out(with_way, data.tokenizer, 2)
    plans = [plan_prepared(one, data, 2, hardware("h100"), roughly=0) for one in (with_way, without)]
    assert plans[0].peak_bytes == plans[1].peak_bytes
