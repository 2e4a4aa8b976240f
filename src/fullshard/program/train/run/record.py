"""The record of a run so far, saved in every checkpoint, so that a resumed run ends as if never interrupted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fullshard.program.train.reporting.reports import EvaluationReport, StepReport


@dataclass
class Record:
    """The progress of a run on one rank."""

    last: StepReport | None = None  # the last step
    best: EvaluationReport | None = None  # the best evaluation
    evaluated_step: int = 0  # step after which the last evaluation was made; 0 before the first
    tokens: int = 0  # tokens trained on, of all ranks
    train_seconds: float = 0.0  # wall time of the run up to the checkpoint that it resumed from
    step_seconds: float = 0.0  # wall time of all steps
    evaluation_seconds: float = 0.0  # wall time of all evaluations
    peak_bytes: int = 0  # peak memory of this rank in the traced step; 0 before it
    stale_evaluations: int = 0  # evaluations since the last one that was better, by early stopping's threshold
    pace_s: float = 0.0  # seconds of a step with its share of evaluations, for a time limit; 0: not measured
    skipped_steps: int = 0  # steps that were skipped because the loss or the gradient was not finite

    def add_step(self, report: StepReport) -> None:
        """Count one more step."""
        self.last = report
        self.tokens += report.tokens
        self.step_seconds += report.seconds
        self.skipped_steps += report.skipped

    def as_values(self, *, train_seconds: float, peaks: Sequence[int]) -> dict[str, Any]:
        """Return JSON-able values; ``peaks`` is ``peak_bytes`` of every rank."""
        return {**asdict(self), "train_seconds": train_seconds, "peak_bytes": list(peaks)}

    @classmethod
    def from_values(cls, values: Mapping[str, Any], *, rank: int, world_size: int) -> Record:
        """Restore the record from :meth:`as_values`.

        Args:
            values: From a checkpoint.
            rank: The calling rank.
            world_size: Number of ranks now. If it has changed, ranks hold other shards and measure their peak again.
        """
        last, best, peaks = values["last"], values["best"], values["peak_bytes"]
        # Earlier versions took the mean of all steps, which goes on until this attempt has measured its own.
        earlier = 0.0 if last is None else values["train_seconds"] / last["step"]
        return cls(
            **{
                "pace_s": earlier,
                **values,
                "last": None if last is None else StepReport(**last),
                "best": None if best is None else EvaluationReport.from_values(best),
                "peak_bytes": peaks[rank] if len(peaks) == world_size else 0,
            }
        )
