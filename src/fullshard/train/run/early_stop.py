"""Early stopping: ends a run when its time is up or its evaluations stop improving."""

from __future__ import annotations

import torch

from fullshard.comm import Comm
from fullshard.config import TrainingConfig
from fullshard.train.evaluation.metrics import higher_is_better
from fullshard.train.reporting.reports import EndedBy, EvaluationReport
from fullshard.train.run.record import Record


def ends_early(settings: TrainingConfig, record: Record, train_seconds: float, comm: Comm) -> EndedBy | None:
    """Return why the run ends here, or None. Every rank calls it after each step and gets the same answer.

    Ranks' clocks differ, so the time is up as soon as ``train_seconds`` of any rank are.
    """
    patience = settings.early_stopping_patience
    if patience is not None and record.stale_evaluations >= patience:
        return "early_stopping"
    limit = settings.max_train_minutes
    if limit is not None and any_rank(comm, train_seconds >= 60.0 * limit):
        return "time"
    return None


def count_stale(record: Record, report: EvaluationReport, threshold: float) -> int:
    """Count the evaluations in a row, including this one, that did not improve by more than ``threshold``.

    ``record`` is the run before this evaluation.
    """
    best = record.best
    if best is None:
        return 0
    gain = report.value - best.value if higher_is_better(report.metric) else best.value - report.value
    return 0 if gain > threshold else record.stale_evaluations + 1


def any_rank(comm: Comm, value: bool) -> bool:  # noqa: FBT001
    """Return True if ``value`` is true on any rank. Every rank calls it and gets the same answer."""
    votes = torch.tensor(int(value), device=comm.device)
    comm.all_reduce(votes, "max").wait()
    return bool(votes)
