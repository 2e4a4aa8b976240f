"""``fullshard init``: from a table to a run file that trains as it is written."""

import builtins
import codecs
import itertools
import json
import sys

import pytest
import yaml
from transformers import AutoModelForSeq2SeqLM

from fullshard.core.testing import run_ranks
from fullshard.errors import DataError
from fullshard.program.cli import main as cli
from fullshard.program.config import load_run
from fullshard.program.data import SourceSpec, read_split
from fullshard.program.starter import Machine, look_at, run_file
from fullshard.program.train import FileSink, train
from fullshard.program.train.reporting.card import CardSink
from fullshard.program.train.setup.prepare import source_spec
from support.tiny_run import LABELS, WORDS


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.setattr(run_file, "is_cached", lambda name: False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def asked(monkeypatch):
    """Types answers for the user, or Enter alone without any; returns the questions."""

    def use(*answers):
        questions, given = [], iter(answers) if answers else itertools.repeat("")
        monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
        monkeypatch.setattr(builtins, "input", lambda text: questions.append(text) or next(given))
        return questions

    return use


def pairs(path):
    rows = [f'"what is thing number {i}, please?","thing {i} is a thing of kind {i % 4}"' for i in range(40)]
    path.write_text("\n".join(["question,answer", *rows]) + "\n")
    return "question", "answer"


def labels(path):
    rows = [f"{WORDS[LABELS[i % 3]]} {i};{LABELS[i % 3]}" for i in range(40)] + [";lost_card"]
    path.write_text("\n".join(["text;label", *rows]) + "\n")
    return "text", "label"


def tickets(path):
    rows = [
        f"T-{i:04d},2024-01-{i % 28 + 1:02d},My parcel number {i} did not come yet,{i % 5},"
        f"We are sorry that parcel {i} is late and look for it"
        for i in range(40)
    ]
    path.write_text("\n".join(["ticket_id,opened,complaint,urgency,our_reply", *rows]) + "\n")
    return "complaint", "our_reply"


@pytest.mark.parametrize("write", [pairs, labels, tickets])
def test_what_it_writes_trains_without_editing(write, tmp_path, done):
    columns = write(tmp_path / "train.csv")
    printed = done("init", "train.csv", "--yes")
    assert f"source: {columns[0]}; target: {columns[1]}; model: new" in printed
    assert "  fullshard train run.yaml\n" in printed
    assert cli.main(["config", "check", "run.yaml"]) == 0
    overrides = ["training.max_steps=1", f"data.cache_dir={tmp_path / 'cache'}", "evaluation.max_new_tokens=2"]
    config = load_run("run.yaml", overrides)
    assert (config.data.source_column, config.data.target_column) == columns
    sinks = [CardSink(config.output_dir, print), FileSink(config.output_dir)]
    summary = train(config, run_ranks(1, lambda comm: comm)[0], sinks)
    assert summary.metric == ("exact_match" if write is not tickets else "rougeL")
    AutoModelForSeq2SeqLM.from_pretrained("runs/train")
    printed = done("share", "runs/train", "--repo", "ada/mine", "--dry-run").partition("would upload to ada/mine")[2]
    assert "  model.safetensors" in printed
    assert "  README.md" in printed
    assert ".csv" not in printed


def test_a_semicolon_and_unusable_rows_are_written_down(tmp_path, capsys):
    labels(tmp_path / "train.csv")
    (tmp_path / "runs").mkdir()
    assert cli.main(["init", "train.csv", "--yes", "--out", "runs/first.yaml"]) == 0
    text = (tmp_path / "runs" / "first.yaml").read_text()
    values = yaml.safe_load(text)["data"]
    assert (values["train_file"], values["delimiter"], values["max_bad_rows"]) == ("../train.csv", ";", 1)
    assert "# rows with an empty or broken cell, which are skipped" in text
    assert "# precision: auto, which is fp32 on this machine: ranks compute on CPUs" in text
    assert load_run("runs/first.yaml").data.train_file.resolve() == tmp_path / "train.csv"
    printed = capsys.readouterr().out
    assert "label: 41 filled, mean 11 characters, longest 13, 3 different" in printed
    assert "1 of 41 rows cannot be used and will be skipped (data.max_bad_rows):\n  1: " in printed
    assert "(line 42)\n" in printed


def test_unusable_rows_are_counted_by_reason(tmp_path, done):
    rows = [f"what is {i},{'' if i % 4 == 3 else i % 3}" for i in range(40)]
    rows[0] += ",one cell more"
    (tmp_path / "train.csv").write_text("\n".join(["question,answer", *rows]) + "\n")
    printed = done("init", "train.csv", "--yes").partition("11 of 40 rows cannot be used")[2].splitlines()
    assert printed[1].startswith("  10: ")
    assert printed[1].endswith("(lines 5, 9, 13, ...)")
    assert printed[2] == "  1: the row has 3 cells, the header 2 (line 2)"
    assert load_run("run.yaml").data.max_bad_rows == 11


def test_tables_of_one_name_have_run_directories_of_their_own(tmp_path, capsys):
    pairs(tmp_path / "a.csv")
    rows = "".join(json.dumps({"question": f"what is {i}", "answer": f"thing {i}"}) + "\n" for i in range(40))
    (tmp_path / "a.jsonl").write_text(rows)
    (tmp_path / "b.jsonl").write_text(rows)
    (tmp_path / "b.yaml").write_text("no table")
    for name in ("a.csv", "a.jsonl", "b.jsonl"):
        assert cli.main(["init", name, "--yes", "--out", f"{name}.yaml"]) == 0
    found = [load_run(f"{name}.yaml").output_dir.name for name in ("a.csv", "a.jsonl", "b.jsonl")]
    assert found == ["a-csv", "a-jsonl", "b"]
    assert "cannot be used" not in capsys.readouterr().out


def test_tables_of_two_directories_with_a_usual_name_have_run_directories_of_their_own(tmp_path):
    found = []
    for name in ("train.csv", "news/train.csv", "bank/Train.csv", "bank/letters.csv"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        pairs(tmp_path / name)
        assert cli.main(["init", name, "--yes", "--out", f"{len(found)}.yaml"]) == 0
        found.append(str(load_run(f"{len(found)}.yaml").output_dir))
    assert found == ["runs/train", "runs/news-train", "runs/bank-Train", "runs/letters"]


def test_a_table_of_another_encoding_is_read_in_it_and_said(tmp_path, done):
    rows = [f"Frage {i} {'über' if i % 2 else 'zur'} Karte;Karte {i % 4}\n" for i in range(40)]
    (tmp_path / "train.csv").write_text("frage;antwort\n" + "".join(rows), encoding="latin-1")
    said = done("init", "train.csv", "--yes")
    assert "not UTF-8: read as windows-1252 (data.encoding), with lines such as 'Frage 1 über Karte;Karte 1'" in said
    assert "cannot be used" not in said
    assert load_run("run.yaml").data.encoding == "windows-1252"


@pytest.mark.parametrize(("name", "codec"), [("a.csv", "utf-16"), ("a.csv", "utf-16-le"), ("a.jsonl", "utf-16")])
def test_utf_16_is_read_with_a_mark_and_without(name, codec, tmp_path, done):
    rows = [json.dumps({"frage": f"über {i}", "antwort": f"Karte {i}"}, ensure_ascii=False) for i in range(40)]
    table = rows if name == "a.jsonl" else ["frage,antwort", *(f"über {i},Karte {i}" for i in range(40))]
    (tmp_path / name).write_text("\n".join(table), encoding=codec)
    assert f"read as {codec} (data.encoding)" in done("init", name, "--yes")
    data = load_run("run.yaml").data
    assert (data.encoding, data.source_column, data.target_column) == (codec, "frage", "antwort")


def test_an_encoding_that_is_named_is_taken_and_one_that_does_not_exist_is_refused(tmp_path, done, refused):
    table = "question,topic\n" + "".join(f"{i} ÊÎ,{'ab'[i % 2]}\n" for i in range(40))
    (tmp_path / "a.csv").write_text(table, encoding="mac-roman")
    assert "Expected" not in done("init", "a.csv", "--yes", "--encoding", "mac-roman")
    assert load_run("run.yaml").data.encoding == "mac-roman"
    with pytest.raises(SystemExit):
        cli.main(["init", "a.csv", "--yes", "--encoding", "klingon"])


def test_a_table_that_says_it_is_utf_8_is_not_taken_for_windows_1252(tmp_path, refused):
    """The mark would be the first letters of the first column."""
    rows = "".join(f"über {i};Karte {i % 4}\n" for i in range(40))
    (tmp_path / "a.csv").write_bytes(codecs.BOM_UTF8 + f"frage;antwort\n{rows}".encode("windows-1252"))
    assert "40 of 41 lines cannot be read, the first of them line 2: byte 0xfc is not UTF-8." in refused(
        3, "init", "a.csv", "--yes"
    )


@pytest.mark.parametrize("also", ["größer".encode(), b"\x81"])
def test_a_table_of_two_encodings_is_refused_not_thinned_out(also, tmp_path, refused):
    rows = b"".join(b"Frage %d \xfcber Karte;Karte %d\n" % (i, i % 4) for i in range(20))
    (tmp_path / "train.csv").write_bytes(b"frage;antwort\nist " + also + b";nein\n" + rows)
    error = refused(3, "init", "train.csv", "--yes")
    if also == b"\x81":
        assert (
            "windows-1252 by most of its lines, but 1 of 22 lines are not, the first of them line 2: its bytes 81 "
            in error
        )
    else:
        assert "20 of 22 lines cannot be read, the first of them line 3: byte 0xfc is not UTF-8." in error
    assert "--encoding NAME" in error
    assert not (tmp_path / "run.yaml").exists()


def test_plain_text_trains_without_editing_and_asks_for_the_model_alone(tmp_path, done, asked):
    texts = [f"{WORDS[LABELS[i % 3]]} {i} and then {WORDS[LABELS[i % 2]]} again" for i in range(60)]
    (tmp_path / "texts.csv").write_text("\n".join(["body", *texts]) + "\n")
    printed = done("init", "texts.csv", "--yes")
    assert "plain text: body, the only column\nmodel: new" in printed
    config = load_run("run.yaml", ["training.max_steps=1", f"data.cache_dir={tmp_path / 'cache'}"])
    assert (config.data.text_column, config.data.source_column, config.evaluation.metric) == (
        "body",
        None,
        "perplexity",
    )
    sinks = [CardSink(config.output_dir, print), FileSink(config.output_dir)]
    summary = train(config, run_ranks(1, lambda comm: comm)[0], sinks)
    assert summary.metric == "perplexity"
    card = (tmp_path / "runs/texts/README.md").read_text()
    assert "trained on the texts of `body`, which have no targets" in card
    assert "were cut to that length" not in card
    questions = asked()
    assert cli.main(["init", "texts.csv", "--out", "second.yaml"]) == 0
    assert len(questions) == 1


@pytest.mark.parametrize("more", [{}, {"id": 1, "topic": "cards"}])
def test_conversations_train_without_editing(more, tmp_path, done):
    talks = [
        [
            {"role": role, "content": f"{text} {i}"}
            for role, text in zip(("user", "assistant") * 2, ("a", "b" * 200, "c", "d"), strict=True)
        ]
        for i in range(40)
    ]
    (tmp_path / "talks.jsonl").write_text("".join(json.dumps({**more, "messages": talk}) + "\n" for talk in talks))
    printed = done("init", "talks.jsonl", "--yes")
    assert "40 rows\n  messages: each row is a conversation\n" in printed
    assert "model: new" in printed
    text = (tmp_path / "run.yaml").read_text()
    config = load_run("run.yaml", ["training.max_steps=1", f"data.cache_dir={tmp_path / 'cache'}"])
    held_out = int(text.split("validation_fraction: 0.1  # ")[1].split()[0])
    # two ranks, a row for each of the two answers
    assert f"about {(40 - held_out) * 2 // 2:,} steps an epoch" in text
    assert config.data.source_column is None
    assert config.data.max_target_length == 96  # of the longest answer, which is not the last
    summary = train(config, run_ranks(1, lambda comm: comm)[0], [FileSink(config.output_dir)])
    assert summary.steps == 1


def test_conversations_ask_for_the_model_alone(tmp_path, asked):
    turns = [{"from": "human", "value": "where?"}, {"from": "gpt", "value": "there"}]
    (tmp_path / "talks.jsonl").write_text(f"{json.dumps({'conversations': turns})}\n" * 20)
    questions = asked()
    assert cli.main(["init", "talks.jsonl"]) == 0
    assert len(questions) == 1


def test_rows_too_few_to_hold_out_are_not_evaluated(tmp_path):
    (tmp_path / "two.jsonl").write_text('{"prompt": "a", "completion": "b"}\n{"prompt": "a", "completion": "c"}\n')
    assert cli.main(["init", "two.jsonl", "--yes"]) == 0
    assert load_run("run.yaml").training.eval_strategy == "no"


def test_nothing_is_overwritten_and_a_pipe_is_not_asked(tmp_path, monkeypatch, refused):
    pairs(tmp_path / "train.csv")
    (tmp_path / "run.yaml").write_text("mine")
    assert "--yes does not overwrite" in refused(2, "init", "train.csv", "--yes")
    monkeypatch.setattr(sys.stdin, "isatty", lambda: False, raising=False)
    assert "DATA --yes` to take every default" in refused(2, "init", "train.csv")
    assert cli.main(["init", "gone.csv", "--yes", "--out", "other.yaml"]) == 3
    assert (tmp_path / "run.yaml").read_text() == "mine"


def test_it_asks_at_most_four_questions(tmp_path, capsys, asked):
    tickets(tmp_path / "train.csv")
    (tmp_path / "run.yaml").write_text("mine")
    (tmp_path / "my-t5").mkdir()
    questions = asked("nothing", "complaint", "", "./nope", "my-t5", "maybe", "yes")
    assert cli.main(["init", "train.csv"]) == 0
    assert len(dict.fromkeys(questions)) == 4
    said = capsys.readouterr().out
    assert "Expected one of the columns ticket_id, opened, complaint, urgency, our_reply; got 'nothing'." in said
    assert "There is no nope" in said
    config = load_run("run.yaml")
    assert config.model.path == str(tmp_path / "my-t5")
    assert (config.data.source_column, config.data.target_column) == ("complaint", "our_reply")


def test_no_keeps_the_file(tmp_path, refused, asked):
    pairs(tmp_path / "train.csv")
    (tmp_path / "run.yaml").write_text("mine")
    asked()
    assert "run.yaml was left unchanged" in refused(2, "init", "train.csv")
    assert (tmp_path / "run.yaml").read_text() == "mine"


def test_a_known_combination_of_columns_is_kept(tmp_path):
    rows = [{"instruction": f"say {i}", "input": "", "output": f"this is {i}"} for i in range(30)]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert look_at(tmp_path / "chat.jsonl").by_name == (("instruction", "input"), "output")
    assert cli.main(["init", "chat.jsonl", "--yes"]) == 0
    assert load_run("run.yaml").data.source_column is None


def test_the_suggested_model_fits():
    sizes = {
        name: Machine(gpus, memory << 30, cores=2).fitting
        for name, gpus, memory in (("cpu", 0, 512), ("small", 1, 8), ("h100", 1, 80), ("two", 2, 160))
    }
    assert sizes == {
        "cpu": "google/flan-t5-small",
        "small": "google/flan-t5-base",
        "h100": "google/flan-t5-xl",
        "two": "google/flan-t5-xl",
    }


def test_quotes_that_are_text_are_told_and_no_row_is_lost(tmp_path, done):
    rows = "".join(f'"so {i}\tx\nnice {i}\ty\nday {i}\ty\nreally "\tx\n' for i in range(10))
    (tmp_path / "train.tsv").write_text(f"text\tlabel\n{rows}")
    printed = done("init", "train.tsv", "--yes")
    assert "train.tsv: tsv, 40 rows" in printed
    assert "(data.quoting: none)" in printed
    assert "lines 2 to 5 " in printed


def test_objects_are_columns_by_the_names_inside(tmp_path):
    rows = [{"translation": {"en": f"the card {i} is lost", "de": f"die Karte {i} ist weg"}} for i in range(40)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert cli.main(["init", "train.jsonl", "--yes"]) == 0
    config = load_run("run.yaml")
    assert {config.data.source_column, config.data.target_column} == {"translation.en", "translation.de"}
    assert cli.main(["config", "check", "run.yaml"]) == 0


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def sentence(what, i):
    return f"this is {what} number {i}, which is long enough to be a text"


TABLES = {
    # columns with their texts, the answers to the two questions
    "preference of short texts": (("prompt", "response_chosen", "response_rejected"), ("prompt", "response_chosen")),
    "annotations": (("text", "summary.suggestion", "summary.response"), ("text", "summary.response")),
    "suggestion last": (("text", "response", "suggestion"), ("text", "response")),
    "distractors": (("stem", "correct_one", "distractor1", "distractor2"), ("stem", "correct_one")),
    "draft": (("brief", "final", "draft"), ("brief", "final")),
    "answer before its question": (("reply", "prompt"), ("prompt", "reply")),
}


@pytest.mark.parametrize("what", TABLES)
def test_a_target_that_is_not_clear_is_asked_for_and_not_guessed(what, tmp_path, refused, asked):
    columns, answers = TABLES[what]
    text = (lambda name, i: f"{name[:3]} {i}") if "short" in what else sentence
    write(tmp_path / "train.jsonl", [{name: text(name, i) for name in columns} for i in range(40)])
    said = refused(3, "init", "train.jsonl", "--yes")
    assert all(repr(name) in said for name in columns)
    assert not (tmp_path / "run.yaml").exists()
    questions = asked("", answers[0], "", answers[1], "new")
    assert cli.main(["init", "train.jsonl"]) == 0
    assert not any("[" in question for question in questions[:4])
    config = load_run("run.yaml")
    assert (config.data.source_column, config.data.target_column) == answers
    assert cli.main(["config", "check", "run.yaml"]) == 0


@pytest.mark.parametrize(("model", "objective"), [("new", "orpo"), ("a-model", "dpo")])
def test_preferences_are_recognised(model, objective, tmp_path, asked, monkeypatch):
    columns = ("Prompt", "chosen", "rejected", "score")
    write(tmp_path / "train.jsonl", [{name: sentence(name, i) for name in columns} for i in range(40)])
    (tmp_path / "a-model").mkdir()
    (tmp_path / "a-model" / "config.json").write_text('{"model_type": "t5"}')
    asked("", "", model)
    assert cli.main(["init", "train.jsonl"]) == 0
    config = load_run("run.yaml")
    assert (config.data.source_column, config.data.target_column) == ("Prompt", "chosen")
    assert config.training.objective == objective
    assert config.evaluation.every_metric == ("rewards/accuracies", "rewards/margins")
    assert "# not used: score" in (tmp_path / "run.yaml").read_text()


def test_pairs_of_conversations_are_recognised(tmp_path, asked, capsys):
    rows = []
    for i in range(40):
        question = {"role": "user", "content": sentence("question", i)}
        chosen, rejected = ([question, {"role": "assistant", "content": sentence(kind, i)}] for kind in ("a", "b"))
        rows.append({"prompt": "x", "chosen": chosen, "rejected": rejected, "messages": chosen})
    write(tmp_path / "train.jsonl", rows)
    asked("new")
    assert cli.main(["init", "train.jsonl"]) == 0
    assert "chosen and rejected: each row is a conversation" in capsys.readouterr().out
    config = load_run("run.yaml")
    assert (config.training.objective, config.data.target_column) == ("orpo", None)
    assert config.evaluation.every_metric == ("rewards/accuracies", "rewards/margins")
    assert cli.main(["config", "check", "run.yaml"]) == 0


@pytest.mark.parametrize("label", [True, "maybe"])
def test_labels_are_recognised(label, tmp_path, asked):
    labels = (label, not label if label is True else label)
    rows = [{"prompt": sentence("p", i), "completion": sentence("c", i), "label": labels[i % 2]} for i in range(40)]
    write(tmp_path / "train.jsonl", rows)
    asked("", "", "new")
    assert cli.main(["init", "train.jsonl"]) == 0
    config = load_run("run.yaml")
    assert (config.data.source_column, config.data.target_column) == ("prompt", "completion")
    assert config.training.objective == ("kto" if label is True else "sft")
    assert ("# label says whether" in (tmp_path / "run.yaml").read_text()) == (label is True)


def test_squad_is_asked_about_with_the_texts_of_its_answers(tmp_path, refused, asked):
    write(
        tmp_path / "train.jsonl",
        [
            {
                "id": f"{i:x}",
                "title": "Cards",
                "context": sentence("a context", i) * 5,
                "question": sentence("a question", i),
                "answers": {"text": [f"answer {i}", "an answer"], "answer_start": [3, 4]},
            }
            for i in range(40)
        ],
    )
    assert "'answers.text'" in refused(3, "init", "train.jsonl", "--yes")
    asked("question", "answers.text", "new")
    assert cli.main(["init", "train.jsonl"]) == 0
    config = load_run("run.yaml")
    spec = SourceSpec(
        train_file=config.data.train_file,
        source_column=config.data.source_column,
        target_column=config.data.target_column,
    )
    assert read_split(spec, "train").examples[3].references == ("answer 3", "an answer")


@pytest.mark.parametrize(
    ("columns", "pair"),
    [
        (("context", "reply"), ("context", "reply")),
        (("question", "context", "answer"), None),
        (("prompt", "response", "rejected"), ("prompt", "response")),
        (("complaint", "our_reply"), ("complaint", "our_reply")),
        (("text", "label", "label_suggestion"), ("text", "label")),
    ],
)
def test_a_clear_target_is_still_a_default(columns, pair, tmp_path):
    write(tmp_path / "train.jsonl", [{name: sentence(name, i) for name in columns} for i in range(40)])
    assert cli.main(["init", "train.jsonl", "--yes"]) == 0
    config = load_run("run.yaml")
    assert pair in (None, (config.data.source_column, config.data.target_column))


def test_two_answers_alone_are_not_a_pair_for_training(tmp_path):
    write(tmp_path / "train.jsonl", [{"chosen": sentence("a", i), "rejected": sentence("b", i)} for i in range(4)])
    with pytest.raises(DataError, match="which columns are source and target"):
        read_split(SourceSpec(train_file=tmp_path / "train.jsonl"), "train")


@pytest.mark.parametrize(
    ("name", "row", "left"),
    [
        ("history", {"instruction": "say {}", "input": "", "output": "is {}", "history": [["a", "b"]]}, "'history'"),
        ("system", {"instruction": "say {}", "output": "is {}", "system": "be kind"}, "'system'"),
        ("both", {"prompt": "say {}", "completion": "is {}", "system": "x", "history": []}, "'system', 'history'"),
        ("label", {"text": "say {}", "label": "is {}", "Context": "at home"}, "'Context'"),
    ],
)
def test_known_columns_that_are_left_out_are_told(name, row, left, tmp_path, done):
    rows = [{key: cell.format(i) if isinstance(cell, str) else cell for key, cell in row.items()} for i in range(40)]
    write(tmp_path / "train.jsonl", rows)
    assert f"not used: {left}. data.template" in done("init", "train.jsonl", "--yes")
    notes = read_split(SourceSpec(train_file=tmp_path / "train.jsonl"), "train").notes
    assert any(f"not used: {left}. data.template" in note for note in notes)
    assert "# not used: " in (tmp_path / "run.yaml").read_text()


def test_columns_of_conversations_that_are_left_out_are_told(tmp_path, done):
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    rows = [{"messages": turns, "system": "be kind", "system_prompt": "be kind", "history": []} for _ in range(30)]
    write(tmp_path / "train.jsonl", rows)
    assert "not used: 'system_prompt', 'history'. data.template" in done("init", "train.jsonl", "--yes")


@pytest.mark.parametrize(
    ("first", "told"),
    [
        (("where is my card?", "card_arrival"), True),
        (("1", "0.5"), True),
        (("where is my card", "kind 1"), True),
        (("text", "label"), False),
        (("Question", "Answer"), False),
    ],
)
def test_a_header_that_looks_like_a_row_is_told(first, told, tmp_path, done):
    rows = "".join(f"{sentence('a', i)},kind {i % 3}\n".replace(", which", " which") for i in range(40))
    (tmp_path / "train.csv").write_text(f"{first[0]},{first[1]}\n{rows}")
    assert ("the header looks like a row" in done("init", "train.csv", "--yes")) is told
    notes = read_split(SourceSpec(train_file=tmp_path / "train.csv"), "train").notes
    assert any("looks like a row" in note for note in notes) is (told and first[1] != "kind 1")


def talk(i):
    return [{"role": "user", "content": f"q {i}"}, {"role": "assistant", "content": f"a {i}"}]


@pytest.mark.parametrize(
    "row",
    [
        lambda i: {"messages": talk(i), "label": i % 2 == 0},
        lambda i: {"question": f"q {i}", "answer": f"a {i}", "feedback": "good" if i % 2 else "bad"},
        lambda i: {"instruction": "do it", "input": f"q {i}", "output": f"a {i}", "thumbs_up": i % 2},
    ],
)
def test_answers_with_a_label_are_learned_by_kto_with_both_kinds_held_out(row, tmp_path, done):
    write(tmp_path / "train.jsonl", [row(i) for i in range(10)])
    said = done("init", "train.jsonl", "--yes")
    assert "the model starts from random weights" in said
    config = load_run("run.yaml")
    assert (config.training.objective, config.evaluation.metric) == ("kto", "rewards/margins")
    sides = [read_split(source_spec(config.data, "kto"), side).examples for side in ("train", "validation")]
    assert [{one.desirable for one in side} for side in sides] == [{True, False}] * 2
    assert sum(map(len, sides)) == 10
    assert sum(one.desirable for side in sides for one in side) == 5


def test_answers_of_equal_rank_are_asked_about(tmp_path, refused, done, asked):
    rows = [{"prompt": f"q {i}", "response_0": "no", "response_1": "yes", "better_response_id": 1} for i in range(10)]
    write(tmp_path / "train.jsonl", rows)
    assert "--label-column better_response_id" in refused(3, "init", "train.jsonl", "--yes")
    assert not (tmp_path / "run.yaml").exists()
    done("init", "train.jsonl", "--yes", "--label-column", "better_response_id")
    questions = asked("better_response_id", "", "", "new")
    assert cli.main(["init", "train.jsonl", "--out", "second.yaml"]) == 0
    assert "which is better" in questions[0]
    for name in ("run.yaml", "second.yaml"):
        config = load_run(name)
        found = read_split(source_spec(config.data, config.training.objective), "train").examples[0]
        assert (found.source[0], found.target, found.rejected.target) == ("q", "yes", "no")


@pytest.mark.parametrize("kind", ["alpaca", "transcripts"])
def test_pairs_of_other_shapes_are_recognised(kind, tmp_path, done):
    rows = [{"instruction": "do", "input": f"q {i}", "chosen": "yes", "rejected": "no"} for i in range(10)]
    if kind == "transcripts":
        rows = [{side: f"Human: q {i} Assistant: {side}" for side in ("chosen", "rejected")} for i in range(10)]
    write(tmp_path / "train.jsonl", rows)
    done("init", "train.jsonl", "--yes")
    config = load_run("run.yaml")
    sides = [read_split(source_spec(config.data, "orpo"), side).examples for side in ("train", "validation")]
    found = {row.source for side in sides for row in side}
    assert found == {f"do\n\nq {i}" if kind == "alpaca" else f"Human: q {i} Assistant:" for i in range(10)}


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        ({"url": "https://a.org/{}", "timestamp": "2019"}, "text"),
        ({"path": "a/{}.py", "repo_name": "r{}", "license": "mit{}"}, "text"),
        ({"id": "{}", "meta": {"pile_set_name": "web{}"}}, "text"),
        ({"language": "en"}, "text"),  # of one language, which cannot be learned
        ({"id": "{}", "language": "en{}"}, None),
        ({"language": "en{}"}, None),
        ({"url": "https://a.org/{}", "label": "good{}"}, None),
        ({"file_summary": "about {}"}, None),
    ],
)
def test_a_long_text_beside_facts_about_it_is_plain_text(facts, text, tmp_path, done):
    def filled(value, i):
        return {key: filled(one, i) for key, one in value.items()} if isinstance(value, dict) else value.format(i)

    rows = [{"text": f"{WORDS[LABELS[i % 3]]} and so on, row {i}", **filled(facts, i % 2)} for i in range(40)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    said = done("init", "rows.jsonl", "--yes")
    data = load_run("run.yaml").data
    assert data.text_column == text
    assert text is None or "not used: " in said


def test_a_json_list_of_texts_and_files_of_text_are_plain_text(tmp_path, done, refused):
    (tmp_path / "texts.json").write_text(json.dumps([f"row {i} of text" for i in range(40)]))
    done("init", "texts.json", "--yes")
    assert load_run("run.yaml").data.text_column == "text"
    (tmp_path / "book.md").write_text("# A book\n" + "".join(f"\nParagraph {i},\nof two lines.\n" for i in range(40)))
    done("init", "book.md", "--yes", "--out", "book.yaml")
    assert load_run("book.yaml").data.text_column == "text"
    (tmp_path / "table.txt").write_text("text\tlabel\n" + "good\tyes\n" * 40)
    assert "data.format: tsv" in refused(3, "init", "table.txt", "--yes", "--out", "table.yaml")
