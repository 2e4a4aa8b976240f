"""A run that was stopped or killed anywhere goes on as if it had not been: to the bit, or, on other ranks, nearly."""

import contextlib
import dataclasses
import json
import re
import shutil
import threading
from pathlib import Path

import datasets
import pytest
from safetensors.torch import load_file

from fullshard.config import RunConfig
from fullshard.errors import CheckpointError, ConfigError, RunStopped
from fullshard.saving import Checkpoints
from fullshard.storage import find_checkpoints, find_completions, rank_by_metric
from fullshard.testing import run_ranks
from fullshard.train import FileSink, StopRequest, train
from fullshard.train.run import loop, step, traced_step
from fullshard.train.setup.resume import TITLE_LISTS, choose_origin, deciding_settings, mark_finished
from support.tiny_run import MODEL, Memory, read_jsonl, settings, write_rows

STEPS = 8
SMALL = {
    "model": {"config": MODEL | {"num_layers": 1, "num_decoder_layers": 1}, "tokenizer": {"vocab_size": 60}},
    "data__max_train_samples": 13,
    "training__per_device_train_batch_size": 2,
    "training__per_device_eval_batch_size": 4,
    "evaluation__max_new_tokens": 2,
    "sharding__wrap": ["T5Block"],
}
"""Four steps an epoch, the last one of a single row; dropout is on."""


class Director(Memory):
    """Does something when the run has come to a place, such as ("step", 3)."""

    def __init__(self, place, action):
        super().__init__()
        self.place, self.action = place, action

    def step(self, report):
        super().step(report)
        self.act("step", report.step)

    def evaluating(self, done, total):
        self.act("evaluating", self.steps[-1].step if self.steps else None)

    def evaluation(self, report, *, is_best):
        super().evaluation(report, is_best=is_best)
        self.act("evaluation", report.step)

    def act(self, *place):
        if place == self.place:
            self.action()


class KilledError(Exception):
    """What a kill is here: nothing more of this run happens."""


def kill():
    raise KilledError


def run(directory, *sinks, stop=None, ranks=1, **changes):
    """Train, and return what a sink was told last."""
    config = RunConfig.model_validate(settings(directory, **SMALL | changes))
    memory = Memory()

    def work(comm):
        mine = [FileSink(config.output_dir), memory, *sinks] if comm.rank == 0 else []
        return train(config, comm, mine, stop if comm.rank == 0 else None)

    try:
        run_ranks(ranks, work)
    finally:
        for thread in threading.enumerate():  # a real kill would end the writer too; here it may finish
            if thread.name == "fullshard-save":
                thread.join()
    return memory


def run_until_stopped(directory, place, **changes):
    """Ask to stop at a place; returns where the run left."""
    stop = StopRequest()
    director = Director(place, lambda: setattr(stop, "requested", True))
    stop.requested = place is None
    with pytest.raises(RunStopped) as stopped:
        run(directory, director, stop=stop, **changes)
    assert director.closed == 1
    assert not (directory / "out" / "summary.json").exists()
    return stopped.value


def run_until_killed(directory, place, **changes):
    with pytest.raises(KilledError):
        run(directory, Director(place, kill), **changes)


def files(directory):
    """The content of every file but the lock, in which a run says that it holds it."""
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file() and path.name != "lock"}


TIMES = ("seconds", "tokens_per_second", "memory_bytes", "memory_bytes_per_rank")


def without_times(record):
    return {name: value for name, value in record.items() if not name.endswith(TIMES)}


def metrics(directory):
    """What the run was, without times: each step and each evaluation."""
    records = read_jsonl(directory / "out" / "metrics.jsonl")
    return [without_times(record) for record in records if record["kind"] != "checkpoint"]


def assert_same(directory, reference):
    """Two finished runs: metrics, predictions, models to the byte, and the summary but for times and memory."""
    ours, theirs = directory / "out", reference / "out"
    assert metrics(directory) == metrics(reference)
    assert (ours / "predictions.jsonl").read_text() == (theirs / "predictions.jsonl").read_text()
    for model in ("model.safetensors", "best/model.safetensors"):
        assert (ours / model).read_bytes() == (theirs / model).read_bytes()
    summaries = [without_times(json.loads((out / "summary.json").read_text())) for out in (ours, theirs)]
    for summary in summaries:
        del summary["memory"], summary["config"], summary["peak_bytes_per_rank"], summary["output_dir"]
    assert summaries[0] == summaries[1]
    assert not list(ours.glob("best.*"))


