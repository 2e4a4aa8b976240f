"""A whole run in a few seconds: a tiny T5, a few rows, and a run file for them."""

import csv
import json

import yaml

LABELS = ("card_arrival", "lost_card", "exchange_rate")
WORDS = {"card_arrival": "where is my card", "lost_card": "i lost it", "exchange_rate": "what is the rate"}
MODEL = {
    "model_type": "t5",
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 32,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 2,
    "dropout_rate": 0.1,
}

QUICK = {
    "model": {"config": MODEL | {"num_layers": 1, "num_decoder_layers": 1}, "tokenizer": {"vocab_size": 60}},
    "sharding__wrap": ["T5Block"],
    "evaluation__max_new_tokens": 2,
}
"""Changes of :func:`settings` for steps that take least; dropout is on."""


def write_rows(path, count, start=0):
    """Sentences of one to four of a label's words and a running number, so that rows differ in length and text."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "category"])
        for row in range(start, start + count):
            label = LABELS[row % 3]
            words = WORDS[label].split()[: 1 + row % 4]
            writer.writerow([" ".join([*words, str(row)]), label])


def settings(directory, **changes):
    """The settings of a run over files that this writes to ``directory``; ``changes`` are ``section__key=value``."""
    write_rows(directory / "train.csv", 25)
    write_rows(directory / "held_out.csv", 7, start=25)
    values = {
        "output_dir": str(directory / "out"),
        "seed": 3,
        "nproc": 2,
        "model": {"config": dict(MODEL), "tokenizer": {"vocab_size": 60}},
        "data": {
            "train_file": str(directory / "train.csv"),
            "validation_file": str(directory / "held_out.csv"),
            "source_column": "text",
            "target_column": "category",
            "cache_dir": str(directory / "cache"),
            "max_source_length": 12,
            "max_target_length": 8,
        },
        "training": {
            "per_device_train_batch_size": 4,
            "per_device_eval_batch_size": 2,
            "gradient_accumulation_steps": 2,
            "num_train_epochs": 2,
            "learning_rate": 1e-2,
            "warmup_steps": 1,
        },
        "evaluation": {"num_samples_shown": 2, "max_new_tokens": 4},
    }
    for name, value in changes.items():
        section, _, key = name.partition("__")
        if key:
            values.setdefault(section, {})[key] = value
        else:
            values[section] = value
    return values


class Memory:
    """A sink that remembers what it was told."""

    def __init__(self):
        self.steps, self.evaluations, self.checkpoints = [], [], []
        self.progress, self.begun, self.ended, self.closed, self.traces = [], [], [], 0, []
        self.estimates, self.referred, self.compiled, self.profiles = [], [], [], []

    def referring(self, done, total):
        self.referred.append((done, total))

    def compiling(self, graphs, seconds, *, late_after=None):
        self.compiled.append((graphs, late_after))

    def start(self, run):
        self.begun.append(run)

    def step(self, report):
        self.steps.append(report)

    def estimate(self, steps):
        self.estimates.append(steps)

    def evaluating(self, done, total):
        self.progress.append((done, total))

    def evaluation(self, report, *, is_best):
        self.evaluations.append((report, is_best))

    def checkpoint(self, report):
        self.checkpoints.append(report)

    def profiled(self, directory, problem):
        self.profiles.append((directory, problem))

    def trace(self, trace):
        self.traces.append(trace)

    def finish(self, summary):
        self.ended.append(summary)

    def close(self):
        self.closed += 1


def write_run_file(directory, **changes):
    """The path of a run file in ``directory``."""
    path = directory / "run.yaml"
    path.write_text(yaml.safe_dump(settings(directory, **changes)))
    return path


def read_jsonl(path):
    """The records of a JSON Lines file."""
    return [json.loads(line) for line in path.read_text().splitlines()]
