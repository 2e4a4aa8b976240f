"""What a run has done so far. It goes into every checkpoint, so that a resumed run ends as if it had never stopped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fullshard.train.reporting.reports import EvaluationReport, StepReport


@dataclass
class Record:
    """What a run has done so far, as one rank sees it.

    Attributes:
        last: The last step.
        best: The best evaluation.
        evaluated_step: Step after which the last evaluation was made; 0 before the first.
        tokens: Tokens trained on, of all ranks.
        train_seconds: Wall time of what was done before the checkpoint that the run goes on from.
        step_seconds: Wall time of all steps.
        evaluation_seconds: Wall time of all evaluations.
        peak_bytes: Peak memory of this rank in the measured step; 0 before that.
        stale_evaluations: Evaluations since the last one that was better, by early stopping's threshold.
        skipped_steps: Steps that were left out because loss or gradient was no finite number.
    """

    last: StepReport | None = None
    best: EvaluationReport | None = None
    evaluated_step: int = 0
    tokens: int = 0
    train_seconds: float = 0.0
    step_seconds: float = 0.0
    evaluation_seconds: float = 0.0
    peak_bytes: int = 0
    stale_evaluations: int = 0
    skipped_steps: int = 0

    def as_values(self, *, train_seconds: float, peaks: Sequence[int]) -> dict[str, Any]:
        """JSON-able.

        Args:
            train_seconds: Wall time of the run so far.
            peaks: ``peak_bytes`` of every rank.
        """
        return {**asdict(self), "train_seconds": train_seconds, "peak_bytes": list(peaks)}

    @classmethod
    def from_values(cls, values: Mapping[str, Any], *, rank: int, world_size: int) -> Record:
        """What :meth:`as_values` gave.

        Args:
            values: From a checkpoint.
            rank: The calling rank.
            world_size: Number of ranks now; ranks that hold other shards than those of the checkpoint measure anew.
        """
        last, best, peaks = values["last"], values["best"], values["peak_bytes"]
        return cls(
            **{
                **values,
                "last": None if last is None else StepReport(**last),
                "best": None if best is None else EvaluationReport.from_values(best),
                "peak_bytes": peaks[rank] if len(peaks) == world_size else 0,
            }
        )
