"""Whole training runs through the command line, on two gloo processes, which exchange matrices for Muon."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from support.launched import launch_support
from support.processes import SOURCE, call, run_ranks
from support.tiny_run import QUICK, read_jsonl, write_run_file

pytestmark = pytest.mark.dist

QUICK_MUON = {"model": QUICK["model"], "training__optimizer": "muon", "training__accumulate": "sharded"}
DEMO = Path(__file__).parents[3] / "examples" / "banking77_tiny.yaml"


@pytest.fixture(scope="module")
def own_ranks(tmp_path_factory):
    """A run that the program launches by itself."""
    directory = tmp_path_factory.mktemp("own")
    run_file = write_run_file(directory, **QUICK_MUON)
    done = call("train", str(run_file), "--json")
    assert done.returncode == 0, done.stderr
    return directory / "out", done


@pytest.fixture(scope="module")
def joined_ranks(tmp_path_factory):
    """The same run, its ranks started with torchrun's variables, with the same files in another place."""
    directory = tmp_path_factory.mktemp("joined")
    run_file = write_run_file(directory, **QUICK_MUON)
    program = SOURCE / "fullshard" / "__main__.py"
    return directory / "out", [out for out, _ in run_ranks(2, program, "train", str(run_file), "--no-plan")]


def test_json_on_standard_output_is_the_summary(own_ranks):
    out, done = own_ranks
    summary = json.loads(done.stdout)
    assert summary == json.loads((out / "summary.json").read_text())
    assert summary["metric"] == "exact_match"
    assert summary["world_size"] == 2
    assert summary["steps"] == 4
    assert len(summary["peak_bytes_per_rank"]) == 2
    assert min(summary["peak_bytes_per_rank"]) > 0
    assert {"value", "baseline", "train_seconds", "tokens_per_second"} <= summary.keys()


def held(out):
    """For each rank, what its plan and its summary say of its memory."""
    plan, summary = (json.loads((out / name).read_text()) for name in ("run.json", "summary.json"))
    return list(zip(plan["plan"]["memory"], summary["memory"], strict=True))


def test_the_engines_account_is_the_planned_one(own_ranks):
    out, done = own_ranks
    assert "fullshard: planned: a rank needs at most " in done.stderr
    for planned, measured in held(out):
        same = ("rank", "parameters", "optimizer", "gathered_peak", "gradient_buffer_peak")
        assert [planned[name] for name in same] == [measured[name] for name in same]


@pytest.mark.slow
def test_the_plan_of_the_demo_agrees_with_what_its_ranks_then_hold(tmp_path):
    """The plan's batch is the largest of all ranks: one of them has it, the others may hold less."""
    few = ["data.max_train_samples=1024", "training.num_train_epochs=1", "training.eval_strategy=no"]
    plan = call("plan", str(DEMO), *few, "--world", "2", "--json").stdout
    run = ["train", str(DEMO), *few, "training.save_strategy=no", f"output_dir={tmp_path}", "nproc=2"]
    # Snapshots, which a plan leaves out, add a rank's parameters and optimizer state.
    assert call(*run, "--max-restarts", "0").returncode == 0
    peaks = [(planned["peak"], measured["peak"]) for planned, measured in held(tmp_path)]
    assert json.loads(plan)["peak_bytes"] == max(planned for planned, _ in peaks)
    for planned, measured in peaks:
        assert 0.9 * planned < measured < 1.001 * planned
    assert max(measured for _, measured in peaks) == pytest.approx(max(planned for planned, _ in peaks), rel=1e-3)


def test_every_held_out_row_is_predicted_once(own_ranks):
    out, _ = own_ranks
    sources = [record["input"] for record in read_jsonl(out / "predictions.jsonl")]
    assert [source.split()[-1] for source in sources] == [str(row) for row in range(25, 32)]


