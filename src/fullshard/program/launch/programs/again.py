"""Progress that a training run records for its next attempt, and from where that one resumes."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

from fullshard.program.launch.attempts import Reached, attempt_number, last_note, note, recovery
from fullshard.program.launch.messages import say
from fullshard.program.train import Sink
from fullshard.program.train.reporting.reports import CheckpointReport, RunStart, RunSummary, StepReport
from fullshard.variables import SCRATCH_VARIABLE


class ReachedSink(Sink):
    """Sink that records the run's progress, for the launcher's report and :func:`resume_again`."""

    def __init__(self, began_s: float) -> None:
        """Continue from the previous attempt's record, if there is one; ``began_s``: Unix time of the first line."""
        self._began_s = began_s
        self._restored_s: float | None = None  # None in a first attempt, and after its first step in a later one
        self._before = last_note(os.environ.get(SCRATCH_VARIABLE))  # the launcher's directory is new in a first attempt
        self._reached = replace(self._before or Reached(0), attempt=attempt_number(), step=None)

    def _note(self, **changes: object) -> None:
        self._reached = replace(self._reached, **changes)
        note(self._reached)

    def start(self, run: RunStart) -> None:
        """Record the step that the run begins after.

        A later attempt may begin after a later step than the newest checkpoint's, that of a snapshot in memory, which
        is lost when the launcher ends; or after an earlier one, if that checkpoint is damaged.
        """
        step, before = run.resumed_step, self._before
        saved = step if before is None else min(step, before.saved)
        path = self._reached.path if before is not None and saved == before.saved else None
        self._note(step=step, began=step, saved=saved, path=path, finished=False)
        self._restored_s = None if before is None else time.time()

    def step(self, report: StepReport) -> None:
        """Record the step; after the first one of a later attempt, report the time without steps."""
        self._note(step=report.step)
        if self._restored_s is not None:
            lost = recovery(self._began_s, self._restored_s)
            self._restored_s = None
            if lost is not None:
                say(f"step {report.step:,} was done {lost.text()}")

    def checkpoint(self, report: CheckpointReport) -> None:
        """Record the checkpoint."""
        self._note(saved=report.step, path=report.path)

    def finish(self, summary: RunSummary) -> None:
        """Record that the run is about to be marked as finished."""
        self._note(finished=True)

    def tell(self, text: str) -> None:
        """Print the summary of ``--json``, unless an earlier attempt has: a rank may be lost after that."""
        if not self._reached.told:
            print(text, flush=True)
            self._note(told=True)


def resume_again(resume: str | Path) -> list[str]:
    """Return the setting with which a later attempt continues the previous one; empty for a first attempt.

    Whatever ``resume`` says holds for the first attempt, and for later ones until the run has saved a checkpoint of its
    own: resume=never would delete that one.
    """
    reached = last_note(os.environ.get(SCRATCH_VARIABLE))
    if reached is None:
        return []
    if reached.finished:  # lost after the run was marked as finished, which resume=auto would refuse
        return [f"resume={reached.path or 'never'}"]
    # An attempt that has begun resumes from its newest checkpoint; resume=previous would skip it.
    return ["resume=auto"] if reached.path is not None or resume == "previous" else []
