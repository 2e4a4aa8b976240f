"""Early stopping: ends a run when its time is up or its evaluations stop improving."""

from __future__ import annotations

import torch

from fullshard.core.comm import Comm
from fullshard.program.config import TrainingConfig
from fullshard.program.metrics import higher_is_better
from fullshard.program.train.reporting.reports import EndedBy, EvaluationReport
from fullshard.program.train.run.record import Record


def ends_early(settings: TrainingConfig, record: Record, train_seconds: float) -> EndedBy | None:
    """Return why the run ends here, or None; the same on every rank if ``train_seconds`` are."""
    patience = settings.early_stopping_patience
    if patience is not None and record.stale_evaluations >= patience:
        return "early_stopping"
    limit = settings.max_train_minutes
    return "time" if limit is not None and train_seconds >= 60.0 * limit else None


def count_stale(record: Record, report: EvaluationReport, threshold: float) -> int:
    """Count the evaluations in a row, including this one, that did not improve by more than ``threshold``.

    ``record`` is the run before this evaluation.
    """
    best = record.best
    if best is None:
        return 0
    gain = report.value - best.value if higher_is_better(report.metric) else best.value - report.value
    return 0 if gain > threshold else record.stale_evaluations + 1


def longest(comm: Comm, seconds: float) -> float:
    """Return the greatest of the ranks' values, whose clocks differ. Every rank calls it and gets the same answer."""
    most = torch.tensor(seconds, dtype=torch.float64, device=comm.device)
    comm.all_reduce(most, "max").wait()
    return float(most)


def any_rank(comm: Comm, value: bool) -> bool:  # noqa: FBT001
    """Return True if ``value`` is true on any rank. Every rank calls it and gets the same answer."""
    votes = torch.tensor(int(value), device=comm.device)
    comm.all_reduce(votes, "max").wait()
    return bool(votes)
