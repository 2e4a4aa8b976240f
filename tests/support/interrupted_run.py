"""A small run that is stopped or killed at a given place, and what it leaves behind."""

import json
import threading

import pytest

from fullshard.core.testing import run_ranks
from fullshard.errors import RunStopped
from fullshard.program.config import RunConfig
from fullshard.program.train import FileSink, StopRequest, train
from support.tiny_run import QUICK, Memory, read_jsonl, settings

STEPS = 8
SMALL = QUICK | {
    "data__max_train_samples": 13,
    "training__per_device_train_batch_size": 2,
    "training__per_device_eval_batch_size": 4,
}
"""Four steps an epoch, the last one of a single row; dropout is on."""


class Director(Memory):
    """Does something when the run has come to a place, such as ("step", 3)."""

    def __init__(self, place, action):
        super().__init__()
        self.place, self.action = place, action

    def step(self, report):
        super().step(report)
        self.act("step", report.step)

    def evaluating(self, done, total):
        self.act("evaluating", self.steps[-1].step if self.steps else None)

    def evaluation(self, report, *, is_best):
        super().evaluation(report, is_best=is_best)
        self.act("evaluation", report.step)

    def act(self, *place):
        if place == self.place:
            self.action()


class KilledError(Exception):
    """What a kill is here: nothing more of this run happens."""


def kill():
    raise KilledError


def run(directory, *sinks, stop=None, ranks=1, **changes):
    """Train, and return what a sink was told last."""
    config = RunConfig.model_validate(settings(directory, **SMALL | changes))
    memory = Memory()

    def work(comm):
        mine = [FileSink(config.output_dir), memory, *sinks] if comm.rank == 0 else []
        return train(config, comm, mine, stop if comm.rank == 0 else None)

    try:
        run_ranks(ranks, work)
    finally:
        for thread in threading.enumerate():  # a real kill would end the writer too; here it may finish
            if thread.name == "fullshard-save":
                thread.join()
    return memory


def run_until_stopped(directory, place, **changes):
    """Ask to stop at a place; returns where the run left."""
    stop = StopRequest()
    director = Director(place, lambda: setattr(stop, "requested", True))
    stop.requested = place is None
    with pytest.raises(RunStopped) as stopped:
        run(directory, director, stop=stop, **changes)
    assert director.closed == 1
    assert not (directory / "out" / "summary.json").exists()
    return stopped.value


def run_until_killed(directory, place, **changes):
    with pytest.raises(KilledError):
        run(directory, Director(place, kill), **changes)


def files(directory):
    """The content of every file but the lock, in which a run says that it holds it."""
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file() and path.name != "lock"}


TIMES = ("seconds", "tokens_per_second", "memory_bytes", "memory_bytes_per_rank")


def without_times(record):
    return {name: value for name, value in record.items() if not name.endswith(TIMES)}


def metrics(directory):
    """What the run was, without times: each step and each evaluation."""
    records = read_jsonl(directory / "out" / "metrics.jsonl")
    return [without_times(record) for record in records if record["kind"] != "checkpoint"]


def assert_same(directory, reference):
    """Two finished runs: metrics, predictions, models to the byte, and the summary but for times and memory."""
    ours, theirs = directory / "out", reference / "out"
    assert metrics(directory) == metrics(reference)
    assert (ours / "predictions.jsonl").read_text() == (theirs / "predictions.jsonl").read_text()
    for model in ("model.safetensors", "best/model.safetensors"):
        assert (ours / model).read_bytes() == (theirs / model).read_bytes()
    summaries = [without_times(json.loads((out / "summary.json").read_text())) for out in (ours, theirs)]
    for summary in summaries:
        del summary["memory"], summary["config"], summary["peak_bytes_per_rank"], summary["output_dir"]
    assert summaries[0] == summaries[1]
    assert not list(ours.glob("best.*"))


OFTEN = {"training__eval_strategy": "steps", "training__eval_steps": 2}


def before(number):
    """The place just before a step: after the one before it and, if there is one, its evaluation."""
    if number == 1:
        return None
    return ("evaluation" if number % 2 else "step", number - 1)
