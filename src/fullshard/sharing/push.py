"""``training.push_to_hub``: uploads of a run, which never delay, end or damage it; on rank 0 only."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from threading import Condition, Thread

from fullshard.config import RunConfig
from fullshard.config.training import PushConfig
from fullshard.sharing.contents import File, contents_of, model_files
from fullshard.sharing.hub import Upload, upload
from fullshard.train import Sink
from fullshard.train.evaluation.trained import BEST_NAME
from fullshard.train.reporting.reports import EvaluationReport, RunStart, RunSummary

Say = Callable[[str], None]

WAITING_NAME = "push"
"""Directory in ``output_dir`` with the models that wait for their upload."""


def share_command(directory: Path, push: PushConfig) -> str:
    """Return the command that uploads a finished run as ``training.push_to_hub`` does."""
    return f"fullshard share {directory} --repo {push.repo}{' --private' if push.private else ''}"


def push_finished(config: RunConfig, say: Say) -> None:
    """Upload a finished run; a failure is said, and does not fail the run."""
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
    """Sink that uploads each model that is the best so far, one at a time in the background."""

    def __init__(self, config: RunConfig, say: Say) -> None:
        """Upload from ``config.output_dir``; ``say`` receives the failures."""
        assert config.training.push_to_hub is not None, "there is a repository"
        self._push = config.training.push_to_hub
        self._directory = Path(config.output_dir)
        self._say = say
        self._changed = Condition()
        self._next: Path | None = None
        self._ended = False
        self._thread: Thread | None = None

    def start(self, run: RunStart) -> None:
        """Delete what a killed run left, and start the thread."""
        shutil.rmtree(self._directory / WAITING_NAME, ignore_errors=True)
        # A daemon: a run that is stopped does not wait for the network.
        self._thread = Thread(target=self._work, name="push_to_hub", daemon=True)
        self._thread.start()

    def evaluation(self, report: EvaluationReport, *, is_best: bool) -> None:
        """Note the best model: its files get a second name, which the next best one leaves alone."""
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
        """Leave out what still waits: the finished run is uploaded next."""
        self._end()

    def close(self) -> None:
        """Leave out what still waits; what is being sent is left to the thread."""
        self._end()

    def join(self) -> None:
        """Wait for the upload that is being sent: two commits at once would refuse each other."""
        if self._thread is not None and self._thread.is_alive():
            self._say(f"waiting for the model that is being sent to {self._push.repo}")
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
