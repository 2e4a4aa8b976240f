"""Whether a run ends before its last step: its time is up, or its evaluations no longer get better."""

from __future__ import annotations

import torch

from fullshard.comm import Comm
from fullshard.config import TrainingConfig
from fullshard.train.evaluation.metrics import higher_is_better
from fullshard.train.reporting.reports import EndedBy, EvaluationReport
from fullshard.train.run.record import Record


def ends_early(settings: TrainingConfig, record: Record, train_seconds: float, comm: Comm) -> EndedBy | None:
    """Whether the run ends here, and why; every rank calls it after each step and gets the same answer.

    Args:
        settings: How long the run may last.
        record: What was done.
        train_seconds: Wall time of the run so far, on this rank.
        comm: The ranks; their clocks differ, so the time is up when it is on any.
    """
    patience = settings.early_stopping_patience
    if patience is not None and record.stale_evaluations >= patience:
        return "early_stopping"
    limit = settings.max_train_minutes
    if limit is not None and any_rank(comm, train_seconds >= 60.0 * limit):
        return "time"
    return None


def count_stale(record: Record, report: EvaluationReport, threshold: float) -> int:
    """Evaluations in a row, this one included, that were not better than the best before by more than ``threshold``."""
    best = record.best
    if best is None:
        return 0
    gain = report.value - best.value if higher_is_better(report.metric) else best.value - report.value
    if gain > threshold:
        return 0
    return record.stale_evaluations + 1


def any_rank(comm: Comm, wish: bool) -> bool:  # noqa: FBT001
    """Whether any rank says yes; every rank calls it and gets the same answer."""
    votes = torch.tensor(int(wish), device=comm.device)
    comm.all_reduce(votes, "max").wait()
    return bool(votes)
