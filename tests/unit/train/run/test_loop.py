"""The loop on one rank: when it evaluates, what it keeps, what it tells, also when memory runs out."""

import dataclasses
import json

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from fullshard.errors import CheckpointError, ConfigError, MemoryLimitError, RunStopped
from fullshard.program.config import RunConfig
from fullshard.program.config.recorded import recorded_run
from fullshard.program.data import SourceSpec, read_split
from fullshard.program.train import FileSink, StopRequest, train
from fullshard.program.train.run import checkpoints, loop
from fullshard.program.train.run.record import Planned, is_out_of_memory
from support.alone import alone
from support.tiny_run import Memory, read_jsonl, settings


def run(directory, **changes):
    config = RunConfig.model_validate(settings(directory, **changes))
    memory = Memory()
    sinks = [FileSink(config.output_dir, logging_steps=config.training.logging_steps), memory]
    return train(config, alone(), sinks), memory


def test_a_run_from_start_to_end(tmp_path):
    summary, memory = run(tmp_path)
    out = tmp_path / "out"
    assert memory.begun[0].total_steps == 8
    assert "T5Block" in memory.begun[0].unit_table
    assert memory.begun[0].notes[0].startswith("training: 25 rows, mean source ")
    assert [report.step for report in memory.steps] == list(range(1, 9))
    assert [report.epoch for report in memory.steps][3:5] == [1.0, 1.25]
    # warm-up of one step, then linearly to zero
    rates = [report.learning_rate for report in memory.steps]
    assert rates == pytest.approx([1e-2 * factor for factor in (0, 1, 6 / 7, 5 / 7, 4 / 7, 3 / 7, 2 / 7, 1 / 7)])
    assert memory.steps[-1].loss < memory.steps[0].loss
    assert [report.step for report, _ in memory.evaluations] == [4, 8]
    assert memory.ended == [summary]
    assert memory.closed == 1
    top = max((report for report, _ in memory.evaluations), key=lambda report: (report.value, -report.loss))
    assert (summary.value, summary.loss, summary.best_step) == (top.value, top.loss, top.step)
    assert summary.tokens == sum(report.tokens for report in memory.steps)
    assert 0 < summary.step_seconds < summary.train_seconds
    (held,) = summary.memory
    assert held.optimizer >= 2 * held.parameters
    assert held.peak > held.parameters + held.gradients + held.optimizer
    assert json.loads((out / "summary.json").read_text())["config"]["training"]["learning_rate"] == 1e-2
    kinds = [record["kind"] for record in read_jsonl(out / "metrics.jsonl")]
    assert {kind: kinds.count(kind) for kind in kinds} == {"step": 8, "evaluation": 2, "checkpoint": 2}
    assert [(report.step, report.path) for report in memory.checkpoints] == [
        (step, str(out / "checkpoints" / f"step-{step:08d}")) for step in (4, 8)
    ]
    assert read_jsonl(out / "predictions.jsonl") == [p.as_dict() for p in summary.predictions]
    held_out = read_split(SourceSpec(train_file=tmp_path / "held_out.csv"), "train").examples
    assert [(p.source, p.references) for p in summary.predictions] == [(row.source, row.references) for row in held_out]


def test_the_length_of_texts_is_the_same_after_resuming_and_for_predictions(tmp_path):
    """It is that of the longest target as transformers' tokenizer of the saved model counts it."""
    changes = {"data__max_target_length": 64, "evaluation": {"metric": "exact_match"}}
    config = RunConfig.model_validate(settings(tmp_path, **changes))
    first = StopRequest()
    first.requested = True

    comm = alone()
    with pytest.raises(RunStopped):
        train(config, comm, [FileSink(config.output_dir)], first)
    recorded = json.loads((tmp_path / "out" / "run.json").read_text())["config"]["evaluation"]["max_new_tokens"]
    summary = train(config, comm, [FileSink(config.output_dir)])
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    rows = [row for name in ("train", "held_out") for row in (tmp_path / f"{name}.csv").read_text().splitlines()[1:]]
    longest = max(len(tokenizer(row.rpartition(",")[2])["input_ids"]) for row in rows)
    assert summary.config["evaluation"]["max_new_tokens"] == longest
    assert recorded == recorded_run(tmp_path / "out").evaluation.max_new_tokens == longest < 64


