"""Sinks turn values into files and text, and nothing else."""

import dataclasses
import io
import json

import pytest
from rich.console import Console

from fullshard.errors import CheckpointError
from fullshard.program.train.reporting import sinks
from fullshard.program.train.reporting.reports import (
    CheckpointReport,
    EvaluationReport,
    Prediction,
    RankMemory,
    RunStart,
    RunSummary,
    StepReport,
)
from fullshard.program.train.reporting.sinks import ConsoleSink, FileSink
from fullshard.sizes import format_bytes
from support.reports import made
from support.tiny_run import read_jsonl

MIB = 1 << 20
PREDICTIONS = tuple(Prediction(f"source [bold]{i}", f"predicted {i}", (f"reference {i}",)) for i in range(10))
START = made(
    RunStart,
    output_dir="out",
    world_size=2,
    device="cpu",
    total_steps=50,
    steps_per_epoch=25,
    parameters=1234567,
    optimizer="AdamW",
    validation_rows=10,
    unit_table="the unit table",
    notes=("5 sources were cut [x]",),
)


def step(number, **changes):
    values = {"step": number, "epoch": number / 25, "loss": 1 / number, "tokens": 400, "seconds": 0.5}
    return made(StepReport, **(values | {"memory_bytes": 300 * MIB} | changes))


BEST = {"metric": "exact_match", "value": 0.625, "baseline": 0.0125, "baseline_name": "always 'x'", "loss": 0.25}
BEST |= {"metrics": {"exact_match": 0.625, "perplexity": 1.284}, "baselines": {"exact_match": 0.0125}}
BEST |= {"confusion": None, "predictions": PREDICTIONS}
EVALUATION = made(EvaluationReport, step=25, epoch=1.0, seconds=3.0, **BEST)


def summary(**changes):
    ranks = RankMemory(0, 5 * MIB, 5 * MIB, 10 * MIB, MIB, MIB, 90 * MIB), RankMemory(1, 1, 2, 3, 4, 5, 6)
    values = {"best_step": 25, "steps": 50, "train_seconds": 83.0, "evaluation_seconds": 6.0, "world_size": 2}
    values |= {"tokens_per_second": 2500.0, "optimizer": "Adafactor", "output_dir": "out", "ended_by": "steps"}
    return made(RunSummary, **(BEST | values | {"memory": ranks} | changes))


def run_through(sink):
    sink.start(START)
    for number in range(1, 51):
        sink.step(step(number))
        if number == 25:
            sink.evaluation(EVALUATION, is_best=True)
        if number == 26:
            sink.checkpoint(CheckpointReport(25, "out/checkpoints/step-00000025", 12 * MIB, 0.42, 0.01))
    sink.finish(summary())
    sink.close()


def test_files_hold_steps_evaluations_predictions_and_summary(tmp_path):
    run_through(FileSink(tmp_path / "out", logging_steps=20))
    records = read_jsonl(tmp_path / "out" / "metrics.jsonl")
    assert [(r["kind"], r["step"]) for r in records] == [
        ("step", 20),
        ("evaluation", 25),
        ("checkpoint", 25),
        ("step", 40),
        ("step", 50),
    ]
    assert records[0]["loss"] == 0.05
    assert records[0]["tokens_per_second"] == 800.0
    assert records[1]["is_best"] is True
    assert records[1]["value"] == 0.625
    assert "predictions" not in records[1]
    assert records[2]["nbytes"] == 12 * MIB
    assert "stop_requested" not in records[0]
    predictions = read_jsonl(tmp_path / "out" / "predictions.jsonl")
    assert predictions[3] == {"input": "source [bold]3", "prediction": "predicted 3", "references": ["reference 3"]}
    assert len(predictions) == 10
    result = json.loads((tmp_path / "out" / "summary.json").read_text())
    expected = {"metric": "exact_match", "value": 0.625, "baseline": 0.0125, "train_seconds": 83.0, "world_size": 2}
    assert expected.items() <= result.items()
    assert result["peak_bytes_per_rank"] == [90 * MIB, 6]
    assert result["tokens_per_second"] == 2500.0
    assert "predictions" not in result


def test_metrics_are_on_disk_after_each_step(tmp_path):
    sink = FileSink(tmp_path)
    sink.start(START)
    sink.step(step(1))
    assert len(read_jsonl(tmp_path / "metrics.jsonl")) == 1
    sink.close()


