"""``fullshard plan``: its table, its JSON, its verdict and its refusals."""

import json
import re
import threading
from pathlib import Path

import pytest

from fullshard.program.cli import common
from fullshard.program.cli.main import main
from fullshard.program.cli.plan import memory
from fullshard.program.config import load_run
from fullshard.program.train.run_plan import longest_batch
from fullshard.program.train.setup.prepare import prepare
from support.planned import write_directory_run, write_run
from support.tiny_run import QUICK


@pytest.fixture(scope="module")
def run_file(tmp_path_factory):
    return str(write_run(tmp_path_factory.mktemp("plan"), model=QUICK["model"]))


def test_the_plan_is_printed_as_json(run_file, done):
    found = json.loads(done("plan", run_file, "--world", "1", "--memory", "1GB", "--json"))
    assert (found["world_size"], found["memory_bytes"], found["fits"]) == (1, 10**9, True)
    precision = {"setting": "training.precision", "value": "fp32", "why": "ranks compute on CPUs"}
    assert precision in found["chosen"]
    assert sum(found["parts"].values()) == found["peak_bytes"] <= found["needed_bytes"] < 10**9


def test_too_little_memory_is_exit_code_1_with_the_numbers(run_file, capsys):
    assert main(["plan", run_file, "--world", "1", "--memory", "100kB"]) == 1
    out = capsys.readouterr().out
    assert "peak of a step" in out
    assert "does not fit: it needs" in out
    assert "of 97.7 KiB, including some to spare" in out
    assert "training.gradient_checkpointing=true" not in out  # auto has tried that


def test_overrides_change_the_plan(run_file, capsys):
    peaks = []
    for override in ("training.per_device_train_batch_size=1", "training.per_device_train_batch_size=8"):
        assert main(["plan", run_file, override, "--world", "1", "--json"]) == 0
        peaks.append(json.loads(capsys.readouterr().out)["peak_bytes"])
    assert peaks[0] < peaks[1]


@pytest.mark.slow
def test_a_gpu_gives_time_price_and_a_verdict(run_file, done):
    out = done("plan", run_file, "--world", "2", "--gpu", "h100", "--price", "2.5")
    assert "\ntraining.precision: bf16 (h100 computes it in hardware)\n" in out
    record = Path(__file__).parents[3] / "benchmarks/results/fragments.json"
    ratios = [row["expandable, trimmed once built"]["ratio"] for row in json.loads(record.read_text())["rows"]]
    assert f"{min(ratios):.2f} to {max(ratios):.2f} times the tensors" in out
    for text in ("memory of the h100", "a step", "tokens a second", "costs 0.00 at 2.5 an hour", "fits: it needs"):
        assert text in out


