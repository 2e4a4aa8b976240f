"""A run that was stopped or killed resumes and ends as if uninterrupted: bit for bit, on other ranks nearly."""

import dataclasses
import shutil

import pytest
from safetensors.torch import load_file

from fullshard.errors import CheckpointError, ConfigError
from fullshard.program.train.run import assemble, loop, step
from fullshard.state.saving import Checkpoints
from fullshard.state.storage import as_place, find_checkpoints, find_completions, rank_by_metric
from fullshard.state.storage.contents import verify
from support import object_stores
from support.alone import alone
from support.interrupted_run import (
    OFTEN,
    SMALL,
    STEPS,
    KilledError,
    assert_same,
    before,
    files,
    kill,
    run,
    run_until_killed,
    run_until_stopped,
)
from support.tiny_run import read_jsonl

pytestmark = pytest.mark.usefixtures("unmetered")


@pytest.mark.parametrize("number", [1, 4, 5, STEPS])  # first and last of both epochs
def test_stopped_after_any_step_it_goes_on_to_the_bit(tmp_path, uninterrupted, number):
    stopped = run_until_stopped(tmp_path, before(number), **OFTEN)
    assert stopped.step == number
    assert stopped.checkpoint == str(tmp_path / "out" / "checkpoints" / f"step-{number:08d}")
    assert str(stopped) == (
        f"Stopped after step {number} of 8, saved in {stopped.checkpoint}. The same command resumes from there."
    )
    memory = run(tmp_path, **OFTEN)
    assert memory.begun[0].resumed_step == number
    assert f"resuming after step {number} from {stopped.checkpoint}" in memory.begun[0].notes
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
    assert memory.begun[0].resumed_step in (3, 6, 8)
    assert_same(tmp_path, uninterrupted)


class GenerationError(Exception):
    """What may go wrong while text is generated."""


def test_an_evaluation_that_raises_costs_no_training(tmp_path, uninterrupted, monkeypatch):
    evaluate = loop.evaluate

    def failing(*args, step, **kwargs):
        if step == 4:
            raise GenerationError
        return evaluate(*args, step=step, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "evaluate", failing)
        with pytest.raises(GenerationError):
            run(tmp_path, **OFTEN)
    (checkpoint,) = find_checkpoints(tmp_path / "out" / "checkpoints")
    assert checkpoint.name == "step-00000004", "the epoch's checkpoint is there, complete"
    memory = run(tmp_path, **OFTEN)
    assert [report.step for report in memory.steps] == [5, 6, 7, 8]
    assert [report.step for report, _ in memory.evaluations] == [4, 6, 8]
    assert_same(tmp_path, uninterrupted)


def test_a_save_that_is_under_way_is_complete_before_an_evaluation_may_fail(tmp_path, monkeypatch):
    def failing(*_args, step, **_kwargs):
        assert step == 2
        raise GenerationError

    monkeypatch.setattr(loop, "evaluate", failing)
    with pytest.raises(GenerationError):
        run(tmp_path, training__save_strategy="steps", training__save_steps=1, **OFTEN)
    assert [path.name for path in find_checkpoints(tmp_path / "out" / "checkpoints")] == [
        "step-00000001",
        "step-00000002",
    ]


@pytest.mark.parametrize(("place", "again"), [(("evaluation", 4), [4, 6, 8]), (("step", 5), [6, 8])])
def test_an_evaluation_after_a_checkpoint_is_added_to_it(tmp_path, uninterrupted, place, again):
    """The run was killed before or after that; the resumed one makes only an evaluation that is missing."""
    run_until_killed(tmp_path, place, **OFTEN)
    memory = run(tmp_path, **OFTEN)
    assert memory.begun[0].resumed_step == 4
    assert [report.step for report, _ in memory.evaluations] == again
    assert_same(tmp_path, uninterrupted)
    out = tmp_path / "out"
    measured = {one["step"]: one["value"] for one in read_jsonl(out / "metrics.jsonl") if one["kind"] == "evaluation"}
    found = find_completions(out / "checkpoints")
    assert [(done.step, done.metric) for done, _ in found] == [(4, measured[4]), (8, measured[8])]
    assert not verify(out / "checkpoints").problems


def test_a_damaged_evaluation_in_a_checkpoint_is_an_error_that_names_it(tmp_path):
    run_until_killed(tmp_path, ("step", 5), **OFTEN)
    (checkpoint,) = find_checkpoints(tmp_path / "out" / "checkpoints")
    file = checkpoint / "evaluation.json"
    file.write_text("x" * file.stat().st_size)
    assert any(problem.file == "evaluation.json" for one in verify(checkpoint).results for problem in one.problems)
    with pytest.raises(CheckpointError, match=r"step-00000004/evaluation\.json cannot be read: .*no other complete"):
        run(tmp_path, **OFTEN)


def test_killed_in_the_middle_of_a_steps_micro_batches(tmp_path, uninterrupted, monkeypatch):
    losses, calls = step.losses, iter(range(100))
    with monkeypatch.context() as patch:
        # Seven micro-batches an epoch: the second one of step 6.
        patch.setattr(step, "losses", lambda *args, **kw: kill() if next(calls) == 10 else losses(*args, **kw))
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
        patch.setattr("fullshard.program.train.run.loop.publish_model", lambda *_: kill())
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
@pytest.mark.slow
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


