"""What a run says at its start about settings that a person would question."""

import pytest

from fullshard.program.config import RunConfig
from fullshard.program.train import train
from fullshard.program.train.dry_run import dry_run
from fullshard.program.train.setup.choices import advice
from fullshard.program.train.setup.prepare import prepare
from fullshard.program.train.setup.steps import make_plan
from support.alone import alone
from support.t5_directory import write_t5
from support.tiny_run import WORDS, Memory, settings


def said(directory, world_size=1, **changes):
    config = RunConfig.model_validate(settings(directory, **changes))
    prepared = prepare(config)
    plan = make_plan(config, prepared.train_set, world_size, causal=prepared.causal)
    return advice(config, prepared, plan, world_size)


def test_nothing_about_a_usual_run(tmp_path):
    assert said(tmp_path) == ()


@pytest.mark.parametrize(
    ("each", "ranks", "text"),
    [
        (40, 1, "the batch of 80 rows is larger than all 25 training rows, so an epoch is one step"),
        (12, 2, "the batch of 48 rows is larger than all 25 training rows"),
    ],
)
def test_a_batch_larger_than_the_data(tmp_path, each, ranks, text):
    (line,) = said(tmp_path, ranks, training__per_device_train_batch_size=each)
    assert line.startswith(text)
    better = "training.per_device_train_batch_size=1 with training.gradient_accumulation_steps=1 gives more steps"
    assert line.endswith(better)
    assert said(tmp_path, ranks, training__per_device_train_batch_size=1, training__gradient_accumulation_steps=1) == ()


def test_one_step_an_epoch(tmp_path):
    changes = {"training__per_device_train_batch_size": 25, "training__gradient_accumulation_steps": 1}
    (line,) = said(tmp_path, **changes)
    assert line.startswith("the batch of 25 rows is as large as all 25 training rows, so an epoch is one step: ")
    assert "training.per_device_train_batch_size=2 gives" in line
    training = {"per_device_train_batch_tokens": 4000, "eval_strategy": "epoch", "learning_rate": 1e-2}
    (line,) = said(tmp_path, training=training)
    assert "is one step of up to 4,000 tokens: lower training.per_device_train_batch_tokens" in line


def test_a_learning_rate_for_fine_tuning_with_a_new_model(tmp_path):
    (line,) = said(tmp_path, training__learning_rate=5e-5)
    assert line.startswith(
        "the model starts from random weights, and training.learning_rate=5e-05 is for pretrained ones"
    )
    assert line.endswith("training.learning_rate=0.002")
    assert said(tmp_path, training__learning_rate=2e-4) == ()
    relative = {"training__lr_scheduler_type": "constant", "training__warmup_steps": 0}
    assert said(tmp_path, training__learning_rate=None, training__optimizer="adafactor", **relative) == ()


def test_a_learning_rate_for_fine_tuning_with_pretrained_weights(tmp_path):
    write_t5(tmp_path / "t5", [*WORDS, *WORDS.values(), "0123456789"])
    assert said(tmp_path, model={"path": str(tmp_path / "t5")}, training__learning_rate=5e-5) == ()


def test_held_out_rows_that_are_training_rows(tmp_path):
    config = RunConfig.model_validate(settings(tmp_path))
    rows = (tmp_path / "train.csv").read_text().splitlines()
    # Row 4 twice, and row 5 with another target, which is another row.
    other = rows[5].rpartition(",")[0] + ",exchange_rate"
    assert other != rows[5]
    (tmp_path / "held_out.csv").write_text("\n".join([rows[0], rows[4], rows[4], other, "a new one,lost_card"]) + "\n")
    prepared = prepare(config)
    plan = make_plan(config, prepared.train_set, 1, causal=False)
    assert advice(config, prepared, plan, 1) == (
        "2 of 4 held-out rows are training rows too, so the score is partly memory: remove them from one side",
    )


def test_targets_far_shorter_than_the_limit(tmp_path):
    evaluation = {"metric": "exact_match", "max_new_tokens": 128}
    (line,) = said(tmp_path, evaluation=evaluation)
    prepared = prepare(RunConfig.model_validate(settings(tmp_path)))
    longest = prepared.train_set.target_stats.longest
    assert f"write up to 128 tokens a row and the longest target has {longest}: " in line
    better = int(line.partition("evaluation.max_new_tokens=")[2].split()[0])
    assert longest <= better < 128
    assert said(tmp_path, evaluation={**evaluation, "max_new_tokens": better}) == ()
    assert said(tmp_path, evaluation={**evaluation, "metric": "perplexity"}) == ()
    limit = prepared.longest_target
    (line,) = said(tmp_path, evaluation={**evaluation, "max_new_tokens": limit})
    assert f"write up to {limit} tokens a row" in line


def test_the_start_and_the_dry_run_say_it(tmp_path):
    config = RunConfig.model_validate(settings(tmp_path, training__per_device_train_batch_size=40))
    memory = Memory()
    train(config, alone(), [memory])
    assert "larger than all 25 training rows" in memory.begun[0].notes[-1]
    assert "larger than all 25 training rows" in dry_run(config, 1).notes[-1]