def test_a_run_that_fails_has_its_last_step_logged_and_each_sink_is_closed(tmp_path):
    sink = FileSink(tmp_path, logging_steps=3)
    sink.start(START)
    for number in range(1, 6):
        sink.step(step(number))
    sink.close()
    sink.close()
    assert [record["step"] for record in read_jsonl(tmp_path / "metrics.jsonl")] == [3, 5]


def test_an_earlier_runs_results_do_not_pass_for_this_one(tmp_path):
    run_through(FileSink(tmp_path))
    (tmp_path / "trace.json").write_text("{}")
    sink = FileSink(tmp_path)
    sink.start(START)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "run.json"]
    assert (tmp_path / "metrics.jsonl").read_text() == ""
    sink.close()


@pytest.mark.parametrize(("evaluated", "kept"), [(2, [("evaluation", 2)]), (0, [])])
def test_a_run_that_goes_on_keeps_the_metrics_up_to_its_step_and_appends(tmp_path, evaluated, kept):
    """An evaluation that the checkpoint does not have is made again, and recorded then."""
    sink = FileSink(tmp_path)
    sink.start(START)
    for number in (1, 2, 3):
        sink.step(step(number))
    sink.evaluation(dataclasses.replace(EVALUATION, step=2), is_best=True)
    sink.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "step", "st')  # a killed run's last line
    for name in ("summary.json", "trace.json"):
        (tmp_path / name).write_text("{}")
    sink = FileSink(tmp_path)
    sink.start(dataclasses.replace(START, resumed_step=2, evaluated_step=evaluated))
    sink.step(step(3, loss=0.125))
    sink.close()
    records = read_jsonl(tmp_path / "metrics.jsonl")
    found = [(record["kind"], record["step"]) for record in records]
    assert found == [("step", 1), ("step", 2), *kept, ("step", 3)]
    assert records[-1]["loss"] == 0.125
    assert (tmp_path / "trace.json").exists(), "the step that was recorded is not recorded again"
    assert not (tmp_path / "summary.json").exists()


def test_what_is_left_is_reckoned_from_where_the_run_goes_on(monkeypatch):
    said = lines_at(monkeypatch, {41: 110.0}, resumed_step=40)
    assert "step 41/50" in said[-1]
    assert "1 min 30 s left" in said[-1]  # nine more steps of ten seconds


def lines_at(monkeypatch, times, **changes):
    """The lines of a run that starts at 100 s and reports steps at these times."""
    now = [100.0]
    monkeypatch.setattr(sinks.time, "monotonic", lambda: now[0])
    stream = io.StringIO()
    sink = ConsoleSink(Console(file=stream, width=100))
    sink.start(dataclasses.replace(START, **changes))
    for number, now[0] in times.items():
        sink.step(step(number))
    return stream.getvalue().splitlines()


def test_what_is_left_is_within_the_time_limit(monkeypatch):
    assert lines_at(monkeypatch, {1: 110.0}, time_limit_s=25.0)[-1].endswith("15 s left")
    assert lines_at(monkeypatch, {1: 130.0}, time_limit_s=25.0)[-1].endswith(" 0 s left")


def test_a_log_is_not_silent_for_longer_than_half_a_minute_of_short_steps(monkeypatch):
    said = lines_at(monkeypatch, {1: 110.0, 3: 139.0, 5: 141.0, 7: 170.0, 9: 171.0}, total_steps=50_000)
    assert [line.split()[1] for line in said if line.startswith("step ")] == ["1/50000", "5/50000", "9/50000"]


def test_a_directory_that_cannot_be_written_is_a_clear_error(tmp_path):
    (tmp_path / "out").write_text("a file")
    sink = FileSink(tmp_path / "out")
    with pytest.raises(CheckpointError, match="Could not write to"):
        sink.start(START)
    sink.close()


def test_a_full_disk_costs_no_line_once_there_is_room(tmp_path):
    said = []
    sink = FileSink(tmp_path, say=said.append)
    sink.start(START)
    room, sink._metrics = sink._metrics, io.FileIO("/dev/full", "a")
    sink.step(step(1))
    sink.step(step(2))
    assert len(said) == 1
    assert "metrics.jsonl cannot be written: No space left on device. Training continues" in said[0]
    sink._metrics.close()
    sink._metrics = room
    sink.step(step(3))
    sink.close()
    assert [record["step"] for record in read_jsonl(tmp_path / "metrics.jsonl")] == [1, 2, 3]
    assert len(said) == 1