@pytest.fixture(autouse=True, scope="module")
def _unmetered():
    """The memory meter is slow, and listens to the whole process, so that only one rank of it can measure."""

    class Meter(contextlib.nullcontext):
        peak_bytes, start_bytes, timeline = 1, 0, ()

        def __init__(self, device):
            super().__init__()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(traced_step, "MemoryMeter", Meter)
        yield


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Eight steps with dropout in two epochs, evaluated after each second step."""
    directory = tmp_path_factory.mktemp("uninterrupted")
    run(directory, **OFTEN)
    return directory


OFTEN = {"training__eval_strategy": "steps", "training__eval_steps": 2}


def before(number):
    """The place just before a step: after the one before it and, if there is one, its evaluation."""
    if number == 1:
        return None
    return ("evaluation" if number % 2 else "step", number - 1)


@pytest.mark.parametrize("number", range(1, STEPS + 1))
def test_stopped_after_any_step_it_goes_on_to_the_bit(tmp_path, uninterrupted, number):
    stopped = run_until_stopped(tmp_path, before(number), **OFTEN)
    assert stopped.step == number
    assert stopped.checkpoint == str(tmp_path / "out" / "checkpoints" / f"step-{number:08d}")
    assert str(stopped) == (
        f"Stopped after step {number} of 8, saved in {stopped.checkpoint}. The same command goes on from there."
    )
    memory = run(tmp_path, **OFTEN)
    assert memory.begun[0].resumed_step == number
    assert f"going on after step {number} from {stopped.checkpoint}" in memory.begun[0].notes
    assert [report.step for report in memory.steps] == list(range(number + 1, STEPS + 1))
    assert_same(tmp_path, uninterrupted)


def test_stopped_after_every_step_it_goes_on_to_the_bit(tmp_path, uninterrupted):
    for number in range(1, STEPS + 1):
        # As soon as there is no evaluation to make.
        place = before(number) if number in (3, 5, 7) else None
        assert run_until_stopped(tmp_path, place, **OFTEN).step == number
    run(tmp_path, **OFTEN)
    assert_same(tmp_path, uninterrupted)


@pytest.mark.parametrize("number", [2, STEPS])
def test_stopped_in_an_evaluation_it_makes_it_again(tmp_path, uninterrupted, number):
    assert run_until_stopped(tmp_path, ("evaluating", number), **OFTEN).step == number
    memory = run(tmp_path, **OFTEN)
    assert memory.evaluations[0][0].step == number
    assert_same(tmp_path, uninterrupted)


@pytest.mark.parametrize("place", [("step", 4), ("evaluation", 4), ("step", 6), ("evaluation", 6), ("evaluation", 8)])
def test_killed_it_goes_on_from_the_last_checkpoint_to_the_bit(tmp_path, uninterrupted, place):
    run_until_killed(tmp_path, place, training__save_strategy="steps", training__save_steps=3, **OFTEN)
    memory = run(tmp_path, training__save_strategy="steps", training__save_steps=3, **OFTEN)
    assert memory.begun[0].resumed_step in (3, 6)
    assert_same(tmp_path, uninterrupted)


def test_killed_in_the_middle_of_a_steps_micro_batches(tmp_path, uninterrupted, monkeypatch):
    loss_sum, calls = step.loss_sum, iter(range(100))
    with monkeypatch.context() as patch:
        # Seven micro-batches an epoch: the second one of step 6.
        patch.setattr(step, "loss_sum", lambda *args, **kw: kill() if next(calls) == 10 else loss_sum(*args, **kw))
        with pytest.raises(KilledError):
            run(tmp_path, **OFTEN)
    assert run(tmp_path, **OFTEN).begun[0].resumed_step == 4
    assert_same(tmp_path, uninterrupted)


def test_killed_before_the_first_checkpoint_it_starts_anew(tmp_path, uninterrupted):
    run_until_killed(tmp_path, ("step", 2), **OFTEN)
    assert run(tmp_path, **OFTEN).begun[0].resumed_step == 0
    assert_same(tmp_path, uninterrupted)


def test_killed_between_the_last_checkpoint_and_the_summary_it_ends_as_it_would_have(
    tmp_path, uninterrupted, monkeypatch
):
    with monkeypatch.context() as patch:
        patch.setattr("fullshard.train.run.loop.publish_model", lambda *_: kill())
        with pytest.raises(KilledError):
            run(tmp_path, **OFTEN)
    memory = run(tmp_path, **OFTEN)
    assert memory.steps == []
    assert_same(tmp_path, uninterrupted)


def test_a_run_that_never_saves_on_its_own_saves_when_it_is_stopped(tmp_path, uninterrupted):
    assert run_until_stopped(tmp_path, before(3), training__save_strategy="no", **OFTEN).step == 3
    memory = run(tmp_path, training__save_strategy="no", **OFTEN)
    assert memory.checkpoints == []
    assert_same(tmp_path, uninterrupted)


def scripted(monkeypatch, values):
    """Evaluations measure what they are told, by step."""
    evaluate = loop.evaluate

    def fake(*args, step, **kwargs):
        report = evaluate(*args, step=step, **kwargs)
        return dataclasses.replace(report, value=values[step])

    monkeypatch.setattr(loop, "evaluate", fake)


def test_the_best_model_that_a_checkpoint_names_outlives_better_ones_until_the_next_checkpoint(tmp_path, monkeypatch):
    """Killed after a better evaluation that, on other ranks say, does not come out as well again."""
    scripted(monkeypatch, {2: 0.5, 4: 0.6, 6: 0.9, 8: 0.2})
    run_until_killed(tmp_path, ("evaluation", 6), **OFTEN)
    out = tmp_path / "out"
    aside = (out / "best.step-00000004" / "model.safetensors").read_bytes()
    lost = (out / "best" / "model.safetensors").read_bytes()
    assert aside != lost
    scripted(monkeypatch, {6: 0.1, 8: 0.2})
    memory = run(tmp_path, **OFTEN)
    assert memory.ended[0].best_step == 4
    assert [is_best for _, is_best in memory.evaluations] == [False, False]
    assert (out / "model.safetensors").read_bytes() == (out / "best" / "model.safetensors").read_bytes() == aside
    assert not list(out.glob("best.*"))


def test_a_best_model_that_is_gone_is_said_and_the_best_from_there_on_is_kept(tmp_path, monkeypatch):
    scripted(monkeypatch, {2: 0.5, 4: 0.6, 6: 0.1, 8: 0.2})
    run_until_stopped(tmp_path, ("evaluation", 4), **OFTEN)
    shutil.rmtree(tmp_path / "out" / "best")
    memory = run(tmp_path, **OFTEN)
    assert (
        "the best model so far, of step 4, is no longer there: the best from here on is kept" in memory.begun[0].notes
    )
    assert memory.ended[0].best_step == 8


@pytest.mark.parametrize("aside", ["next", "last", "step-00000004"])
def test_a_best_model_is_found_wherever_a_kill_left_it(tmp_path, monkeypatch, aside):
    scripted(monkeypatch, {2: 0.5, 4: 0.6, 6: 0.1, 8: 0.2})
    run_until_stopped(tmp_path, ("evaluation", 4), **OFTEN)
    shutil.move(tmp_path / "out" / "best", tmp_path / "out" / f"best.{aside}")
    memory = run(tmp_path, **OFTEN)
    assert memory.ended[0].best_step == 4
    assert not list((tmp_path / "out").glob("best.*"))


SPLITS = [(1, 2, 3), (2, 1, 3), (3, 2, 1), (1, 6, 1), (4, 1, 1), (1, 4, 1)]
"""Ranks, batch size and accumulation: global batches of six rows, and of four."""


def split_run(directory, split, sampling, stop_at=None):
    ranks, batch_size, accumulation = split
    changes = {
        "model": {**SMALL["model"], "config": SMALL["model"]["config"] | {"dropout_rate": 0.0}},
        "training__per_device_train_batch_size": batch_size,
        "training__gradient_accumulation_steps": accumulation,
        "training__train_sampling_strategy": sampling,
        "training__eval_strategy": "no",
        "ranks": ranks,
    }
    if stop_at is not None:
        return run_until_stopped(directory, ("step", stop_at - 1), **changes)
    return run(directory, **changes)


@pytest.mark.parametrize(
    ("first", "second", "sampling"),
    [
        (0, 1, "random"),
        (1, 0, "random"),
        (1, 2, "group_by_length"),
        (2, 3, "group_by_length"),
        (5, 4, "group_by_length"),
        (4, 5, "random"),
    ],
)
def test_on_other_ranks_the_same_rows_give_nearly_the_same_losses(tmp_path, one_at_a_time, first, second, sampling):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    whole.mkdir()
    cut.mkdir()
    reference = split_run(whole, SPLITS[first], sampling)
    assert split_run(cut, SPLITS[first], sampling, stop_at=2).step == 2  # in the middle of an epoch
    rest = split_run(cut, SPLITS[second], sampling)
    assert [report.step for report in rest.steps] == list(range(3, len(reference.steps) + 1))
    for ours, theirs in zip(rest.steps, reference.steps[2:], strict=True):
        assert ours.loss == pytest.approx(theirs.loss, rel=1e-5)
        assert (ours.target_tokens, ours.tokens) == (theirs.target_tokens, theirs.tokens)
    ours, theirs = (load_file(directory / "out" / "model.safetensors") for directory in (cut, whole))
    for name in ours:
        assert ours[name].numpy() == pytest.approx(theirs[name].numpy(), abs=2e-5), name


def test_on_other_ranks_each_draws_its_own_numbers_again(tmp_path, one_at_a_time):
    """With dropout the run goes on; which numbers a rank draws depends on seed, rank and step alone."""
    changes = {"training__eval_strategy": "no", "training__gradient_accumulation_steps": 1}
    run_until_stopped(tmp_path, ("step", 1), ranks=2, training__per_device_train_batch_size=1, **changes)
    shutil.copytree(tmp_path / "out", tmp_path / "copy")
    first = run(tmp_path, training__per_device_train_batch_size=2, **changes)
    shutil.rmtree(tmp_path / "out")
    shutil.copytree(tmp_path / "copy", tmp_path / "out")
    second = run(tmp_path, training__per_device_train_batch_size=2, **changes)
    assert [report.loss for report in first.steps] == [report.loss for report in second.steps]


def test_a_finished_run_is_replaced_on_purpose_only_and_its_checkpoints_go(tmp_path, uninterrupted):
    run(tmp_path, training__save_strategy="steps", training__save_steps=1, training__max_steps=3, **OFTEN)
    model = (tmp_path / "out" / "model.safetensors").read_bytes()
    with pytest.raises(
        ConfigError,
        match=r"holds a finished run.*resume=.*step-00000003 with a higher training.max_steps.*resume=never",
    ):
        run(tmp_path, **OFTEN)
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == model
    memory = run(tmp_path, resume="never", **OFTEN)
    assert memory.begun[0].resumed_step == 0
    assert [path.name for path in find_checkpoints(tmp_path / "out" / "checkpoints")] == [
        "step-00000004",
        "step-00000008",
    ]
    assert_same(tmp_path, uninterrupted)


def test_never_starts_anew_and_says_what_it_deletes(tmp_path, uninterrupted):
    run_until_stopped(tmp_path, ("step", 5), training__learning_rate=0.5, **OFTEN)
    memory = run(tmp_path, resume="never", **OFTEN)
    assert memory.begun[0].resumed_step == 0
    directory = tmp_path / "out" / "checkpoints"
    assert f"resume=never: step-00000004, step-00000006 in {directory} deleted" in memory.begun[0].notes
    assert_same(tmp_path, uninterrupted)


def test_an_earlier_runs_best_model_does_not_pass_for_that_of_a_new_run(tmp_path):
    run_until_stopped(tmp_path, ("step", 5), **OFTEN)
    assert (tmp_path / "out" / "best").is_dir()
    run_until_stopped(tmp_path, ("step", 1), resume="never", **OFTEN)
    assert not (tmp_path / "out" / "best").exists()


@pytest.mark.parametrize(
    ("resume", "text"),
    [
        ("nevr", "auto, never or"),
        ("out", r"name one of them, such as resume=.*/out/checkpoints/step-00000006\."),
        ("out/checkpoints", "name one of them"),
        ("out/checkpoints/step-00000006/index.json", r"is a file\. Give .* resume=.*/step-00000006\."),
    ],
)
def test_what_is_no_checkpoint_is_not_resumed_from(tmp_path, resume, text):
    run_until_stopped(tmp_path, ("step", 5), **OFTEN)
    with pytest.raises(ConfigError, match=text):
        run(tmp_path, resume=tmp_path / resume, **OFTEN)


def test_a_stop_says_how_to_go_on_where_the_same_command_would_not(tmp_path):
    stopped = run_until_stopped(tmp_path, None, resume="never")
    assert "The same command with resume=auto goes on" in str(stopped)


@pytest.mark.parametrize("inside", [True, False])
def test_a_named_checkpoint_is_gone_on_from_and_later_ones_go(tmp_path, uninterrupted, inside):
    changes = {
        "training__save_strategy": "steps",
        "training__save_steps": 1,
        "training__save_total_limit": None,
    } | OFTEN
    run(tmp_path, **changes)
    directory = tmp_path / "out" / "checkpoints"
    path = directory / "step-00000003"
    if not inside:
        path = Path(shutil.move(path, tmp_path / "mine"))
        shutil.rmtree(tmp_path / "out")
        write_rows(tmp_path / "train.csv", 25)
    stopped = run_until_stopped(tmp_path, before(5), resume=str(path), **changes)
    assert stopped.step == 5
    left = [int(found.name[-1]) for found in find_checkpoints(directory)]
    assert left == ([1, 2, 3, 4, 5] if inside else [4, 5])
    run(tmp_path, **changes)
    if inside:
        assert_same(tmp_path, uninterrupted)


def test_settings_that_decide_training_must_be_the_checkpoints(tmp_path):
    run_until_stopped(tmp_path, None)
    changes = {
        "training__learning_rate": 0.5,
        "training__num_train_epochs": 3,
        "data__max_source_length": 11,
        "training__per_device_train_batch_size": 3,
        "seed": 4,
    }
    found = files(tmp_path / "out")
    with pytest.raises(ConfigError) as caught:
        run(tmp_path, **changes)
    lines = str(caught.value).splitlines()
    assert lines[0].startswith(f"The run in {tmp_path / 'out'} was cut short and would go on from step-00000001")
    assert sorted(line.strip() for line in lines[1:-1]) == [
        "data.max_source_length: 11; in the checkpoint 12",
        "global batch (ranks x training.per_device_train_batch_size x training.gradient_accumulation_steps): "
        "6; in the checkpoint 4",
        "seed: 4; in the checkpoint 3",
        "training.learning_rate: 0.5; in the checkpoint 0.01",
        "training.num_train_epochs: 3.0; in the checkpoint 2.0",
    ]
    assert "resume=never" in lines[-1]
    assert "another output_dir" in lines[-1]
    assert files(tmp_path / "out") == found


def test_a_file_is_what_it_holds_wherever_it_is(tmp_path, monkeypatch):
    run_until_stopped(tmp_path, None)
    moved = shutil.copy(tmp_path / "train.csv", tmp_path / "moved.csv")
    assert run(tmp_path, data__train_file=str(moved), training__max_steps=None).begun[0].resumed_step == 1
    shutil.rmtree(tmp_path / "out")
    run_until_stopped(tmp_path, None)
    changed = (tmp_path / "train.csv").read_text().replace("card", "cart", 1)
    (tmp_path / "changed.csv").write_text(changed)
    with pytest.raises(ConfigError, match=r"data\.train_file: [\d,]+ bytes, hash \w+; in the checkpoint [\d,]+ bytes"):
        run(tmp_path, data__train_file=str(tmp_path / "changed.csv"))


def test_what_does_not_decide_training_may_change(tmp_path, uninterrupted):
    run_until_stopped(tmp_path, before(3), **OFTEN)
    run(
        tmp_path,
        training__per_device_eval_batch_size=3,
        training__save_strategy="no",
        training__logging_steps=1,
        evaluation__num_samples_shown=0,
        nproc=1,
        **OFTEN,
    )
    ours, theirs = (directory / "out" / "model.safetensors" for directory in (tmp_path, uninterrupted))
    assert ours.read_bytes() == theirs.read_bytes()


def test_a_named_checkpoint_takes_changed_settings_but_no_other_model_or_global_batch(tmp_path, monkeypatch):
    decays = []
    train_step = loop.train_step

    def spy(model, optimizer, *rest):
        decays.append(optimizer.param_groups[0]["weight_decay"])
        return train_step(model, optimizer, *rest)

    monkeypatch.setattr(loop, "train_step", spy)
    path = run_until_stopped(tmp_path, ("step", 2)).checkpoint
    shutil.copytree(path, tmp_path / "mine")
    path = str(tmp_path / "mine")
    memory = run(tmp_path, resume=path, training__learning_rate=0.5, training__weight_decay=0.25)
    assert "changed: training.learning_rate: 0.5; in the checkpoint 0.01" in memory.begun[0].notes
    assert memory.steps[0].step == 4
    assert decays == [0.0] * 3 + [0.25] * 5
    assert memory.steps[0].learning_rate == pytest.approx(0.5 * 5 / 7)
    with pytest.raises(ConfigError, match=r"global batch .*: 6; in the checkpoint 4"):
        run(tmp_path, resume=path, training__gradient_accumulation_steps=3)
    with pytest.raises(ConfigError, match=r"model\.tokenizer\.vocab_size: 61; in the checkpoint 60"):
        run(tmp_path, resume=path, model={**SMALL["model"], "tokenizer": {"vocab_size": 61}})
    with pytest.raises(ConfigError, match="was made after step 3, and with these settings the run has 2 steps"):
        run(tmp_path, resume=path, training__max_steps=2)


def test_a_torn_newest_checkpoint_is_skipped_and_said(tmp_path, uninterrupted):
    run_until_stopped(tmp_path, before(6), **OFTEN)
    shard = tmp_path / "out" / "checkpoints" / "step-00000006" / "shard-00000-of-00001.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    memory = run(tmp_path, **OFTEN)
    assert memory.begun[0].resumed_step == 4
    assert "step-00000006 skipped: not whole" in memory.begun[0].notes
    assert_same(tmp_path, uninterrupted)


def test_a_flipped_bit_names_another_checkpoint_that_goes_on_when_typed(tmp_path, uninterrupted):
    run_until_stopped(tmp_path, before(6), **OFTEN)
    shard = tmp_path / "out" / "checkpoints" / "step-00000006" / "shard-00000-of-00001.safetensors"
    content = bytearray(shard.read_bytes())
    content[8 + int.from_bytes(content[:8], "little")] ^= 1
    shard.write_bytes(content)
    with pytest.raises(CheckpointError, match="is damaged: block 0 of ") as info:
        run(tmp_path, **OFTEN)
    other = re.search(r"give resume=(\S+) to fullshard train", str(info.value))[1]
    memory = run(tmp_path, resume=other, **OFTEN)
    assert memory.begun[0].resumed_step == 4
    assert_same(tmp_path, uninterrupted)


def test_torn_checkpoints_alone_are_an_error_and_not_a_new_run(tmp_path):
    path = run_until_stopped(tmp_path, None).checkpoint
    Path(path, "complete.json").unlink()
    with pytest.raises(CheckpointError, match=r"No checkpoint in .* is whole.*complete\.json.*resume=never"):
        run(tmp_path)


def test_a_checkpoint_of_something_else_is_refused(tmp_path):
    path = Path(run_until_stopped(tmp_path, None).checkpoint)
    shutil.copytree(path / "model", tmp_path / "model")
    with pytest.raises(CheckpointError, match="not a whole checkpoint"):
        run(tmp_path, resume=str(tmp_path / "model"))


def test_a_second_run_on_one_directory_touches_nothing(tmp_path):
    run(tmp_path, training__max_steps=1)
    found = files(tmp_path / "out")
    comm = run_ranks(1, lambda comm: comm)[0]
    with Checkpoints(tmp_path / "out" / "checkpoints", ranks=comm), pytest.raises(CheckpointError, match="Another run"):
        run(tmp_path)
    assert files(tmp_path / "out") == found


def test_a_best_model_by_another_metric_is_not_compared_with_those_to_come(tmp_path):
    run(tmp_path, training__num_train_epochs=1)
    (checkpoint,) = find_checkpoints(tmp_path / "out" / "checkpoints")
    memory = run(tmp_path, resume=str(checkpoint), evaluation__metric="perplexity")
    assert any("was evaluated with other settings" in note for note in memory.begun[0].notes)
    (summary,) = memory.ended
    losses = {report.step: report.loss for report, _ in memory.evaluations}
    assert sorted(losses) == [4, 8], "the evaluation after the checkpoint's step is made again"
    assert (summary.metric, summary.best_step) == ("perplexity", min(losses, key=losses.__getitem__))
    found = find_completions(checkpoint.parent)
    assert [done.greater_is_better for done, _ in found] == [True, False]
    assert rank_by_metric(found).paths == (found[-1][1],)


def test_a_saved_dataset_is_what_it_holds_wherever_it_is(tmp_path):
    def deciding(name, texts):
        rows = datasets.Dataset.from_dict({"text": texts, "label": ["a"] * len(texts)})
        if not (tmp_path / name).exists():
            datasets.DatasetDict({"train": rows, "validation": rows}).save_to_disk(tmp_path / name)
        data = {"dataset_name": str(tmp_path / name)}
        return deciding_settings(RunConfig.model_validate({**settings(tmp_path), "data": data}), 1)

    first = deciding("one", ["a", "b"])
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    assert deciding("two", []) == first
    shutil.rmtree(tmp_path / "one")
    assert deciding("one", ["c", "d", "e"]) != first


def test_wikihows_title_lists_decide_where_they_split_the_rows(tmp_path):
    data = {"train_file": str(tmp_path / "wikihowAll.csv"), "format": "wikihow"}
    (tmp_path / "wikihowAll.csv").write_text("headline,title,text\n")

    def deciding(**more):
        return deciding_settings(RunConfig.model_validate({**settings(tmp_path), "data": data | more}), 1)

    by_hash = deciding()
    for name in ("train", "val"):
        (tmp_path / f"all_{name}.txt").write_text("HowtoA\n")
    by_lists = deciding()
    (tmp_path / "all_val.txt").write_text("HowtoB\n")
    moved = deciding()
    assert by_lists == by_hash | {TITLE_LISTS: by_lists[TITLE_LISTS]}
    assert moved == by_lists | {TITLE_LISTS: moved[TITLE_LISTS]} != by_lists
    assert by_lists[TITLE_LISTS].startswith("all_train.txt 7 bytes, hash ")
    assert TITLE_LISTS not in deciding(validation_file=str(tmp_path / "held_out.csv"))


@pytest.mark.parametrize(
    ("ended_by", "steps", "limit"),
    [
        ("steps", 3, "training.max_steps"),
        ("steps", 2, "training.num_train_epochs"),
        ("time", 2, "training.max_train_minutes"),
        ("early_stopping", 2, "training.early_stopping_patience"),
    ],
)
def test_a_finished_run_says_what_ended_it(tmp_path, monkeypatch, ended_by, steps, limit):
    config = RunConfig.model_validate(settings(tmp_path, training__max_steps=3))
    directory = tmp_path / "out" / "checkpoints"
    directory.mkdir(parents=True)
    mark_finished(config, steps, ended_by)
    monkeypatch.setattr("fullshard.train.setup.resume.find_checkpoints", lambda _: [directory / "step-00000002"])
    with pytest.raises(ConfigError, match=rf"resume={directory}/step-00000002 with a higher {limit}, or resume=never"):
        choose_origin(config, 1)
    (directory / "finished.json").write_text('{"steps": 2}')
    with pytest.raises(ConfigError, match=r"with a higher training\.num_train_epochs, or"):
        choose_origin(config, 1)
