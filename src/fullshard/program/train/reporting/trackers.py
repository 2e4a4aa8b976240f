"""Trackers as sinks: TensorBoard, Weights & Biases, MLflow, Trackio; each package is needed only if it is requested."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from fullshard.errors import ConfigError, UserError
from fullshard.program.config import RunConfig
from fullshard.program.train.reporting.reports import CheckpointReport, EvaluationReport, RunStart, StepReport
from fullshard.program.train.reporting.sinks import METRICS_NAME, Sink, StepLog
from fullshard.state.storage import write_text

MOST_PARAMS = 100
"""Maximum number of parameters that MLflow's server accepts in one request."""

PAUSE_FACTOR = 9
"""A tracker that failed is not called for this multiple of the time of the failed call, so that waiting for it takes
at most a tenth of the run."""


class Tracker(Protocol):
    """Interface of a tracker."""

    def start(self, run: RunStart) -> None:
        """Start a run, or continue the tracked run after ``run.resumed_step``."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log the values after a step, by name."""

    def close(self) -> None:
        """Write pending values; also called if the run has failed, and without ``start``."""


class TrackerSink(Sink):
    """Sink that logs steps and evaluations to a tracker, under the names that Hugging Face's Trainer uses.

    A tracker that cannot start ends the run. One that fails later is reported once and ignored; at the end the
    number of lost lines is reported.
    """

    def __init__(
        self, name: str, tracker: Tracker, config: RunConfig, say: Callable[[str], None] = lambda line: None
    ) -> None:
        """Log every ``logging_steps``-th step and every evaluation to ``tracker``; ``say`` receives its failures."""
        self._name = name
        self._tracker = tracker
        self._say = say
        self._metrics = Path(config.output_dir, METRICS_NAME)
        self._log = StepLog(config.training.logging_steps)
        self._lines = self._lost = 0
        self._pause_until = 0.0

    def start(self, run: RunStart) -> None:
        """Start the tracker.

        Raises:
            ConfigError: The tracker cannot start. Nothing is lost yet, and the user can still change the settings.
        """
        self._log.start(run)
        try:
            self._tracker.start(run)
        except UserError:
            raise
        except Exception as error:  # a tracker may raise anything
            raise ConfigError(
                f"training.report_to has {self._name}, which could not start: {_error_text(error)}. Correct its "
                f"settings or the connection, or remove {self._name} from report_to."
            ) from error

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
            self._tracker.close()
        except Exception as error:
            self._say(f"warning: {self._name} could not close: {_error_text(error)}. {self._metrics} has every line.")
        if self._lost:
            self._say(
                f"warning: {self._name} lost {self._lost:,} of {self._lines:,} lines; {self._metrics} has all of them."
            )

    def _try_log(self, values: Mapping[str, float], step: int) -> None:
        """Log a line; it is lost if that fails or failed shortly before."""
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
    made = {"tensorboard": _TensorBoard, "wandb": _WandB, "mlflow": _MLflow, "trackio": _Trackio}
    return [TrackerSink(name, made[name](config), config, say) for name in config.training.report_to]


class _TensorBoard:
    """Event files in ``output_dir/tensorboard``."""

    def __init__(self, config: RunConfig) -> None:
        _require("tensorboard")
        self._module = importlib.import_module("torch.utils.tensorboard")
        self._directory = Path(config.output_dir, "tensorboard")
        self._writer: Any = None

    def start(self, run: RunStart) -> None:
        # Lines that a killed run logged after its checkpoint are hidden: the resumed run logs them again.
        self._writer = self._module.SummaryWriter(str(self._directory), purge_step=run.resumed_step + 1)

    def log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class _Remote:
    """A tracker whose runs have ids: a resumed run continues the one whose id is in ``output_dir``."""

    def __init__(self, name: str, config: RunConfig) -> None:
        self._module: Any = _require(name)
        self._config = config
        self._id = Path(config.output_dir, f"{name}.id")
        self._name = config.training.run_name or Path(config.output_dir).name

    def _known(self, run: RunStart) -> str | None:
        return self._id.read_text(encoding="utf-8") if run.resumed_step and self._id.exists() else None


class _WandB(_Remote):
    """A run of Weights & Biases."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__("wandb", config)
        self._run: Any = None
        self._step = 0

    def start(self, run: RunStart) -> None:
        known = self._known(run)
        self._run = self._module.init(
            project="fullshard",
            name=self._name,
            id=known,
            dir=str(self._config.output_dir),
            config=dict(self._config.as_plain()),
            resume="must" if known else None,
        )
        write_text(self._id, self._run.id)

    def log(self, values: Mapping[str, float], step: int) -> None:
        # A checkpoint may be reported after a later step: wandb drops lines with a step lower than the last one.
        self._step = max(self._step, step)
        self._run.log(dict(values), step=self._step)

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()


class _MLflow(_Remote):
    """A run of MLflow, at the server that its environment variables name."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__("mlflow", config)
        self._started = False

    def start(self, run: RunStart) -> None:
        known = self._known(run)
        started = self._module.start_run(run_id=known, run_name=None if known else self._name)
        self._started = True
        write_text(self._id, started.info.run_id)
        if known is None:
            params = list(self._config.as_flat().items())
            for start in range(0, len(params), MOST_PARAMS):
                self._module.log_params(dict(params[start : start + MOST_PARAMS]))

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._module.log_metrics(dict(values), step=step)

    def close(self) -> None:
        if self._started:
            self._module.end_run()


class _Trackio(_Remote):
    """A run of Trackio, on this machine or where its environment variables say."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__("trackio", config)
        self._run: Any = None

    def start(self, run: RunStart) -> None:
        known, resume = self._known(run), "must" if run.resumed_step and self._id.exists() else "never"
        settings = dict(self._config.as_plain())
        self._run = self._module.init(project="fullshard", name=self._name, config=settings, resume=resume, embed=False)
        if known is not None and self._run.id != known:  # it resumes the newest run of a name
            raise ConfigError(
                f"training.report_to has trackio, whose newest run named {self._name} is another one. Set "
                "training.run_name to another name to report to a new run, or remove trackio from report_to."
            )
        write_text(self._id, self._run.id)

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()


def _error_text(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split()).rstrip('.')}"


def _require(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"training.report_to has {name}, which is not installed ({error}): pip install {name}, or remove it."
        ) from error