def test_the_saved_model_is_the_best_and_gives_the_loss_that_was_reported(tmp_path):
    summary, _ = run(tmp_path, training__max_steps=3)
    for directory in (tmp_path / "out", tmp_path / "out" / "best"):
        assert loss_of_saved(directory, summary) == pytest.approx(summary.loss, rel=1e-5)


def loss_of_saved(directory, summary):
    """Loss over the held-out rows by Hugging Face alone, one row at a time, so that nothing is padded."""
    model = AutoModelForSeq2SeqLM.from_pretrained(directory).eval()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    total = count = 0
    for row in summary.predictions:
        source = tokenizer(row.source, return_tensors="pt", truncation=True, max_length=12).input_ids
        labels = tokenizer(text_target=row.references[0], return_tensors="pt", truncation=True, max_length=8).input_ids
        with torch.no_grad():
            total += model(input_ids=source, labels=labels).loss.item() * labels.numel()
        count += labels.numel()
    return total / count


@pytest.mark.parametrize(
    ("changes", "steps"),
    [
        ({"training__eval_strategy": "steps", "training__eval_steps": 3}, [3, 6, 8]),
        ({"training__max_steps": 6}, [4, 6]),  # the end is always measured
        ({"training__eval_strategy": "steps", "training__eval_steps": 4}, [4, 8]),
    ],
)
def test_when_it_evaluates(tmp_path, changes, steps):
    _, memory = run(tmp_path, **changes)
    assert [report.step for report, _ in memory.evaluations] == steps


def test_a_run_that_never_evaluates_saves_its_last_model(tmp_path):
    summary, memory = run(tmp_path, training__eval_strategy="no", data__validation_file=None, training__max_steps=2)
    assert memory.evaluations == []
    assert (summary.metric, summary.value, summary.loss, summary.best_step) == (None, None, None, 2)
    assert not any("held-out" in note or "earlier" in note for note in memory.begun[0].notes)
    AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out")
    assert not (tmp_path / "out" / "best").exists()
    assert not (tmp_path / "out" / "predictions.jsonl").exists()


def test_the_better_of_equal_metrics_is_that_of_lower_loss(tmp_path, monkeypatch):
    """Metrics 0.5, 0.5, 0.4 with losses 3, 2, 1: the second is kept."""
    scores = iter([(0.5, 3.0), (0.5, 2.0), (0.4, 1.0)])
    evaluate = loop.evaluate

    def scripted(*args, **kwargs):
        value, loss = next(scores)
        return dataclasses.replace(evaluate(*args, **kwargs), value=value, loss=loss)

    monkeypatch.setattr(loop, "evaluate", scripted)
    summary, memory = run(tmp_path, training__eval_strategy="steps", training__eval_steps=3)
    assert [is_best for _, is_best in memory.evaluations] == [True, True, False]
    assert (summary.value, summary.loss, summary.best_step) == (0.5, 2.0, 6)