def test_lines_that_no_disk_took_are_counted_at_the_end(tmp_path):
    said = []
    sink = FileSink(tmp_path, say=said.append)
    sink.start(START)
    sink._metrics.close()
    sink._metrics = io.FileIO("/dev/full", "a")
    sink.step(step(1))
    sink.step(step(2))
    sink.close()
    assert "lacks its last 2 lines" in said[-1]


def console_output(*, terminal):
    stream = io.StringIO()
    run_through(ConsoleSink(Console(file=stream, force_terminal=terminal, width=100, color_system=None), samples=3))
    return stream.getvalue()


def test_plain_lines_are_few_and_complete():
    lines = console_output(terminal=False).splitlines()
    steps = [line for line in lines if line.startswith("step ")]
    assert [line.split()[1] for line in steps] == [f"{n}/50" for n in [1, *range(2, 51, 2)]]
    assert steps[-1] == "step 50/50  loss 0.0200  800 tokens/s  300.0 MiB process  0 s left"
    assert "1,234,567 parameters, sharded over 2 ranks on cpu; AdamW" in lines
    assert "the unit table" in lines
    assert "5 sources were cut [x]" in lines


def test_the_end_shows_result_samples_and_memory():
    text = console_output(terminal=False)
    assert "epoch 1.00: held-out loss 0.2500, exact_match 62.50% (baseline 1.25%), perplexity 1.28" in text
    assert "exact_match 62.50% on 10 held-out rows, after step 25; baseline (always 'x') 1.25%" in text
    assert "trained 50 steps with Adafactor in 1 min 23 s (evaluation 6 s), 2,500 tokens/s" in text
    for shown in (0, 3, 6):  # spread over the rows
        assert f"source [bold]{shown}" in text
        assert f"predicted {shown}" in text
        assert f"reference {shown}" in text
    assert "source [bold]1 " not in text
    assert text.count("90.0 MiB") == 1
    assert "model saved in out" in text
    assert "fullshard report out" in text.rpartition("next:")[2]
    assert "checkpoint of step 25 saved (12.0 MiB in 0.4 s)\n" in text


def test_titles_of_memory_are_complete_in_the_80_columns_of_a_log():
    stream = io.StringIO()
    sizes = RankMemory(0, *[1_048_500] * 6)  # 1023.9 KiB, as wide as a size can be
    sink = ConsoleSink(Console(file=stream, width=80))
    sink.start(START)
    sink.finish(summary(memory=(sizes,)))
    sink.close()
    table = stream.getvalue().partition("tensor memory of each rank")[2]
    title = " ".join(table.splitlines()[3].split())
    assert title == "rank parameters gradients optimizer peak buffer peak step peak"
    assert table.count("1023.9 KiB") == 6


def test_what_a_gpus_allocator_reserves_stands_beside_what_tensors_take():
    stream = io.StringIO()
    sink = ConsoleSink(Console(file=stream, width=120))
    sink.start(START)
    sink.step(step(1, memory_bytes=90 * MIB, reserved_bytes=112 * MIB))
    sink.finish(summary(memory=(RankMemory(0, MIB, MIB, MIB, MIB, MIB, 90 * MIB, reserved=113 * MIB),)))
    sink.close()
    text = stream.getvalue()
    assert "90.0 MiB of 112.0 MiB reserved" in text
    assert "reserved" in text
    assert "113.0 MiB" in text
    assert "reserved_bytes" not in step(1).as_dict()


def test_a_terminal_gets_a_bar_and_no_step_lines():
    text = console_output(terminal=True)
    assert "\x1b[?25l" in text  # the cursor is hidden while the bar is drawn
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")  # and given back
    assert "step 50/50" in text
    assert "\nstep 2/50" not in text


def test_a_run_without_evaluation_has_no_metric_line():
    stream = io.StringIO()
    sink = ConsoleSink(Console(file=stream, width=100), samples=3)
    sink.start(START)
    nothing = dict.fromkeys(("metric", "value", "baseline", "baseline_name", "loss"))
    sink.finish(summary(predictions=(), **nothing))
    assert "baseline" not in stream.getvalue()
    assert "model saved in out" in stream.getvalue()


def test_close_before_start_is_harmless(tmp_path):
    FileSink(tmp_path).close()
    ConsoleSink(Console(file=io.StringIO())).close()


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 * MIB, "5.0 MiB"), (3 << 40, "3072.00 GiB")]
)
def test_format_bytes(count, text):
    assert format_bytes(count) == text
