"""Trackers of other projects as sinks: TensorBoard, Weights & Biases, MLflow, each needed only when it is asked for."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from fullshard.config import RunConfig
from fullshard.errors import ConfigError, UserError
from fullshard.storage import write_text
from fullshard.train.reporting.reports import CheckpointReport, EvaluationReport, RunStart, RunSummary, StepReport
from fullshard.train.reporting.sinks import METRICS_NAME, StepLog
from fullshard.train.reporting.trace import StepTrace

MOST_PARAMS = 100
"""More parameters in one request MLflow's server refuses."""

PAUSE_FACTOR = 9
"""A tracker that failed is left alone for so many times as long as that took: waiting for it takes at most a tenth of
the run."""


class Tracker(Protocol):
    """What this module needs of a tracker."""

    def start(self, run: RunStart) -> None:
        """The run begins, or goes on after ``run.resumed_step``."""
        ...

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Numbers by name, as they were after a step."""
        ...

    def close(self) -> None:
        """Write what is left; also called when the run has failed, and before ``start``."""
        ...


class TrackerSink:
    """Tells a tracker of steps and evaluations, under the names that Hugging Face's Trainer uses.

    Once the run has begun, a tracker that fails does not end it: that is said once, and at the end what was lost.
    """

    def __init__(
        self, name: str, tracker: Tracker, config: RunConfig, say: Callable[[str], None] = lambda line: None
    ) -> None:
        """Tell ``tracker`` of every ``logging_steps``-th step and of every evaluation; ``say`` is told of failures."""
        self._name = name
        self._tracker = tracker
        self._say = say
        self._metrics = Path(config.output_dir, METRICS_NAME)
        self._log = StepLog(config.training.logging_steps)
        self._lines = self._lost = 0
        self._pause_until = 0.0

    def start(self, run: RunStart) -> None:
        """Begin.

        Raises:
            ConfigError: The tracker cannot: nothing is lost yet, and whoever asked for it is still there.
        """
        self._log.start(run)
        try:
            self._tracker.start(run)
        except UserError:
            raise
        except Exception as error:  # a tracker raises what it likes
            raise ConfigError(
                f"training.report_to names {self._name}, which does not start: {_shown(error)}. Mend its settings or "
                "the connection, or leave it out."
            ) from error

    def step(self, report: StepReport) -> None:
        """Log the step, if it is one that is logged."""
        if self._log.due(report):
            self._tell_step(report)

    def _tell_step(self, report: StepReport) -> None:
        values = {
            "train/loss": report.loss,
            "train/grad_norm": report.grad_norm,
            "train/learning_rate": report.learning_rate,
            "train/epoch": report.epoch,
            "train/tokens_per_second": report.tokens_per_second,
            "train/memory_bytes": float(report.memory_bytes),
        }
        self._tell(values, report.step)

    def evaluating(self, done: int, total: int) -> None:
        """Nothing: trackers show no progress within an evaluation."""

    def evaluation(self, report: EvaluationReport, *, is_best: bool) -> None:
        """Log the loss and every metric."""
        values = {f"eval/{name}": value for name, value in report.metrics.items()}
        self._tell({"eval/loss": report.loss, **values, "eval/is_best": float(is_best)}, report.step)

    def checkpoint(self, report: CheckpointReport) -> None:
        """Log how long it took, and for how long training stood still."""
        values = {"checkpoint/seconds": report.seconds, "checkpoint/stall_seconds": report.stall_seconds}
        self._tell(values, report.step)

    def trace(self, trace: StepTrace) -> None:
        """Nothing: ``fullshard report`` draws it."""

    def finish(self, summary: RunSummary) -> None:
        """Nothing: the last evaluation has been logged."""

    def close(self) -> None:
        """Log the last step, if it has not been, let the tracker write what is left, and say what it lost."""
        if (rest := self._log.rest()) is not None:
            self._tell_step(rest)
        try:
            self._tracker.close()
        except Exception as error:
            self._say(f"warning: {self._name} did not close: {_shown(error)}. {self._metrics} has every line.")
        if self._lost:
            self._say(f"warning: {self._name} lost {self._lost:,} of {self._lines:,} lines; {self._metrics} has all.")

    def _tell(self, values: Mapping[str, float], step: int) -> None:
        """Log a line; where that fails, or failed just now, it is lost."""
        self._lines += 1
        began = time.monotonic()
        if began < self._pause_until:
            self._lost += 1
            return
        try:
            self._tracker.log(values, step)
        except Exception as error:
            if not self._lost:
                self._say(
                    f"warning: {self._name} could not be told of step {step:,}: {_shown(error)}. Training goes on; "
                    f"{self._metrics} has every line, and what {self._name} lost is counted at the end."
                )
            self._lost += 1
            ended = time.monotonic()
            self._pause_until = ended + PAUSE_FACTOR * (ended - began)


def tracker_sinks(config: RunConfig, say: Callable[[str], None] = lambda line: None) -> list[TrackerSink]:
    """A sink for each tracker of ``training.report_to``; on rank 0.

    Args:
        config: The run's settings.
        say: Told in a line of a tracker that fails, and of what it lost.

    Raises:
        ConfigError: A tracker is not installed.
    """
    made = {"tensorboard": _TensorBoard, "wandb": _WandB, "mlflow": _MLflow}
    return [TrackerSink(name, made[name](config), config, say) for name in config.training.report_to]


class _TensorBoard:
    """Event files in ``output_dir/tensorboard``."""

    def __init__(self, config: RunConfig) -> None:
        _require("tensorboard")
        self._module = importlib.import_module("torch.utils.tensorboard")
        self._directory = Path(config.output_dir, "tensorboard")
        self._writer: Any = None

    def start(self, run: RunStart) -> None:
        # What a killed run logged after its checkpoint is left out when the run goes on.
        self._writer = self._module.SummaryWriter(str(self._directory), purge_step=run.resumed_step + 1)

    def log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class _WandB:
    """A run of Weights & Biases, the same one when the run goes on."""

    def __init__(self, config: RunConfig) -> None:
        self._module: Any = _require("wandb")
        self._config = config
        self._run: Any = None
        self._step = 0

    def start(self, run: RunStart) -> None:
        known = _known_id(self._config, "wandb", run)
        self._run = self._module.init(
            project="fullshard",
            name=_name(self._config),
            id=known,
            dir=str(self._config.output_dir),
            config=dict(self._config.as_plain()),
            resume="must" if known else None,
        )
        _remember_id(self._config, "wandb", self._run.id)

    def log(self, values: Mapping[str, float], step: int) -> None:
        # A checkpoint of an earlier step may be told of: wandb drops what comes with a step that is over.
        self._step = max(self._step, step)
        self._run.log(dict(values), step=self._step)

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()


class _MLflow:
    """A run of MLflow, at the tracking server that its own environment variables name; the same one when it goes on."""

    def __init__(self, config: RunConfig) -> None:
        self._module: Any = _require("mlflow")
        self._config = config
        self._started = False

    def start(self, run: RunStart) -> None:
        known = _known_id(self._config, "mlflow", run)
        started = self._module.start_run(run_id=known, run_name=None if known else _name(self._config))
        self._started = True
        _remember_id(self._config, "mlflow", started.info.run_id)
        if known is None:
            params = list(self._config.as_flat().items())
            for start in range(0, len(params), MOST_PARAMS):
                self._module.log_params(dict(params[start : start + MOST_PARAMS]))

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._module.log_metrics(dict(values), step=step)

    def close(self) -> None:
        if self._started:
            self._module.end_run()


def _shown(error: Exception) -> str:
    """An error on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split()).rstrip('.')}"


def _known_id(config: RunConfig, tracker: str, run: RunStart) -> str | None:
    """The tracker's id of the run that this one goes on; None when it starts anew."""
    path = _id_path(config, tracker)
    return path.read_text(encoding="utf-8") if run.resumed_step and path.exists() else None


def _remember_id(config: RunConfig, tracker: str, identity: str) -> None:
    write_text(_id_path(config, tracker), identity)


def _id_path(config: RunConfig, tracker: str) -> Path:
    return Path(config.output_dir, f"{tracker}.id")


def _require(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"training.report_to names {name}, which is not installed ({error}): pip install {name}, or leave it out."
        ) from error


def _name(config: RunConfig) -> str:
    return config.training.run_name or Path(config.output_dir).name
