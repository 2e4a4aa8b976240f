"""What a training run leaves for its next attempt, and from where that one resumes."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from fullshard.launch.attempts import Reached, attempt_number, last_note, note
from fullshard.train import Sink
from fullshard.train.reporting.reports import CheckpointReport, RunStart, RunSummary, StepReport
from fullshard.variables import KEEP_VARIABLE


class ReachedSink(Sink):
    """Sink that notes how far the run has come, for the launcher's line and :func:`resume_again`."""

    def __init__(self) -> None:
        """Go on from the note of the attempt before, if there was one."""
        self._before = last_note(os.environ.get(KEEP_VARIABLE)) if attempt_number() else None
        self._reached = replace(self._before or Reached(0), attempt=attempt_number(), step=None)

    def _note(self, **changes: object) -> None:
        self._reached = replace(self._reached, **changes)
        note(self._reached)

    def start(self, run: RunStart) -> None:
        """Note the step that the run begins after.

        A later attempt may begin after a later step than the newest checkpoint's, that of a snapshot in memory, which
        is lost when the launcher ends; or after an earlier one, if that checkpoint is damaged.
        """
        step, before = run.resumed_step, self._before
        saved = step if before is None else min(step, before.saved)
        path = self._reached.path if before is not None and saved == before.saved else None
        self._note(step=step, saved=saved, path=path, finished=False)

    def step(self, report: StepReport) -> None:
        """Note the step."""
        self._note(step=report.step)

    def checkpoint(self, report: CheckpointReport) -> None:
        """Note the checkpoint."""
        self._note(saved=report.step, path=report.path)

    def finish(self, summary: RunSummary) -> None:
        """Note that the run is about to be marked as finished."""
        self._note(finished=True)


def resume_again(resume: str | Path) -> list[str]:
    """Return the setting with which a later attempt goes on where the one before came to; empty for a first attempt.

    Whatever ``resume`` says holds for the first attempt, and for later ones until the run has saved a checkpoint of its
    own: resume=never would delete that one.
    """
    reached = last_note(os.environ.get(KEEP_VARIABLE))
    if attempt_number() == 0 or reached is None:
        return []
    if reached.finished:  # lost after the mark of a finished run, which resume=auto refuses
        return [f"resume={reached.path or 'never'}"]
    # What an attempt that has begun resumes from is its newest checkpoint: resume=previous would skip that.
    return ["resume=auto"] if reached.path is not None or resume == "previous" else []
