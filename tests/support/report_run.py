"""A run's output_dir with all the files that a report is made of."""

import json

from fullshard.core.engine import TraceEvent
from fullshard.program.train.reporting.reports import MemoryTimeline, RankTrace, StepTrace

NASTY = "</script><script>alert('x')</script><img src=x onerror=alert(1)>"
UNITS = ("(root)", "encoder.block.0", "encoder.block.1")


def rank_trace(rank, seconds=1.0, mib=1 << 20):
    """Two blocks forward and back, the second gather waited for."""
    events = []
    for place, unit in enumerate(UNITS[1:]):
        at = 0.1 + 0.2 * place
        events += [
            TraceEvent(unit, "gather", at - 0.05, at + 0.02),
            TraceEvent(unit, "gather_wait", at, at + 0.02 + 0.01 * rank),
            TraceEvent(unit, "forward", at + 0.04, at + 0.15),
            TraceEvent(unit, "backward", 0.9 - at, 1.0 - at),
            TraceEvent(unit, "reduce", 0.95 - at, 1.0 - at),
            TraceEvent(unit, "reduce_wait", 0.99 - at, 1.0 - at),
        ]
    events += [TraceEvent("(root)", "forward", 0.05, 0.5), TraceEvent("(root)", "backward", 0.5, 0.95)]
    events.append(TraceEvent("", "optimizer", 0.96, 1.0))
    events = [TraceEvent(e.unit, e.kind, e.start_s * seconds, e.end_s * seconds) for e in events]
    columns = [[8 * mib] * 3, [0, 4 * mib, 8 * mib], [16 * mib] * 3, [0, 2 * mib, 0], [0, 30 * mib, 0], [mib] * 3]
    memory = MemoryTimeline((0.0, 0.5 * seconds, seconds), *map(tuple, columns))
    return RankTrace(
        rank, (1.0 + 0.1 * rank) * seconds, 61 * mib, tuple(sorted(events, key=lambda e: e.start_s)), memory
    )


def make_trace(ranks=2):
    return StepTrace(3, "cpu", UNITS, tuple(rank_trace(rank) for rank in range(ranks)))


def step(number, steps):
    share = number / steps
    return {
        "kind": "step",
        "step": number,
        "epoch": share,
        "loss": 4.0 - 3 * share + 0.2 * (number % 3),
        "grad_norm": 1.0 + 0.1 * (number % 5),
        "learning_rate": 1e-3 * (1 - share),
        "tokens": 1_000,
        "seconds": 0.5,
        "tokens_per_second": 2_000 + number % 7,
    }


def evaluation(number, value):
    return {
        "kind": "evaluation",
        "step": number,
        "loss": 2.0 - value,
        "metric": "accuracy",
        "value": value,
        "baseline": 0.125,
        "baseline_name": f"always {NASTY!r}",
        "metrics": {"accuracy": value, "perplexity": 7.5 - value},
        "baselines": {"accuracy": 0.125},
        "is_best": True,
    }


CONFUSION = {"labels": ["card", NASTY, "rate"], "cells": [[0, 0, 5], [0, 1, 2], [1, 1, 4], [2, 3, 1]]}

RUN = {
    "world_size": 2,
    "device": "cpu",
    "total_steps": 40,
    "parameters": 1_234_567,
    "optimizer": "8-bit AdamW",
    "train_rows": 300,
    "validation_rows": 12,
    "unit_table": f"3 units over 2 ranks {NASTY}",
    "notes": [f"training: 300 rows {NASTY}"],
    "config": {"output_dir": NASTY, "training": {"learning_rate": 1e-3, "max_steps": None}},
    "chosen": {"training.precision": f"bf16 ({NASTY} computes it in hardware)"},
    "versions": {"torch": "2.13.0"},
    "padding_share": 0.0825,
}

SUMMARY = {
    "metric": "accuracy",
    "value": 0.75,
    "baseline": 0.125,
    "baseline_name": f"always {NASTY!r}",
    "loss": 1.25,
    "best_step": 40,
    "steps": 40,
    "train_loss": 1.125,
    "tokens_per_second": 2_003.4,
    "train_seconds": 83.0,
    "confusion": CONFUSION,
    "memory": [
        {
            "rank": rank,
            "parameters": 8 << 20,
            "gradients": 8 << 20,
            "optimizer": 16 << 20,
            "gathered_peak": 2 << 20,
            "gradient_buffer_peak": 1 << 20,
            "peak": 61 << 20,
        }
        for rank in range(2)
    ],
}


def write_unfinished(directory, steps=40):
    """What is there of a run that was killed: a torn last line, no trace."""
    directory.mkdir(parents=True, exist_ok=True)
    records = [step(number, 40) for number in range(1, steps + 1)]
    lines = [json.dumps(record) + "\n" for record in records]
    (directory / "metrics.jsonl").write_text("".join(lines) + '{"kind": "step", "st')


def write_finished(directory):
    directory.mkdir(parents=True, exist_ok=True)
    records = [step(number, 40) for number in range(1, 41)] + [evaluation(20, 0.5), evaluation(40, 0.75)]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (directory / "run.json").write_text(json.dumps(RUN))
    (directory / "summary.json").write_text(json.dumps(SUMMARY))
    (directory / "trace.json").write_text(json.dumps(make_trace().as_dict()))
    predictions = [
        {"input": f"text {row} {NASTY}", "prediction": "card", "references": ["rate", "card"] if row % 2 else [NASTY]}
        for row in range(50)
    ]
    (directory / "predictions.jsonl").write_text("".join(json.dumps(one) + "\n" for one in predictions))


def write_small(directory):
    """A finished run of three steps of 2 ms, all of whose numbers are small."""
    write_finished(directory)
    records = []
    for number in (1, 2, 3):
        values = {"loss": 3e-4 + 1e-6 * number, "grad_norm": 2.4e-3, "learning_rate": 1e-5 * (1 - number / 4)}
        values |= {"router_loss": 1e-6 * number, "mfu": 1.2e-4, "seconds": 0.002, "tokens_per_second": 3.2}
        records.append(step(number, 3) | values)
        metrics = {"accuracy": 0.001 * number, "perplexity": 1.0005 + 1e-5 * number}
        records.append(evaluation(number, 0.001 * number) | {"loss": 4e-4, "metrics": metrics})
    (directory / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    trace = StepTrace(2, "cpu", UNITS, tuple(rank_trace(rank, 0.002, 1 << 10) for rank in range(2)))
    (directory / "trace.json").write_text(json.dumps(trace.as_dict()))
    memory = [{name: value >> (10 * (name != "rank")) for name, value in rank.items()} for rank in SUMMARY["memory"]]
    losses = {"loss": 4e-4, "train_loss": 3.03e-4, "steps": 3, "tokens_per_second": 3.2, "train_seconds": 0.02}
    (directory / "summary.json").write_text(json.dumps(SUMMARY | losses | {"memory": memory}))