@pytest.mark.slow
def test_several_numbers_of_ranks_are_a_line_each(run_file, capsys):
    assert main(["plan", run_file, "--world", "1,3", "--gpu", "t4"]) == 0
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.split() == ["ranks", "needed", "fits", "step", "run"]
    assert [line.split()[0] for line in lines[:2]] == ["1", "3"]
    assert lines[2] == "training.precision: fp32 (t4 has no bfloat16 arithmetic; matrix products in TF32)"
    assert main(["plan", run_file, "--world", "1,3", "--gpu", "t4", "--json", "--memory", "1kB"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [(plan["world_size"], plan["fits"]) for plan in found] == [(1, False), (3, False)]
    assert all(plan["timing"]["step_s"] > 0 for plan in found)


def test_the_search_prints_what_to_type(run_file, capsys):
    kept = ["sharding.strategy=full_shard", "training.fused_cross_entropy=false", "training.torch_compile=true"]
    assert main(["plan", run_file, *kept, "--world", "2", "--gpu", "h100", "--fit"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("the fastest of 1 settings that fits: as it is")
    assert "upper bound" in out
    assert "fullshard: as it is: " in err


@pytest.mark.slow
def test_the_search_keeps_to_a_smaller_memory(run_file, capsys):
    kept = ["sharding.strategy=full_shard", "training.fused_cross_entropy=false"]
    assert main(["plan", run_file, *kept, "--world", "1", "--gpu", "h100", "--memory", "1MB", "--fit"]) == 1
    assert capsys.readouterr().out.startswith("nothing fits")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--fit"], "--fit needs a step's time: name a GPU with --gpu"),
        (["--price", "2"], "--price needs a step's time"),
        (["--network", "10GB"], "--network needs a step's time"),
        (["--gpu", "abacus"], "Known are b200, h200, h100"),
        (["--gpu", "h100", "--fit", "--world", "1,2"], "--fit searches for one number of ranks; got 1, 2"),
    ],
)
def test_options_that_cannot_be_followed(run_file, options, said, refused):
    assert said in refused(2, "plan", run_file, *options)


def peaks(done, *arguments):
    found = json.loads(done("plan", *arguments, "--world", "2", "--json"))
    return found["phase_peaks"], found["parts"], found["sent_bytes"]


@pytest.mark.slow
def test_a_length_gives_the_plan_of_rows_of_that_length_without_reading_any(tmp_path, done):
    path = write_directory_run(tmp_path, training__packing=False)
    config = load_run(path, [])
    batch = longest_batch(config, prepare(config), 1)
    length = f"{batch.input_ids_BS.shape[1]}/{batch.labels_BT.shape[1]}"
    options = ["training.per_device_eval_batch_size=1"]
    with_data = peaks(done, str(path), "training.eval_strategy=no", *options)
    for file in tmp_path.glob("*.csv"):
        file.unlink()
    missing = ["data.train_file=none.csv", *options]
    assert peaks(done, str(path), *missing, "training.eval_strategy=no", "--length", length) == with_data
    assert "evaluation" in peaks(done, str(path), *missing, "--length", length)[0]


@pytest.mark.slow
def test_a_length_leaves_the_number_of_steps_open(run_file, capsys, refused, done):
    given = ["plan", run_file, "--world", "1", "--gpu", "t4", "--length", "16/8"]
    assert "set training.max_steps" in refused(2, *given, "--price", "2")
    assert main([*given, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["run_s"] is None
    assert "10 steps: " in done(*given, "--price", "2", "training.max_steps=10")


@pytest.mark.parametrize("length", ["16", "1/"])
def test_a_length_that_cannot_be(run_file, length, refused):
    if "/" in length:
        assert "must be a whole number of at least 1; got ''" in refused(2, "plan", run_file, "--length", length)
    else:
        assert "this model is an encoder-decoder. Give both" in refused(
            2, "plan", run_file, "--world", "1", "--length", length
        )


@pytest.mark.slow
def test_the_steps_of_all_plans_are_told(run_file, monkeypatch):
    told = []
    name = "fullshard.program.launch.progress.WorkProgress.__call__"
    monkeypatch.setattr(name, lambda bar, *counts: told.append(counts))
    assert main(["plan", run_file, "--world", "1,3", "--gpu", "t4"]) == 0
    shares = [done / total for done, total in told]
    assert len(shares) == 6 + 2 * 12  # three ranks are planned with full gradients too
    assert shares == sorted(shares)
    assert (shares[5], shares[-1]) == (0.5, 1.0)


@pytest.mark.parametrize(
    ("text", "size"), [("80GB", 80 * 10**9), ("24GiB", 24 << 30), ("1.5kB", 1500), ("7", 7), ("2 TiB", 2 << 40)]
)
def test_sizes(text, size):
    assert memory(text) == size


def test_a_search_is_never_silent(monkeypatch):
    said, heard = [], threading.Event()

    def say(line):
        said.append(line)
        if re.fullmatch(r"candidate 2 of 3: \d+ s", line):
            heard.set()

    monkeypatch.setattr(common, "say", say)
    monkeypatch.setattr(common.NeverSilent, "EVERY_S", 0.001)
    with common.NeverSilent("searching") as busy:
        busy.now("candidate 2 of 3: planning it")
        assert heard.wait(60)
    assert "candidate 2 of 3: planning it" in said
    assert not any(thread.name == "never silent" for thread in threading.enumerate())
