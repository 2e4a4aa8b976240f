"""``training.push_to_hub``: background uploads of a run that cannot delay, end or damage it; rank 0 only."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from threading import Condition, Thread

from fullshard.program.config import RunConfig
from fullshard.program.config.training import PushConfig
from fullshard.program.sharing.contents import File, contents_of, model_files
from fullshard.program.sharing.hub import Upload, upload
from fullshard.program.train import Sink
from fullshard.program.train.evaluation.trained import BEST_NAME
from fullshard.program.train.reporting.reports import EvaluationReport, RunStart, RunSummary

Say = Callable[[str], None]

WAITING_NAME = "push"
"""Directory in ``output_dir`` for models that wait for their upload."""


def share_command(directory: Path, push: PushConfig) -> str:
    """Return the command that uploads a finished run as ``training.push_to_hub`` does."""
    return f"fullshard share {directory} --repo {push.repo}{' --private' if push.private else ''}"


def push_finished(config: RunConfig, say: Say) -> None:
    """Upload a finished run; a failure is reported and does not fail the run."""
    push = config.training.push_to_hub
    if push is None:
        return
    directory = Path(config.output_dir)
    try:
        contents = contents_of(directory, push.repo)
        say(f"uploading to {push.repo}: {len(contents.files)} files, {contents.nbytes:,} bytes")
        done = upload(Upload(push.repo, contents.files, f"Model of {directory.name}", push.private))
    except Exception as error:  # whatever it is, the model is in output_dir
        say(f"warning: the model was not uploaded: {error}")
        say(f"the run is complete; to upload it: {share_command(directory, push)}")
        return
    say(f"model uploaded to {done.url}")


class PushSink(Sink):
    """Sink that uploads each new best model in the background, one at a time."""

    def __init__(self, config: RunConfig, say: Say) -> None:
        """Upload from ``config.output_dir``; failures are passed to ``say``."""
        assert config.training.push_to_hub is not None, "there is a repository"
        self._push = config.training.push_to_hub
        self._directory = Path(config.output_dir)
        self._say = say
        self._changed = Condition()
        self._next: Path | None = None
        self._ended = False
        self._thread: Thread | None = None

    def start(self, run: RunStart) -> None:
        """Delete what a killed run left, and start the upload thread."""
        shutil.rmtree(self._directory / WAITING_NAME, ignore_errors=True)
        # A daemon thread: a run that is stopped must not wait for the network.
        self._thread = Thread(target=self._work, name="push_to_hub", daemon=True)
        self._thread.start()

    def evaluation(self, report: EvaluationReport, *, is_best: bool) -> None:
        """Queue the new best model: hard links keep its files when the next best one replaces them."""
        if not is_best:
            return
        waiting = self._directory / WAITING_NAME / f"step-{report.step:08d}"
        best = self._directory / BEST_NAME
        try:
            for path in model_files(best):
                target = waiting / path.relative_to(best)
                target.parent.mkdir(parents=True, exist_ok=True)
                os.link(path, target)
        except OSError as error:
            self._say(f"warning: the model of step {report.step:,} is not uploaded: {error}. The last one will be.")
            return
        with self._changed:
            skipped, self._next = self._next, waiting
            self._changed.notify()
        if skipped is not None:
            shutil.rmtree(skipped, ignore_errors=True)

    def finish(self, summary: RunSummary) -> None:
        """Drop the queued model: the finished run is uploaded next."""
        self._end()

    def close(self) -> None:
        """Drop the queued model; an upload under way is left to its thread."""
        self._end()

    def join(self) -> None:
        """Wait for the upload under way: of two simultaneous commits the Hub refuses one."""
        if self._thread is not None and self._thread.is_alive():
            self._say(f"waiting for the upload under way to {self._push.repo}")
            self._thread.join()
        shutil.rmtree(self._directory / WAITING_NAME, ignore_errors=True)

    def _end(self) -> None:
        with self._changed:
            self._ended, self._next = True, None
            self._changed.notify()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._ended or self._next is not None)
                if self._ended:
                    return
                path, self._next = self._next, None
            assert path is not None, "waited for one"
            self._send(path)
            shutil.rmtree(path, ignore_errors=True)

    def _send(self, path: Path) -> None:
        step = int(path.name.rpartition("-")[2])
        try:
            files = tuple(File(one.relative_to(path).as_posix(), one, one.stat().st_size) for one in model_files(path))
            upload(Upload(self._push.repo, files, f"Best model so far, after step {step:,}", self._push.private))
        except Exception as error:  # whatever it is, training continues
            self._say(f"warning: the model of step {step:,} was not uploaded: {error} Training continues.")
