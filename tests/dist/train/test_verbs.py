"""``fullshard evaluate`` and ``predict`` through the command line: own ranks, a finished run, standard input."""

import csv
import json
import os
import pty
import subprocess

import pytest

from fullshard.program.config import RunConfig
from fullshard.program.models import build_model, train_tokenizer
from support.processes import FULLSHARD, apart, call
from support.tiny_run import MODEL, read_jsonl, settings

pytestmark = [pytest.mark.dist, pytest.mark.slow]


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
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=apart(), check=False)
    assert json.loads(done.stdout)["input"] == "where is my card"
    assert done.returncode in (0, 141), "141 where head ended before the last rows were written"
    assert "Traceback" not in (tmp_path / "err").read_text()
    assert "Broken" not in (tmp_path / "err").read_text()


def test_predictions_for_a_table_keep_its_columns_and_its_delimiter(run, tmp_path):
    rows = tmp_path / "rows.csv"
    rows.write_text("id;text;note\n007;where is my card;a,b\n8;;empty\n9;i lost it;\n")
    done = call("predict", str(run), str(rows), "-o", str(tmp_path / "out.csv"))
    assert done.returncode == 0, done.stderr
    with (tmp_path / "out.csv").open(newline="") as file:
        found = list(csv.DictReader(file, delimiter=";"))
    assert list(found[0]) == ["id", "text", "note", "prediction", "problem", "truncated"]
    made = [row.pop("prediction") for row in found]
    assert [list(row.values())[:4] for row in found] == [
        ["007", "where is my card", "a,b", ""],
        ["8", "", "empty", "column 'text' is empty"],
        ["9", "i lost it", "", ""],
    ]
    printed = [json.loads(line) for line in call("predict", str(run), str(rows)).stdout.splitlines()]
    assert [row["prediction"] or "" for row in printed] == made
    assert [row.get("truncated", False) for row in printed] == [row["truncated"] == "true" for row in found]
    assert list(printed[0].items())[:4] == [*list(found[0].items())[:3], ("prediction", made[0])]


def test_a_table_that_is_not_utf_8_is_predicted_and_measured_or_refused(run, tmp_path):
    table = "text,category\nwhere is my café 1,card_arrival\ni lost it,lost_card\n"
    for name, codec in (("a", "utf-8"), ("b", "windows-1252"), ("c", "utf-16")):
        (tmp_path / f"{name}.csv").write_text(table, encoding=codec)
    right, found = (call("predict", str(run), str(tmp_path / f"{name}.csv")) for name in "ab")
    assert right.returncode == found.returncode == 0, found.stderr
    assert found.stdout == right.stdout
    assert "not UTF-8: read as windows-1252 (--encoding), with lines such as 'where is my café 1" in found.stderr
    refused = call("predict", str(run), str(tmp_path / "c.csv"))
    assert (refused.returncode, refused.stdout) == (3, "")
    assert "iconv -f utf-16 -t utf-8), or give --encoding utf-16" in refused.stderr
    assert call("predict", str(run), str(tmp_path / "c.csv"), "--encoding", "utf-16").stdout == right.stdout
    more = [[str(tmp_path / "b.csv")], [str(tmp_path / "c.csv"), "--encoding", "utf-16"]]
    for number, data in enumerate(more):
        done = call("evaluate", str(run), "--data", *data, "--output", str(tmp_path / f"of_{number}"), "--json")
        assert done.returncode == 0, done.stderr
        measured = read_jsonl(tmp_path / f"of_{number}" / "predictions.jsonl")
        assert [row["input"] for row in measured] == ["where is my café 1", "i lost it"]


def test_chat_answers_a_pipe_as_predict_does(run, tmp_path):
    lines = "where is my card\n\ni lost it\n"
    predicted = call("predict", str(run), input=lines).stdout
    done = call("chat", str(run), "--json", input=lines.replace("i lost", "/reset\ni lost"))
    assert done.returncode == 0, done.stderr
    assert done.stdout == predicted
    assert "out: T5ForConditionalGeneration, " in done.stderr
    assert "parameters in float32, on the CPU" in done.stderr
    texts = [json.loads(line)["prediction"] or "" for line in predicted.splitlines()]
    assert call("chat", str(run), input=lines).stdout.splitlines() == texts
    best = run / "best"
    best.mkdir()
    for file in run.glob("*.*"):
        (best / file.name).write_bytes(file.read_bytes())
    (best / "summary.json").rename(run / "run.json")
    for verb in (["predict"], ["chat", "--json"]):
        done = call(verb[0], str(best), *verb[1:], input=lines)
        assert done.stdout == predicted, "with the prefix and the lengths of the run around it"
        assert f"are those of the run in {run}" in done.stderr


def test_chat_in_a_terminal_survives_ctrl_c_in_an_answer(run, tmp_path):
    for file in run.glob("*.*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    summary = json.loads((run / "summary.json").read_text())
    endless = {"num_beams": 1, "min_new_tokens": 100_000, "max_new_tokens": 100_000}
    summary["config"]["evaluation"] |= endless
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    child, terminal = pty.fork()
    if child == 0:
        os.execve(FULLSHARD[0], [*FULLSHARD, "chat", str(tmp_path), "--temperature", "99"], apart(TERM="dumb"))
    seen, place = "", 0

    def until(mark):
        nonlocal seen, place
        while mark not in seen[place:]:
            seen += os.read(terminal, 4096).decode()
        place = seen.index(mark, place) + len(mark)

    until("> ")
    os.write(terminal, b"\x03")  # at the prompt: another one
    until("> ")
    os.write(terminal, b"where is my card\n")
    until("card\r\n")
    until(" ")  # the answer has begun
    os.write(terminal, b"\x03")
    until("(stopped)")
    until("> ")
    os.write(terminal, b"/quit\n")
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert "each line is answered on its own" in seen
    os.close(terminal)
