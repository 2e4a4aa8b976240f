"""``fullshard tune`` whole: two ranks, all candidates, the table, the run file, and the next run."""

import json
import os

import pytest
import yaml

from fullshard.program.cli import tune as verb
from fullshard.program.cli.main import main
from support.processes import SOURCE, TESTS, run_ranks
from support.tiny_run import QUICK, write_run_file

pytestmark = pytest.mark.dist

LLAMA = {
    "config": {
        "model_type": "llama",
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    },
    "tokenizer": {"vocab_size": 60},
}


@pytest.fixture
def fakes(monkeypatch, tmp_path):
    """Have ranks use the ways of tests, and the user's cache be in a directory of its own."""
    monkeypatch.setattr(verb, "PROGRAM", "support.tuning_rank")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(SOURCE), str(TESTS)]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("FAKE_WAYS", "flash flex bias_sdpa varlen")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))


def small(directory, **changes):
    return write_run_file(directory, **QUICK | changes)


@pytest.mark.parametrize("model", ["t5", pytest.param("llama", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_a_tuning_leaves_out_what_is_wrong_or_too_large_and_writes_the_fastest(model, fakes, tmp_path, capfd):
    path = small(tmp_path, **({} if model == "t5" else {"model": LLAMA, "sharding__wrap": "auto"}))
    path.write_text(f"# my run\n{path.read_text()}")
    assert main(["tune", str(path), "--minutes", "2"]) == 0
    out, err = capfd.readouterr()
    assert "out of memory in the candidate varlen, recompute none, 4 rows a micro-batch: CUDA out of memory" in err
    assert err.count("start again without that candidate") == 1
    assert "flash: does not apply: the device is a CPU" in out
    assert "flex (2 candidates): loss " in out
    assert "varlen, recompute none, 4 rows a micro-batch: rank 1 failed in it, out of memory: CUDA out of" in out
    chosen = next(line for line in out.splitlines() if line.startswith("* "))
    assert chosen.split()[1] in ("plain", "varlen", "bias_sdpa")  # whichever was fastest
    text = path.read_text()
    assert text.startswith("# my run\n")
    assert yaml.safe_load(text)["training"]["gradient_checkpointing"] == (chosen.split()[2] == "all")
    assert not (tmp_path / "out").exists()
    (kept,) = (tmp_path / "cache").glob("tuned-*.json")
    measured = [(*one["ways"], one["recompute"]) for one in json.loads(kept.read_text())]
    assert {("false",), ("true",), ("varlen", "true")} < set(measured)
    assert not list((tmp_path / "cache").glob("tuning-*"))


@pytest.mark.slow
def test_with_json_nothing_is_written_and_the_next_run_takes_the_choice(fakes, tmp_path, monkeypatch):
    """Under another launcher, on one rank."""
    monkeypatch.setenv("FAKE_WAYS", "flash flex bias_sdpa")
    path = small(tmp_path, nproc=1, training__max_steps=2, training__eval_strategy="no")
    before = path.read_text()
    ((out, _),) = run_ranks(1, TESTS / "support" / "tuning_rank.py", str(path), "--minutes=2", "--json")
    found = json.loads(out.splitlines()[-1])
    assert path.read_text() == before
    assert not (tmp_path / "out").exists()
    assert found["choice"] == next(
        {name: one[name] for name in found["choice"]} for one in found["measured"] if one["chosen"]
    )
    assert {one["candidate"].split(",")[0] for one in found["left_out"]} == {"flash", "flex"}
    assert found["choice"]["speed.ways"] == []
    program = SOURCE / "fullshard" / "program" / "launch" / "programs" / "train.py"
    ((_, err),) = run_ranks(1, program, str(path), "training.speed=auto")
    assert "ms a step, as `fullshard tune` measured)" in err
    run = json.loads((tmp_path / "out" / "run.json").read_text())
    assert run["config"]["training"]["speed"] == [
        f"{name}={json.dumps(value)}" for name, value in found["choice"].items()
    ]
    assert "training.speed" in run["chosen"]
