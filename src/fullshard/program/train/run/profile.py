"""``training.profile``: traces of ``torch.profiler`` of some steps, one file a rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Self

from torch.profiler import ProfilerActivity, profile

from fullshard.core.comm import Comm, together_in_background
from fullshard.program.config import ProfileConfig

DIRECTORY = "profile"
"""Directory of the traces in the run's own."""


class StepProfiler:
    """Profiles the chosen steps on each rank; a context around all steps, which writes what an early end has left.

    Attributes:
        steps: Steps to profile, counted from 1; empty if there are none.
    """

    def __init__(
        self, settings: ProfileConfig | None, output_dir: Path, comm: Comm, written: Callable[[Path, str], None]
    ) -> None:
        """Profile nothing yet.

        ``written`` is called on every rank when all ranks have written: with the directory, and why a rank could not.
        """
        self.steps = range(0) if settings is None else range(settings.steps[0], settings.steps[1] + 1)
        self._directory = output_dir / DIRECTORY
        self._comm = comm
        self._written = written
        self._profile: profile | None = None

    def __enter__(self) -> Self:
        """Enter before the first step."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Stop after the last step; after an error nothing is written, as other ranks may be gone."""
        if kind is None:
            self.end()
        elif self._profile is not None:
            self._profile.stop()

    def begin(self, step: int) -> None:
        """Start before ``step`` is taken, if it is one of the steps."""
        if step in self.steps and self._profile is None:
            cuda = [ProfilerActivity.CUDA] if self._comm.device.type == "cuda" else []
            self._profile = profile(activities=[ProfilerActivity.CPU, *cuda])
            self._profile.start()

    def end(self, step: int | None = None) -> None:
        """Stop after ``step`` if it is the last one (None: in any case) and write the trace; every rank calls it."""
        running = self._profile
        if running is None or step not in (None, self.steps[-1]):
            return
        self._profile = None
        running.stop()
        problems = self._comm.all_gather_object(together_in_background(self._comm, lambda: self._write(running)))
        self._written(self._directory, next(filter(None, problems), ""))

    def _write(self, ended: profile) -> str:
        """Write this rank's trace; return why it could not be written, or nothing: training goes on without it."""
        path = self._directory / f"rank-{self._comm.rank}.pt.trace.json.gz"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            ended.export_chrome_trace(str(path))
        except (OSError, RuntimeError) as error:
            return f"{path} could not be written: {error}"
        return ""
