"""``training.profile``: which steps are in the trace, and what becomes of the traced step."""

import gzip
import json

import pytest
from pydantic import ValidationError

from fullshard.program.config import RunConfig
from fullshard.program.train import train
from support.alone import alone
from support.tiny_run import QUICK, Memory, settings


def profiled(directory, steps):
    quick = QUICK | {"training__profile": {"steps": steps}, "training__eval_strategy": "no"}
    config = RunConfig.model_validate(settings(directory, **quick))
    memory = Memory()
    train(config, alone(), [memory])
    return memory, directory / "out" / "profile"


def optimizer_steps(path):
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return sum(event["name"] == "fullshard::optimizer_step (AdamW)" for event in events)


def test_the_trace_has_the_chosen_steps_and_another_step_is_recorded(tmp_path):
    memory, directory = profiled(tmp_path, [2, 3])
    assert [path.name for path in directory.iterdir()] == ["rank-0.pt.trace.json.gz"]
    assert optimizer_steps(directory / "rank-0.pt.trace.json.gz") == 2
    assert memory.profiles == [(directory, "")]
    assert memory.traces[0].step == 4  # of the first epoch, which has four


def test_a_run_that_ends_inside_the_steps_writes_what_it_has(tmp_path):
    _, directory = profiled(tmp_path, [7, 20])
    assert optimizer_steps(directory / "rank-0.pt.trace.json.gz") == 2


def test_a_run_whose_steps_are_all_profiled_records_none(tmp_path):
    memory, _ = profiled(tmp_path, [1, 8])
    assert len(memory.steps) == 8
    assert memory.traces == []


def test_a_trace_that_cannot_be_written_does_not_end_the_run(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "profile").write_text("a file where the directory would be")
    memory, directory = profiled(tmp_path, [2, 2])
    assert len(memory.steps) == 8
    assert memory.profiles[0][0] == directory
    assert "rank-0.pt.trace.json.gz" in memory.profiles[0][1]


@pytest.mark.parametrize("steps", [[4, 2], [0, 3], [1], 5])
def test_steps_that_are_no_range_are_refused(tmp_path, steps):
    with pytest.raises(ValidationError, match="steps"):
        RunConfig.model_validate(settings(tmp_path) | {"training": {"profile": {"steps": steps}}})