def test_the_saved_model_gives_the_reported_loss(own_ranks):
    out, done = own_ranks
    model = AutoModelForSeq2SeqLM.from_pretrained(out).eval()
    tokenizer = AutoTokenizer.from_pretrained(out)
    total = count = 0
    for row in read_jsonl(out / "predictions.jsonl"):
        source = tokenizer(row["input"], return_tensors="pt", truncation=True, max_length=12).input_ids
        target = row["references"][0]
        labels = tokenizer(text_target=target, return_tensors="pt", truncation=True, max_length=8).input_ids
        with torch.no_grad():
            total += model(input_ids=source, labels=labels).loss.item() * labels.numel()
            written = model.generate(input_ids=source, max_new_tokens=4, do_sample=False)
        count += labels.numel()
        assert tokenizer.batch_decode(written, skip_special_tokens=True)[0].strip() == row["prediction"]
    assert total / count == pytest.approx(json.loads(done.stdout)["loss"], rel=1e-5)


@pytest.mark.slow
def test_the_same_run_twice_is_the_same_to_the_bit_whoever_launches_it(own_ranks, joined_ranks):
    runs = [directory for directory, _ in (own_ranks, joined_ranks)]
    # When a checkpoint is on the disk is a matter of time.
    metrics = [read_jsonl(directory / "metrics.jsonl") for directory in runs]
    records = [[record for record in some if record["kind"] != "checkpoint"] for some in metrics]
    for name in ("kind", "step", "loss", "grad_norm", "learning_rate", "tokens", "value", "is_best"):
        assert [record.get(name) for record in records[0]] == [record.get(name) for record in records[1]]
    ours, theirs = (load_file(directory / "model.safetensors") for directory in runs)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_only_rank_0_speaks(joined_ranks):
    _, outputs = joined_ranks
    assert "model saved in" in outputs[0]
    assert outputs[1] == ""


def test_a_rank_that_raises_ends_the_run_with_its_traceback(tmp_path, capfd):
    failure = launch_support("faulty_rank", ["raise", str(write_run_file(tmp_path)), "--no-plan"])
    assert (failure.rank, failure.exit_code) == (1, 1)
    assert failure.text().startswith("Rank 1 failed first:\nTraceback (most recent call last):\n")
    assert failure.text().endswith("RuntimeError: the fault of rank 1")
    assert "Traceback" not in capfd.readouterr().err  # ranks leave it to the launcher
    assert len(read_jsonl(tmp_path / "out" / "metrics.jsonl")) >= 2
    assert not (tmp_path / "out" / "summary.json").exists()


@pytest.mark.slow
def test_a_rank_that_is_out_of_memory_says_what_was_planned_measured_and_would_need_less(tmp_path):
    run_file = write_run_file(tmp_path, training__eval_strategy="no")
    failure = launch_support("faulty_rank", ["allocate", str(run_file)])
    assert (failure.rank, failure.kind, failure.exit_code, failure.trace) == (1, "MemoryLimitError", 11, None)
    text = failure.message
    assert text.startswith("Rank 1 of 2 is out of memory: ")
    assert "DefaultCPUAllocator: can't allocate memory: you tried to allocate 1152921504606846976 bytes" in text
    for line in ("measured on this rank:\nshards  ", "process, peak  ", "free now  ", "planned: rank 1 of 2, which"):
        assert line in text
    assert "\n  training.gradient_checkpointing=true: " in text
    assert "it fits" not in text  # it was planned to fit


@pytest.mark.slow
def test_a_rank_that_is_killed_ends_the_run(tmp_path):
    failure = launch_support("faulty_rank", ["kill", str(write_run_file(tmp_path)), "--no-plan"])
    assert failure.rank == 1
    assert "SIGKILL" in failure.text()
    assert failure.exit_code == 137
    # The first epoch's model was committed before; the second's was not.
    AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out" / "best")
    assert not (tmp_path / "out" / "model.safetensors").exists()
