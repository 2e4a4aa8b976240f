"""A run ends early when its time is up on any rank, or when evaluations stop getting better by the threshold."""

import dataclasses

import pytest

from fullshard.core.testing import run_ranks
from fullshard.program.config import TrainingConfig
from fullshard.program.train.reporting.reports import EvaluationReport
from fullshard.program.train.run.loop import count_stale, ends_early, longest
from fullshard.program.train.run.record import Record


def report(metric, value):
    names = [field.name for field in dataclasses.fields(EvaluationReport)]
    return EvaluationReport(**{**dict.fromkeys(names), "metric": metric, "value": value})


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
        mine = longest(comm, seconds if comm.rank == 1 else 0.0)
        return ends_early(limits, Record(stale_evaluations=stale), mine)

    assert run_ranks(2, rank) == [end, end]


def test_without_limits_nothing_ends_a_run():
    assert ends_early(TrainingConfig(), Record(stale_evaluations=99), 1e9) is None
