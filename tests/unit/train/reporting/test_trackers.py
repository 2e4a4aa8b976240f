"""Trackers are told what the run's own files say, go on with a run that goes on, and are missed by name."""

import sys
import types

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fullshard.errors import ConfigError
from fullshard.program.config import check_run
from fullshard.program.train.reporting import trackers
from fullshard.program.train.reporting.reports import CheckpointReport, RunStart, StepReport
from fullshard.program.train.reporting.trackers import tracker_sinks
from support.reports import made
from support.tiny_run import settings


def start_of(resumed_step=0):
    return made(RunStart, total_steps=5, resumed_step=resumed_step)


def step_of(step):
    numbers = dict.fromkeys(("epoch", "loss", "grad_norm", "learning_rate", "seconds"), 1.0 * step)
    return made(StepReport, step=step, tokens=6, **numbers)


def sink_of(tmp_path, tracker, say=print, **changes):
    values = settings(tmp_path, training__report_to=tracker, training__run_name="mine", **changes)
    config = check_run(values, tmp_path / "run.yaml")
    config.output_dir.mkdir(exist_ok=True)
    (sink,) = tracker_sinks(config, say)
    return sink


def tell(sink, resumed_step=0):
    sink.start(start_of(resumed_step))
    for step in range(resumed_step + 1, 6):
        sink.step(step_of(step))
    sink.checkpoint(CheckpointReport(4, "x", 1, 0.5, 0.25))
    sink.close()


class Wandb(types.ModuleType):
    """Remembers what it was told."""

    def __init__(self):
        super().__init__("wandb")
        self.begun, self.logged, self.ended = [], [], 0

    def init(self, **options):
        self.begun.append(options)
        return types.SimpleNamespace(
            id=options["id"] or "new-id",
            log=lambda values, step: self.logged.append((step, values)),
            finish=self.finish,
        )

    def finish(self):
        self.ended += 1


class MLflow(types.ModuleType):
    """Remembers what it was told."""

    def __init__(self):
        super().__init__("mlflow")
        self.begun, self.params, self.logged, self.ended = [], [], [], 0
        limits = types.SimpleNamespace(MAX_PARAM_VAL_LENGTH=6000, MAX_PARAMS_TAGS_PER_BATCH=100)
        self.utils = types.SimpleNamespace(validation=limits)

    def get_experiment(self, number):
        return types.SimpleNamespace(name=f"experiment {number}")

    def search_experiments(self, filter_string):
        return [types.SimpleNamespace(experiment_id=filter_string)]

    def start_run(self, **options):
        self.begun.append(options)
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id=options["run_id"] or "new-id"))

    def log_params(self, values):
        assert len(values) <= 100, "the server refuses more in one request"
        self.params.append(values)

    def log_metrics(self, values, step):
        self.logged.append((step, values))

    def end_run(self):
        self.ended += 1


def test_wandb_goes_on_with_the_run_that_goes_on(tmp_path, monkeypatch):
    wandb = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    sink = sink_of(tmp_path, "wandb", training__logging_steps=2)
    tell(sink)
    assert [step for step, values in wandb.logged if "train/loss" in values] == [2, 4, 5]
    assert wandb.logged[0][1]["train/tokens_per_second"] == 3.0
    assert (wandb.begun[0]["name"], wandb.begun[0]["id"], wandb.begun[0]["resume"]) == ("mine", None, None)
    assert wandb.begun[0]["config"]["seed"] == 3
    assert wandb.ended == 1
    steps = [step for step, _ in wandb.logged]
    assert steps == sorted(steps), "wandb drops what comes with a step that is over"
    assert "checkpoint/seconds" in wandb.logged[-1][1]
    tell(sink, resumed_step=3)
    assert (wandb.begun[1]["id"], wandb.begun[1]["resume"]) == ("new-id", "must")
    tell(sink)
    assert wandb.begun[2]["id"] is None, "a run that starts anew is another run"


def test_trackio_goes_on_with_the_run_that_goes_on(tmp_path, monkeypatch):
    """Its init has no id: it resumes the newest run of a name, which must be this one."""
    trackio, newest = Wandb(), ["first"]

    def init(**options):
        trackio.begun.append(options)
        own = {"log": lambda values, step: trackio.logged.append((step, values)), "finish": trackio.finish}
        return types.SimpleNamespace(id=newest[0], **own)

    monkeypatch.setattr(trackio, "init", init)
    monkeypatch.setitem(sys.modules, "trackio", trackio)
    sink = sink_of(tmp_path, "trackio", training__logging_steps=2)
    tell(sink)
    assert [step for step, values in trackio.logged if "train/loss" in values] == [2, 4, 5]
    tell(sink, resumed_step=3)
    tell(sink)
    assert [(run["name"], run["resume"]) for run in trackio.begun] == [
        ("mine", "never"),
        ("mine", "must"),
        ("mine", "never"),
    ]
    assert trackio.ended == 3
    newest[0] = "another"
    with pytest.raises(ConfigError, match=r"its run another and not this run's first\. Set training.run_name"):
        tell(sink, resumed_step=3)


