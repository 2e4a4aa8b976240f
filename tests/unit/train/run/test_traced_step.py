"""A traced step: the timeline adds up to what the allocator counted, and survives JSON."""

import json

import pytest
import torch

from fullshard import fully_shard, memory_summary
from fullshard.core.comm import SoloComm
from fullshard.core.engine.setup import wrap
from fullshard.core.engine.step.recorder import StepRecorder
from fullshard.program.train.reporting.reports import StepReport, StepTrace
from fullshard.program.train.run import step as step_module
from fullshard.program.train.run.step import TIMELINE_POINTS, traced_step
from support.models import TinyLM, batches, lm_loss

PARTS = ("parameters", "gradients", "optimizer", "gathered", "activations", "other")


@pytest.fixture(scope="module")
def run():
    """A sharded model, and its first two steps, traced."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wrap, "TINY_NUMEL", 0)
        torch.manual_seed(0)
        comm = SoloComm(torch.device("cpu"))
        model = fully_shard(TinyLM(width=64, hidden=128), comm)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    traces = []
    for number, tokens in enumerate(batches(2, 8, length=32), start=1):

        def take(number=number, tokens=tokens):
            lm_loss(model, tokens).backward()
            optimizer.step()
            return StepReport(number, 0.0, 1.0, 1.0, 1e-3, 1, 1, 1.0, 1)

        report, trace = traced_step(model, optimizer, comm, take)
        assert (report.step, trace.step) == (number, number)
        traces.append(trace)
    return model, optimizer, traces


def rows(trace):
    memory = trace.ranks[0].memory
    return [dict(zip(PARTS, row, strict=True)) for row in zip(*(getattr(memory, part) for part in PARTS), strict=True)]


def test_the_parts_add_up_to_the_peak_that_the_allocator_saw(run):
    for trace in run[2]:
        assert max(sum(row.values()) for row in rows(trace)) == trace.ranks[0].peak_bytes


def test_the_parts_are_what_the_model_and_the_optimizer_hold(run):
    model, optimizer, traces = run
    shards = memory_summary(model)["parameters"]
    state = sum(value.nbytes for one in optimizer.state.values() for value in one.values())
    first, second = (rows(trace) for trace in traces)
    assert {row["parameters"] for row in first + second} == {shards}
    assert (first[0]["optimizer"], first[-1]["optimizer"]) == (0, state)
    assert {row["optimizer"] for row in second} == {state}
    assert first[0]["gradients"] == second[0]["gradients"] == 0
    assert (
        first[-1]["gradients"]
        == second[-1]["gradients"]
        == sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
    )


def test_activations_begin_and_end_with_nothing(run):
    for trace in run[2]:
        activations = [row["activations"] for row in rows(trace)]
        assert activations[0] == 0
        assert activations[-1] < 8192 < max(activations)


def test_the_timeline_keeps_the_start_and_the_end_however_few_its_moments(run, monkeypatch):
    """With five moments, the first forward is in the same stretch of the step as its start."""
    monkeypatch.setattr(step_module, "TIMELINE_POINTS", 5)
    model, optimizer, _ = run

    def take():
        lm_loss(model, batches(1, 8, length=32)[0]).backward()
        return StepReport(1, 0.0, 1.0, 1.0, 1e-3, 1, 1, 1.0, 1)

    _, trace = traced_step(model, optimizer, SoloComm(torch.device("cpu")), take)
    seconds = trace.ranks[0].memory.seconds
    assert (seconds[0], seconds[-1]) == (0, trace.ranks[0].seconds)
    assert len(seconds) <= 5
    assert rows(trace)[0]["activations"] == 0


def test_the_timeline_is_short_and_in_order(run):
    for trace in run[2]:
        seconds = trace.ranks[0].memory.seconds
        assert 20 < len(seconds) <= TIMELINE_POINTS
        assert list(seconds) == sorted(seconds)
        assert seconds[0] >= 0
        assert seconds[-1] <= trace.ranks[0].seconds


def test_the_optimizers_step_is_one_event_after_backward(run):
    for trace in run[2]:
        (step,) = [event for event in trace.ranks[0].events if event.kind == "optimizer"]
        assert all(event.end_s <= step.start_s for event in trace.ranks[0].events if event.kind == "backward")


def test_a_trace_survives_json(run):
    for trace in run[2]:
        values = json.loads(json.dumps(trace.as_dict()))
        again = StepTrace.from_dict(values)
        assert again.as_dict() == values
        assert again.units == tuple(["(root)", *(f"blocks.{i}" for i in range(4))])


def test_what_the_step_raises_comes_through_and_recording_ends(run):
    model, optimizer, _ = run

    def fail():
        raise ValueError("no step")

    with pytest.raises(ValueError, match="no step"):
        traced_step(model, optimizer, SoloComm(torch.device("cpu")), fail)
    assert type(model.__dict__["_fullshard_runtime"].recorder) is StepRecorder
    lm_loss(model, batches(1, 2)[0]).backward()


def test_memory_beside_the_step_is_left_out(run):
    model, optimizer, _ = run
    snapshot = torch.frombuffer(bytearray(1 << 20), dtype=torch.uint8)
    peaks = []
    for beside in (snapshot.nbytes, 0):
        report = StepReport(3, 0.0, 1.0, 1.0, 1e-3, 1, 1, 1.0, 1)
        _, trace = traced_step(model, optimizer, SoloComm(torch.device("cpu")), lambda report=report: report, beside)
        peaks.append(trace.ranks[0].peak_bytes)
    assert peaks[1] - peaks[0] == snapshot.nbytes
