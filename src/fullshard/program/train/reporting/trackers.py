"""Trackers as one sink: TensorBoard, Weights & Biases, MLflow, Trackio, by Accelerate's classes.

Each tracker's package is needed only if it is requested.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from accelerate import tracking
from transformers.utils import logging

from fullshard.errors import ConfigError, UserError
from fullshard.program.config import RunConfig
from fullshard.program.train.reporting.reports import CheckpointReport, EvaluationReport, RunStart, StepReport
from fullshard.program.train.reporting.sinks import METRICS_NAME, Sink, StepLog
from fullshard.state.storage import write_text

PAUSE_FACTOR = 9
"""A tracker that failed is not called for this multiple of the time of the failed call, so that waiting for it takes
at most a tenth of the run."""

# Accelerate's own logger needs its PartialState, which would choose this rank's device and number of threads again.
tracking.logger = logging.get_logger(tracking.__name__)  # type: ignore[assignment]


class TrackerSink(Sink):
    """Sink that logs steps and evaluations to a tracker, under the names that Hugging Face's Trainer uses.

    A tracker that cannot start ends the run. One that fails later is reported once and ignored; at the end the
    number of lost lines is reported.
    """

    def __init__(self, name: str, config: RunConfig, say: Callable[[str], None] = lambda line: None) -> None:
        """Log every ``logging_steps``-th step and every evaluation; ``say`` receives the tracker's failures.

        Raises:
            ConfigError: The tracker is not installed.
        """
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise ConfigError(
                f"training.report_to has {name}, which is not installed ({error}): pip install {name}, or remove it."
            ) from error
        self._name = name
        self._config = config
        self._say = say
        self._tracker: Any = None
        self._metrics = Path(config.output_dir, METRICS_NAME)
        self._log = StepLog(config.training.logging_steps)
        self._lines = self._lost = self._last = 0
        self._pause_until = 0.0

    def start(self, run: RunStart) -> None:
        """Start the tracker.

        Raises:
            ConfigError: The tracker cannot start. Nothing is lost yet, and the user can still change the settings.
        """
        self._log.start(run)
        try:
            self._start(run)
        except UserError:
            raise
        except Exception as error:  # a tracker may raise anything
            raise ConfigError(
                f"training.report_to has {self._name}, which could not start: {_error_text(error)}. Correct its "
                f"settings or the connection, or remove {self._name} from report_to."
            ) from error

    def _start(self, run: RunStart) -> None:
        """Start the tracker; a resumed run continues the tracked run whose id is in ``output_dir``."""
        name, file = self._name, Path(self._config.output_dir, f"{self._name}.id")
        known = file.read_text(encoding="utf-8") if run.resumed_step and file.exists() else None
        tracker: Any = tracking.LOGGER_TYPE_TO_CLASS[name](**_arguments(name, self._config, run, known))
        tracker.main_process_only = False  # there is a sink on rank 0 only
        tracker.start()
        self._tracker = tracker
        if name == "tensorboard":
            return
        tracked = tracker.tracker.info.run_id if name == "mlflow" else tracker.tracker.id
        if known not in (None, tracked):  # trackio resumes the newest run of a name
            raise ConfigError(
                f"training.report_to has {name}, which continues its run {tracked} and not this run's {known}. Set "
                f"training.run_name to another name to report to a new run, or remove {name} from report_to."
            )
        write_text(file, tracked)
        if name == "mlflow" and known is None:
            tracker.store_init_configuration(dict(self._config.as_flat()))

    def step(self, report: StepReport) -> None:
        """Log the step if it is due for logging."""
        if self._log.due(report):
            self._log_step(report)

    def _log_step(self, report: StepReport) -> None:
        values = {
            "train/loss": report.loss,
            "train/grad_norm": report.grad_norm,
            "train/learning_rate": report.learning_rate,
            **({} if report.router_loss is None else {"train/router_loss": report.router_loss}),
            **{f"train/{name}": value for name, value in report.rewards.items()},
            "train/epoch": report.epoch,
            "train/tokens_per_second": report.tokens_per_second,
            "train/memory_bytes": float(report.memory_bytes),
        }
        self._try_log(values, report.step)

    def evaluation(self, report: EvaluationReport, *, is_best: bool) -> None:
        """Log the loss and every metric, also of each set of a mixture."""
        values = {f"eval/{name}": value for name, value in report.metrics.items()}
        for name, one in report.sets.items():
            found = {"loss": one["loss"], **one["metrics"]}
            values |= {f"eval/{name}/{key}": value for key, value in found.items()}
        self._try_log({"eval/loss": report.loss, **values, "eval/is_best": float(is_best)}, report.step)

    def checkpoint(self, report: CheckpointReport) -> None:
        """Log the duration of the save, and how long it blocked training."""
        values = {"checkpoint/seconds": report.seconds, "checkpoint/stall_seconds": report.stall_seconds}
        self._try_log(values, report.step)

    def close(self) -> None:
        """Log the last step if it was not logged, close the tracker, and report how many lines it lost."""
        if (rest := self._log.rest()) is not None:
            self._log_step(rest)
        try:
            if self._tracker is not None:
                self._tracker.finish()
        except Exception as error:
            self._say(f"warning: {self._name} could not close: {_error_text(error)}. {self._metrics} has every line.")
        if self._lost:
            self._say(
                f"warning: {self._name} lost {self._lost:,} of {self._lines:,} lines; {self._metrics} has all of them."
            )

    def _try_log(self, values: Mapping[str, float], step: int) -> None:
        """Log a line; it is lost if that fails or failed shortly before."""
        self._lines += 1
        # A checkpoint may be reported after a later step: wandb drops lines with a step lower than the last one.
        self._last = step = max(self._last, step) if self._name == "wandb" else step
        began = time.monotonic()
        if began < self._pause_until:
            self._lost += 1
            return
        try:
            self._tracker.log(dict(values), step=step)
        except Exception as error:
            if not self._lost:
                self._say(
                    f"warning: {self._name} could not log step {step:,}: {_error_text(error)}. Training continues; "
                    f"{self._metrics} has every line, and the lines that {self._name} lost are counted at the end."
                )
            self._lost += 1
            ended = time.monotonic()
            self._pause_until = ended + PAUSE_FACTOR * (ended - began)


def tracker_sinks(config: RunConfig, say: Callable[[str], None] = lambda line: None) -> list[TrackerSink]:
    """Return a sink for each tracker of ``training.report_to``; on rank 0.

    ``say`` receives a line if a tracker fails, and one with the number of lines it lost.

    Raises:
        ConfigError: A tracker is not installed.
    """
    return [TrackerSink(name, config, say) for name in config.training.report_to]


def _arguments(name: str, config: RunConfig, run: RunStart, known: str | None) -> dict[str, Any]:
    """Return what Accelerate's class of a tracker gets; ``known`` is the id of the tracked run to continue."""
    title = config.training.run_name or Path(config.output_dir).name
    if name == "tensorboard":
        # Lines that a killed run logged after its checkpoint are hidden: the resumed run logs them again.
        return {"run_name": name, "logging_dir": str(config.output_dir), "purge_step": run.resumed_step + 1}
    if name == "mlflow":  # the class reads MLFLOW_EXPERIMENT_NAME, but not the id
        number = os.environ.get("MLFLOW_EXPERIMENT_ID")
        experiment = importlib.import_module(name).get_experiment(number).name if number else "Default"
        return {"experiment_name": experiment, "run_id": known, "run_name": None if known else title}
    wanted = {"run_name": "fullshard", "name": title, "config": dict(config.as_plain())}
    if name == "trackio":
        return wanted | {"resume": "must" if known else "never", "embed": False}
    return wanted | {"id": known, "dir": str(config.output_dir), "resume": "must" if known else None}


def _error_text(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split()).rstrip('.')}"