def test_mlflow_gets_settings_once_and_goes_on_with_its_run(tmp_path, monkeypatch):
    mlflow = MLflow()
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    many = {"model_type": "t5", **{f"option_{number}": number for number in range(40)}}
    sink = sink_of(tmp_path, "mlflow", model={"config": many, "tokenizer": {}})
    tell(sink)
    told = {name: value for some in mlflow.params for name, value in some.items()}
    assert (told["training.learning_rate"], told["model.config.option_39"]) == (1e-2, 39)
    requests = len(mlflow.params)
    assert mlflow.logged[-1] == (4, {"checkpoint/seconds": 0.5, "checkpoint/stall_seconds": 0.25})
    tell(sink, resumed_step=2)
    assert [run["run_id"] for run in mlflow.begun] == [None, "new-id"]
    assert len(mlflow.params) == requests
    assert mlflow.ended == 2


@pytest.mark.parametrize(
    ("variables", "experiment"),
    [({}, "Default"), ({"MLFLOW_EXPERIMENT_NAME": "named"}, "named"), ({"MLFLOW_EXPERIMENT_ID": "7"}, "experiment 7")],
)
def test_mlflow_reports_to_the_experiment_of_its_variables(tmp_path, monkeypatch, variables, experiment):
    mlflow = MLflow()
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    sink_of(tmp_path, "mlflow").start(start_of())
    assert mlflow.begun[0]["experiment_id"] == f"name = '{experiment}'"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_reads_back_what_was_logged(tmp_path):
    sink = sink_of(tmp_path, "tensorboard")
    tell(sink)
    read = EventAccumulator(str(tmp_path / "out" / "tensorboard"))
    read.Reload()
    assert [(event.step, event.value) for event in read.Scalars("train/loss")] == [(n, float(n)) for n in range(1, 6)]


@pytest.mark.parametrize("tracker", ["wandb", "mlflow", "tensorboard", "trackio"])
def test_a_tracker_that_is_not_installed_is_named_before_the_run(tmp_path, monkeypatch, tracker):
    monkeypatch.setitem(sys.modules, tracker, None)
    with pytest.raises(ConfigError, match=f"training.report_to has {tracker}.*pip install {tracker}"):
        sink_of(tmp_path, tracker)


class Broken(Wandb):
    """Cannot be reached at some of its calls."""

    def __init__(self, broken):
        super().__init__()
        self.broken, self.calls = broken, 0

    def init(self, **options):
        run = super().init(**options)
        log = run.log

        def fail(values, step):
            self.calls += 1
            if self.calls in self.broken:
                raise ConnectionError("no route\nto host.")
            log(values, step)

        run.log = fail
        return run


def test_a_tracker_that_cannot_be_reached_is_told_of_once_and_the_run_goes_on(tmp_path, monkeypatch):
    broken, said = Broken({2, 3}), []
    monkeypatch.setitem(sys.modules, "wandb", broken)
    monkeypatch.setattr(trackers.time, "monotonic", lambda: 0.0)
    tell(sink_of(tmp_path, "wandb", said.append))
    assert [step for step, values in broken.logged if "train/loss" in values] == [1, 4, 5]
    metrics = tmp_path / "out" / "metrics.jsonl"
    assert said == [
        "warning: wandb could not log step 2: ConnectionError: no route to host. Training continues; "
        f"{metrics} has every line, and the lines that wandb lost are counted at the end.",
        f"warning: wandb lost 2 of 6 lines; {metrics} has all of them.",
    ]
    assert broken.ended == 1


def test_waiting_for_a_tracker_takes_at_most_a_tenth_of_the_run(tmp_path, monkeypatch):
    clock, asked, wandb = [0.0], [], Wandb()

    def time_out(values, step):
        asked.append(step)
        clock[0] += 2.0
        raise TimeoutError

    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setattr(wandb, "init", lambda **_: types.SimpleNamespace(id="x", log=time_out, finish=wandb.finish))
    monkeypatch.setattr(trackers.time, "monotonic", lambda: clock[0])
    sink = sink_of(tmp_path, "wandb", lambda line: None)
    sink.start(start_of())
    for step in range(1, 41):
        sink.step(step_of(step))
        clock[0] += 1.0
    assert asked == [1, 19, 37]


def test_a_tracker_that_does_not_start_or_close(tmp_path, monkeypatch):
    wandb, said = Wandb(), []
    monkeypatch.setitem(sys.modules, "wandb", wandb)

    def fail(**_options):
        raise ValueError("api_key not configured")

    monkeypatch.setattr(wandb, "init", fail)
    sink = sink_of(tmp_path, "wandb", said.append)
    with pytest.raises(ConfigError, match=r"has wandb, which could not start: ValueError: api_key not .*remove wandb"):
        sink.start(start_of())
    sink.close()
    assert said == []
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setattr(wandb, "finish", fail)
    tell(sink_of(tmp_path, "wandb", said.append))
    assert said == [
        f"warning: wandb could not close: ValueError: api_key not configured. {tmp_path / 'out' / 'metrics.jsonl'} has "
        "every line."
    ]


def test_the_last_step_of_a_run_that_ends_early_is_told(tmp_path, monkeypatch):
    wandb = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    sink = sink_of(tmp_path, "wandb", training__logging_steps=2)
    sink.start(start_of())
    for step in (1, 2, 3):
        sink.step(step_of(step))
    sink.close()
    assert [step for step, _ in wandb.logged] == [2, 3]