def test_evaluating_does_not_change_training(tmp_path):
    """Dropout draws the same numbers however often the run evaluates."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    _, often = run(tmp_path / "a", training__eval_strategy="steps", training__eval_steps=1)
    _, never = run(tmp_path / "b", training__eval_strategy="no")
    assert [report.loss for report in often.steps] == [report.loss for report in never.steps]


def test_sinks_are_closed_when_a_run_fails(tmp_path, monkeypatch):
    def refuse(*_args, **_kwargs):
        raise CheckpointError("disk full")

    monkeypatch.setattr(checkpoints, "save", refuse)
    memory = Memory()
    config = RunConfig.model_validate(settings(tmp_path, training__max_steps=1))
    with pytest.raises(CheckpointError, match="disk full"):
        train(config, alone(), [memory])
    assert memory.closed == 1
    assert memory.ended == []


def test_a_causal_model_with_bf16_and_checkpointing_learns(tmp_path):
    model = {
        "config": {"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64},
        "tokenizer": {"vocab_size": 60},
    }
    summary, memory = run(
        tmp_path,
        model=model,
        training__precision="bf16",
        training__gradient_checkpointing=True,
        evaluation__metric="rougeL",
    )
    assert memory.steps[-1].loss < memory.steps[0].loss
    assert summary.metric == "rougeL"
    assert summary.baseline_name == "first sentence"
    assert len(summary.predictions) == 7


def test_a_run_has_a_step_however_short_its_time(tmp_path):
    summary, memory = run(tmp_path, training__max_train_minutes=1e-7)
    assert (summary.steps, summary.ended_by) == (1, "time")
    assert [report.step for report, _ in memory.evaluations] == [1]


def logged_steps(directory):
    return [record["step"] for record in read_jsonl(directory / "out" / "metrics.jsonl") if record["kind"] == "step"]


def test_the_last_step_of_a_run_that_ends_early_is_logged(tmp_path):
    run(tmp_path, training__max_train_minutes=1e-7, training__logging_steps=5)
    assert logged_steps(tmp_path) == [1]
    stopped = StopRequest()
    stopped.requested = True
    config = RunConfig.model_validate(settings(tmp_path, training__logging_steps=5, resume="never"))
    with pytest.raises(RunStopped):
        train(config, alone(), [FileSink(config.output_dir, logging_steps=5)], stopped)
    assert logged_steps(tmp_path) == [1]
    run(tmp_path, training__logging_steps=5)
    assert logged_steps(tmp_path) == [1, 5, 8]


def test_sharding_that_is_still_to_be_chosen_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"sharding: auto must be resolved first: .* chosen_settings\(\)"):
        run(tmp_path, sharding="auto")
    assert not (tmp_path / "out").exists()


def test_the_start_records_five_rows_as_the_model_sees_them(tmp_path):
    run(tmp_path, training__max_steps=1, data__max_target_length=20)
    start = json.loads((tmp_path / "out" / "run.json").read_text())
    rows = start["shown_rows"]
    assert [[name for name, _ in row] for row in rows] == [["source", "target"]] * 5
    train = read_split(SourceSpec(train_file=tmp_path / "train.csv"), "train").examples
    spaced = [train[place].target for place in (0, 5, 10, 15, 20)]
    assert [row[1][1].removesuffix("</s>").strip() for row in rows] == spaced
    assert start["conversations"] is False


PLANNED = Planned({"peak_bytes": 5}, "rank 0 of 1, a table", lambda: "Settings that need less")


@pytest.mark.parametrize(
    ("error", "answer"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (MemoryError(), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("shapes differ"), False),
        (ValueError("DefaultCPUAllocator"), False),
    ],
)
def test_what_is_an_allocation_that_was_refused(error, answer):
    assert is_out_of_memory(error) is answer


def failing_run(directory, monkeypatch, error, planned=PLANNED):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(loop, "issue_step", fail)
    return train(RunConfig.model_validate(settings(directory)), alone(), planned=planned)


def test_the_answer_has_the_plan_the_measurement_and_the_cause(tmp_path, monkeypatch):
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")
    with pytest.raises(MemoryLimitError) as caught:
        failing_run(tmp_path, monkeypatch, error)
    assert caught.value.__cause__ is error
    text = str(caught.value)
    assert text.startswith("Rank 0 of 1 is out of memory: CUDA out of memory. Tried to allocate 2.00 GiB.\n\nmeasured")
    for part in ("gathered units, peak", "optimizer state", "planned: rank 0 of 1, a table", "Settings that need less"):
        assert part in text


def test_without_a_plan_it_names_what_needs_less_in_general(tmp_path, monkeypatch):
    with pytest.raises(MemoryLimitError, match=r"Less is needed with training\.gradient_checkpointing=true"):
        failing_run(tmp_path, monkeypatch, MemoryError(), planned=None)


def test_other_errors_stay_what_they_are(tmp_path, monkeypatch):
    error = RuntimeError("shapes differ")
    with pytest.raises(RuntimeError) as caught:
        failing_run(tmp_path, monkeypatch, error)
    assert caught.value is error