def test_however_a_step_is_divided_a_run_has_the_same_rows_and_nearly_the_same_losses(tmp_path, one_at_a_time):
    found = []
    for number, split in enumerate(SPLITS[:3]):
        folder = tmp_path / str(number)
        folder.mkdir()
        found.append(split_run(folder, split, "group_by_length").steps)
    sizes = [[(one.target_tokens, one.tokens) for one in some] for some in found]
    losses = [[one.loss for one in some] for some in found]
    assert sizes == [sizes[0]] * 3
    assert losses[1:] == [pytest.approx(losses[0], rel=1e-5)] * 2
    assert len(set(sizes[0])) > 1


@pytest.mark.parametrize(
    ("began", "then", "sampling"), [(2, (1, 2), "group_by_length"), (3, (2,), "random"), (2, (4,), "random")]
)
def test_the_same_run_file_keeps_its_global_batch_on_other_ranks(tmp_path, one_at_a_time, began, then, sampling):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    whole.mkdir()
    cut.mkdir()
    file = 2, 1  # rows of a micro-batch, accumulation
    reference = split_run(whole, (began, *file), sampling)
    split_run(cut, (began, *file), sampling, stop_at=2)
    for ranks in then[:-1]:
        assert split_run(cut, (ranks, *file), sampling, stop_at=4).step == 4
    rest = split_run(cut, (then[-1], *file), sampling)
    notes = "; ".join(rest.begun[0].notes)
    assert (f"the run began on {began} ranks: on {then[-1]} a step of {2 * began} rows" in notes) == (began != then[-1])
    assert rest.steps[-1].step == len(reference.steps)
    assert len(rest.steps) == len(reference.steps) - 2 * len(then)
    for ours, theirs in zip(reversed(rest.steps), reversed(reference.steps), strict=False):
        assert ours.loss == pytest.approx(theirs.loss, rel=1e-5)
        assert (ours.target_tokens, ours.tokens) == (theirs.target_tokens, theirs.tokens)


def test_ranks_that_cannot_share_the_global_batch_are_refused(tmp_path, one_at_a_time):
    split_run(tmp_path, (3, 1, 1), "random", stop_at=2)
    with pytest.raises(ConfigError, match="began on 3 ranks with 3 rows a step, and 2 ranks cannot share them equally"):
        split_run(tmp_path, (2, 1, 1), "random")


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


def test_a_second_run_on_one_directory_touches_nothing(tmp_path):
    run(tmp_path, training__max_steps=1)
    found = files(tmp_path / "out")
    comm = alone()
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


def test_an_earlier_runs_best_model_does_not_pass_for_that_of_a_new_run(tmp_path):
    run_until_stopped(tmp_path, ("step", 5), **OFTEN)
    assert (tmp_path / "out" / "best").is_dir()
    run_until_stopped(tmp_path, ("step", 1), resume="never", **OFTEN)
    assert not (tmp_path / "out" / "best").exists()


def test_a_run_with_its_checkpoints_in_a_store_goes_on_to_the_bit(tmp_path, uninterrupted):
    with object_stores.memory() as url:
        stopped = run_until_stopped(tmp_path, before(5), training__checkpoints_to=url, **OFTEN)
        newest = find_checkpoints(as_place(url))[-1]
        assert stopped.checkpoint == str(newest)
        assert not (tmp_path / "out" / "checkpoints").exists()
        memory = run(tmp_path, training__checkpoints_to=url, **OFTEN)
        assert memory.begun[0].resumed_step == 5
        assert_same(tmp_path, uninterrupted)
        assert "finished.json" in as_place(url).sizes()
        with pytest.raises(ConfigError, match="holds a finished run"):
            run(tmp_path, training__checkpoints_to=url, **OFTEN)
        first = find_checkpoints(as_place(url))[0]
        (tmp_path / "b").mkdir()
        again = run(tmp_path / "b", resume=str(first), **OFTEN)
        assert f"step-{again.begun[0].resumed_step:08d}" == first.name.partition(".")[0]


@pytest.mark.parametrize(
    ("at_start", "later"), [(1 << 10, 1 << 40), pytest.param(1 << 40, 1 << 10, marks=pytest.mark.slow)]
)
def test_what_a_run_chose_by_its_memory_is_kept_with_another_memory(tmp_path, monkeypatch, at_start, later):
    monkeypatch.setattr(assemble, "smallest_memory", lambda comm: at_start)
    reference = tmp_path / "never stopped"
    reference.mkdir()
    run(reference, **OFTEN)
    run_until_stopped(tmp_path, before(3), **OFTEN)
    monkeypatch.setattr(assemble, "smallest_memory", lambda comm: later)
    chosen = run(tmp_path, **OFTEN).begun[0].chosen["training.fused_cross_entropy"]
    assert chosen.startswith("true" if at_start < later else "false")
    assert_same(tmp_path, reference)
