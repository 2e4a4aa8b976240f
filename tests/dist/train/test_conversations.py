"""A file of 500 conversations fine-tunes a tiny Llama and a tiny T5 with one command each, on two gloo processes."""

import csv
import json
import random

import pytest
import yaml

from fullshard.program.data import SourceSpec, read_inputs
from support.processes import call
from support.tiny_run import read_jsonl

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(400)]

T5 = {"model_type": "t5", "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_decoder_layers": 2}
T5 |= {"num_heads": 4, "dropout_rate": 0.0}
LLAMA = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
LLAMA |= {"num_attention_heads": 4, "max_position_embeddings": 256}
WORDS = ("red", "blue", "green", "black", "white")


def write_conversations(path, count=500):
    """The user names a colour in each turn; the assistant says it back."""
    draw = random.Random(0)
    with path.open("w") as file:
        for number in range(count):
            turns = [{"role": "system", "content": "Repeat the colour."}] if number % 2 else []
            for _ in range(1 + number % 3):
                word = draw.choice(WORDS)
                turns.append({"role": "user", "content": f"my {draw.choice(('car', 'hat', 'cat'))} is {word}"})
                turns.append({"role": "assistant", "content": word})
            file.write(json.dumps({"messages": turns}) + "\n")


def called(*arguments, **options):
    done = call(*arguments, **options)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.parametrize("model", [T5, LLAMA], ids=["t5", "llama"])
def test_one_command(tmp_path, model):
    write_conversations(tmp_path / "talks.jsonl")
    out = tmp_path / "out"
    data = {"train_file": str(tmp_path / "talks.jsonl"), "validation_fraction": 0.1}
    data |= {"cache_dir": str(tmp_path / "cache"), "max_target_length": 8}
    values = {
        "output_dir": str(out),
        "nproc": 2,
        "model": {"config": model, "tokenizer": {"vocab_size": 200}},
        "data": data,
        "training": {
            "per_device_train_batch_size": 16,
            "learning_rate": 1e-2,
            "num_train_epochs": 3,
            "warmup_steps": 5,
        },
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    shown = called("config", "check", str(tmp_path / "run.yaml"), "--dry-run").stdout
    done = called("train", str(tmp_path / "run.yaml"))
    for text in (shown, done.stdout + done.stderr):
        assert "500 conversations of 4.5 turns on average, loss on every assistant turn" in text
        assert "one training row as the model sees it" in text
    causal = model is LLAMA
    assert ("template is saved with the model" in shown) == causal
    summary = json.loads((out / "summary.json").read_text())
    assert summary["value"] > 0.9, "the colour is in the last turn"

    called("evaluate", str(out))
    measured = read_jsonl(out / "evaluation" / "predictions.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "talks.jsonl").read_text().splitlines()]
    assert len(measured) < 120, "one row for each conversation"
    done = called("predict", str(out), str(tmp_path / "talks.jsonl"), "-o", str(tmp_path / "predicted.jsonl"))
    predicted = read_jsonl(tmp_path / "predicted.jsonl")
    assert len(predicted) == len(rows)
    asked_for = [row.source for row in read_inputs(tmp_path / "talks.jsonl", SourceSpec()).rows]
    by_input = dict(zip(asked_for, (row["prediction"] for row in predicted), strict=True))
    assert all(by_input[row["input"]] == row["prediction"] for row in measured)
    right = sum(one["prediction"] == row["messages"][-1]["content"] for one, row in zip(predicted, rows, strict=True))
    assert right > 450

    # The JSON text of turns in a lone prompt is the history that it says.
    with (tmp_path / "prompts.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["prompt"], *([json.dumps(row["messages"][:-1])] for row in rows[:20])])
    called("predict", str(out), str(tmp_path / "prompts.csv"), "-o", str(tmp_path / "asked.jsonl"))
    asked = [row["prediction"] for row in read_jsonl(tmp_path / "asked.jsonl")]
    assert asked == [row["prediction"] for row in predicted[:20]]

    first = next(row["messages"] for row in rows if len(row["messages"]) == 3)
    assert json.loads((out / "run.json").read_text())["system_turns"] == {"": None}, "half of them have none"
    done = called("predict", str(out), "--system", first[0]["content"], input=first[1]["content"])
    assert "after the system turn 'Repeat the colour.': given by --system" in done.stderr
    history = f"system: {first[0]['content']}\nuser: {first[1]['content']}"
    assert json.loads(done.stdout) == {"input": first[1]["content"], "prediction": by_input[history]}

    done = called("chat", str(out), "--show-prompt", input="my hat is red\nmy car is blue\n")
    assert done.stdout == "red\nblue\n", done.stderr
    assert "assistant: red" in done.stderr, "the second answer's history has the first"
