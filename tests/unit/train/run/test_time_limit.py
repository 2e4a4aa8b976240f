"""A run ends early when its time is up or it stops getting better; its learning rate decays over the time it has."""

import pytest
import torch
from transformers import get_scheduler

from fullshard.core.testing import run_ranks
from fullshard.errors import RunStopped
from fullshard.program.config import TrainingConfig
from fullshard.program.train import StopRequest
from fullshard.program.train.reporting.reports import EvaluationReport
from fullshard.program.train.run.loop import TrainingRun, count_stale, ends_early, most_of
from fullshard.program.train.run.record import Record
from fullshard.program.train.setup.steps import LearningRateSchedule
from support.interrupted_run import Director, run
from support.reports import made

PEAK = 1e-2


def theirs(kind, steps, warmup=0, options=None):
    """The rates of transformers' scheduler for a run of so many steps."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    given = {"num_warmup_steps": warmup, "num_training_steps": steps}
    scheduler = get_scheduler(kind, optimizer, **given, scheduler_specific_kwargs=options)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("kind", ["linear", "cosine"])
@pytest.mark.parametrize("share", [None, 0.25])
def test_at_an_even_pace_the_schedule_is_that_of_the_steps_that_fit(kind, share):
    warmup = 0 if share is None else 126
    schedule = LearningRateSchedule(kind, 504, 168, warmup_steps=warmup, warmup_share=share)
    rates = [PEAK * schedule.within(600.0, steps=n, seconds=15.0 * n, pace_s=15.0).factor(n) for n in range(1, 40)]
    assert rates == pytest.approx(theirs(kind, 40, 0 if share is None else 10)[1:])


def test_where_all_steps_fit_the_schedule_is_the_runs_own():
    schedule = LearningRateSchedule("linear", 504, 168, warmup_steps=5)
    assert schedule.within(600.0, steps=7, seconds=7.0, pace_s=1.0) == schedule
    assert schedule.within(600.0, steps=0, seconds=0.0, pace_s=0.0) == schedule


def test_an_evaluation_on_the_way_takes_its_share_of_the_decay():
    schedule = LearningRateSchedule("linear", 504, 168)
    before = schedule.within(600.0, steps=20, seconds=200.0, pace_s=10.0).factor(20)
    after = schedule.within(600.0, steps=20, seconds=500.0, pace_s=25.0).factor(20)
    assert (before, after) == pytest.approx((2 / 3, 1 / 6))


@pytest.fixture
def six_seconds_a_step(monkeypatch):
    def seconds(self):
        return 0.0 if self.record.last is None else 6.0 * self.record.last.step

    monkeypatch.setattr(TrainingRun, "train_seconds", property(seconds))


LIMITED = {
    "training__max_train_minutes": 1.2,
    "training__num_train_epochs": 10,
    "training__warmup_steps": 0,
    "training__eval_strategy": "no",
}
LIMITED |= {"data__validation_file": None, "training__learning_rate": PEAK}


@pytest.mark.usefixtures("six_seconds_a_step")
@pytest.mark.parametrize(
    ("kind", "options"), [("linear", {}), ("cosine", {}), ("warmup_stable_decay", {"num_decay_steps": 3})]
)
def test_a_run_that_its_time_ends_decays_as_one_of_so_many_steps(tmp_path, kind, options):
    """From the seventh step on; before, as the run of 40 steps that it would be without a limit."""
    chosen = {"training__lr_scheduler_type": kind, "training__lr_scheduler_kwargs": options}
    memory = run(tmp_path, **chosen, **LIMITED)
    rates = [report.learning_rate for report in memory.steps]
    assert memory.ended[0].ended_by == "time"
    assert len(rates) == 12
    assert rates == pytest.approx(theirs(kind, 40, 0, options)[:7] + theirs(kind, 12, 0, options)[7:])
    assert memory.estimates == [12]


@pytest.mark.usefixtures("six_seconds_a_step")
def test_a_resumed_run_decays_over_the_time_that_is_left(tmp_path):
    stop = StopRequest()
    director = Director(("step", 8), lambda: setattr(stop, "requested", True))
    with pytest.raises(RunStopped):
        run(tmp_path, director, stop=stop, **LIMITED)
    memory = run(tmp_path, **LIMITED)
    assert memory.begun[0].resumed_step == 9  # a request is seen in the next step
    assert [report.learning_rate for report in memory.steps] == pytest.approx(theirs("linear", 12)[9:])


@pytest.mark.usefixtures("unmetered")
def test_two_resumed_ranks_continue_the_schedule_exactly(tmp_path):
    options = {"num_decay_steps": 3, "decay_type": "1-sqrt"}
    chosen = {
        "ranks": 2,
        "training__lr_scheduler_type": "warmup_stable_decay",
        "training__lr_scheduler_kwargs": options,
        "training__learning_rate": PEAK,
        "training__warmup_steps": 1,
        "training__max_steps": 6,
    }
    stop = StopRequest()
    director = Director(("step", 3), lambda: setattr(stop, "requested", True))
    with pytest.raises(RunStopped):
        run(tmp_path, director, stop=stop, **chosen)
    memory = run(tmp_path, **chosen)
    rates = theirs("warmup_stable_decay", 6, 1, options)
    assert [report.learning_rate for report in director.steps + memory.steps] == rates


@pytest.fixture
def slow_first_step(monkeypatch):
    """A first step of 60 s, then 1 s each."""

    def seconds(self):
        return 0.0 if self.record.last is None else 59.0 + self.record.last.step

    monkeypatch.setattr(TrainingRun, "train_seconds", property(seconds))


@pytest.mark.usefixtures("slow_first_step")
def test_a_slow_first_step_does_not_end_the_warm_up(tmp_path):
    """541 of 5,000 steps fit 600 s; a tenth of them warm up: 500, and from the seventh step on 55."""
    limited = LIMITED | {"training__max_train_minutes": 10, "training__max_steps": 5000, "training__warmup_steps": 0.1}
    stop = StopRequest()
    director = Director(("step", 8), lambda: setattr(stop, "requested", True))
    with pytest.raises(RunStopped):
        run(tmp_path, director, stop=stop, **limited)
    rates = [report.learning_rate for report in director.steps]
    assert rates == pytest.approx(theirs("linear", 5000, 500)[:7] + theirs("linear", 541, 55)[7:9])
    assert director.estimates == [541]
    stop.requested = True
    with pytest.raises(RunStopped):
        run(tmp_path, director, stop=stop, **limited)
    assert director.steps[-1].learning_rate == pytest.approx(theirs("linear", 541, 55)[9])


def report(metric, value):
    return made(EvaluationReport, metric=metric, value=value)


def stale_after(metric, values, threshold):
    """What is counted after each of several evaluations."""
    record, counts = Record(), []
    for value in values:
        record.stale_evaluations = count_stale(record, report(metric, value), threshold)
        if record.best is None or record.stale_evaluations == 0:
            record.best = report(metric, value)
        counts.append(record.stale_evaluations)
    return counts


def test_higher_is_better_but_for_perplexity():
    assert stale_after("exact_match", [0.5, 0.6, 0.6, 0.5, 0.7], 0.0) == [0, 0, 1, 2, 0]
    assert stale_after("perplexity", [9.0, 8.0, 8.5, 8.0, 7.0], 0.0) == [0, 0, 1, 2, 0]


def test_less_than_the_threshold_is_no_gain():
    assert stale_after("exact_match", [0.5, 0.505, 0.52], 0.01) == [0, 1, 0]


@pytest.mark.parametrize(("stale", "seconds", "end"), [(0, 59.0, None), (2, 0.0, "early_stopping"), (0, 60.0, "time")])
def test_what_ends_a_run(stale, seconds, end):
    limits = TrainingConfig(early_stopping_patience=2, max_train_minutes=1.0)

    def rank(comm):
        # Only rank 1's clock says so; all must agree.
        mine = most_of(comm, seconds if comm.rank == 1 else 0.0)
        return ends_early(limits, Record(stale_evaluations=stale), mine)

    assert run_ranks(2, rank) == [end, end]


def test_without_limits_nothing_ends_a_run():
    assert ends_early(TrainingConfig(), Record(stale_evaluations=99), 1e9) is None
