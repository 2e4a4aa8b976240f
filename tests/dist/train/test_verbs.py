"""``fullshard evaluate`` and ``predict`` through the command line: own ranks, a finished run, standard input."""

import json
import os
import subprocess
import sys

import pytest

from fullshard.config import RunConfig
from fullshard.models import build_model, train_tokenizer
from support.tiny_run import MODEL, read_jsonl, settings

pytestmark = [pytest.mark.dist, pytest.mark.slow]

FULLSHARD = [sys.executable, "-m", "fullshard.cli.main"]


def call(*arguments, **options):
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [*FULLSHARD, *arguments], capture_output=True, text=True, env=environment, check=False, **options
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """What a finished run leaves, without the time it takes: a model, its tokenizer, and how it was configured."""
    directory = tmp_path_factory.mktemp("run")
    config = RunConfig.model_validate(
        settings(
            directory,
            evaluation={"metric": "accuracy", "metrics": ["chrf", "perplexity"], "max_new_tokens": 4, "num_beams": 2},
            data__source_prefix="route: ",
            data__cache_dir=str(directory / "cache"),
        )
    )
    texts = [line for name in ("train", "held_out") for line in (directory / f"{name}.csv").read_text().split("\n")]
    tokenizer = train_tokenizer([*texts, "route: "], 60)
    out = directory / "out"
    build_model(MODEL, tokenizer, seed=1).save_pretrained(out)
    tokenizer.save_pretrained(out)
    (out / "summary.json").write_text(json.dumps({"config": config.as_plain()}))
    return out


def test_a_finished_run_is_measured_on_two_ranks_and_one_rank_predicts_the_same(run, tmp_path):
    done = call("evaluate", str(run), "--json")
    assert done.returncode == 0, done.stderr
    values = json.loads(done.stdout)
    assert json.loads((run / "evaluation" / "evaluation.json").read_text()) == values
    assert values["world_size"] == 2
    assert values["rows"] == 7
    assert list(values["metrics"]) == ["accuracy", "chrf", "perplexity"]
    assert values["baseline"] == pytest.approx(2 / 7)
    assert sum(rows for *_, rows in values["confusion"]["cells"]) == 7
    records = read_jsonl(run / "evaluation" / "predictions.jsonl")
    assert all(record.keys() == {"input", "prediction", "references"} for record in records)

    lines = "\n".join(record["input"] for record in [records[0], {"input": ""}, *records, records[0]]) + "\n"
    done = call("predict", str(run), input=lines)
    assert done.returncode == 0, done.stderr
    written = [json.loads(line) for line in done.stdout.splitlines()]
    assert any([record.pop("truncated", False) for record in written]), "the sources' limit is low"  # all are popped
    expected = [{"input": record["input"], "prediction": record["prediction"]} for record in records]
    empty = {"input": "", "prediction": None, "problem": "it is empty"}
    assert written == [expected[0], empty, *expected, expected[0]], "one for each line, whatever is in it"
    assert "1 of 10 rows cannot be used" in done.stderr
    assert "The first is line 2: it is empty" in done.stderr


def test_predictions_have_the_format_of_the_suffix_and_survive_head(run, tmp_path):
    rows = tmp_path / "rows.txt"
    rows.write_text("where is my card\n\n" * 300)
    done = call("predict", str(run), str(rows), "-o", str(tmp_path / "out.txt"))
    assert done.returncode == 0, done.stderr
    assert len((tmp_path / "out.txt").read_text().split("\n")) == 601
    done = call("predict", str(run), str(rows), "-o", str(tmp_path / "out.csv"))
    assert (tmp_path / "out.csv").read_text().startswith("input,prediction,problem,truncated\nwhere is my card,")
    command = f"{' '.join(FULLSHARD)} predict {run} {rows} 2> {tmp_path / 'err'} | head -n 1; exit ${{PIPESTATUS[0]}}"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=environment, check=False)
    assert json.loads(done.stdout)["input"] == "where is my card"
    assert done.returncode in (0, 141), "141 where head ended before the last rows were written"
    assert "Traceback" not in (tmp_path / "err").read_text()
    assert "Broken" not in (tmp_path / "err").read_text()
