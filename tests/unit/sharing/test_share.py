"""``fullshard share``: what is published, in one commit; each failure is one sentence with a remedy."""

import json
import re
import threading

import pytest
import torch
from huggingface_hub import ModelCard, constants
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from fullshard.program.cli import main as cli
from fullshard.program.config import RunConfig
from fullshard.program.models import build_model, train_tokenizer
from fullshard.program.sharing import hub as uploads
from support.alone import finish
from support.fake_hub import TOKEN, Repository
from support.tiny_run import MODEL, read_jsonl, settings

REPO = "ada/mine"


def share(run, *arguments):
    return cli.main(["share", str(run), "--repo", REPO, *arguments])


def test_a_run_is_published_in_one_commit(run, hub, capsys, tmp_path):
    assert share(run, "--json") == 0
    captured = capsys.readouterr()
    values = json.loads(captured.out)
    files = hub.files(REPO)
    assert sorted(files) == sorted(one["name"] for one in values["files"])
    assert len(hub.repositories[REPO].commits) == 2, "the Hub's own, and one of ours"
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= set(files)
    assert not {"run.json", "summary.json", "metrics.jsonl", "predictions.jsonl", "trace.json"} & set(files)
    assert not [name for name in files if "checkpoint" in name or "optimizer" in name or name.endswith(".csv")]
    assert values["bytes"] == sum(map(len, files.values()))
    assert values["licences"] == ["cc-by-4.0 for the data"]
    assert captured.err.index("uploading to ada/mine (public") < captured.err.index("uploaded to")
    there = tmp_path / "there"
    for name, body in files.items():
        (there / name).parent.mkdir(parents=True, exist_ok=True)
        (there / name).write_bytes(body)
    AutoModelForSeq2SeqLM.from_pretrained(there)
    AutoTokenizer.from_pretrained(there)
    assert ModelCard.load(there / "README.md").data.library_name == "transformers"


def test_texts_of_rows_stay_here_unless_asked_for(run, hub, capsys):
    rows = read_jsonl(run / "predictions.jsonl")
    texts = [row["input"] for row in rows]
    assert any(text in (run / "README.md").read_text() for text in texts), "the card here has samples"
    assert share(run) == 0
    published = b"".join(body for name, body in hub.files(REPO).items() if not name.startswith("tokenizer")).decode(
        "latin1"
    )
    assert [text for text in texts if text in published] == []
    assert "always '" not in published
    card = hub.files(REPO)["README.md"].decode()
    assert "predictions on held-out rows equal a reference, " in card
    assert "--with-samples keeps them" in capsys.readouterr().out
    assert share(run, "--with-samples") == 0
    kept = hub.files(REPO)["README.md"].decode()
    assert any(text in kept for text in texts)
    assert 'path = "ada/mine"\n' in kept
    assert share(run, "--with-data") == 0
    files = hub.files(REPO)
    assert {"data/train/train.csv", "data/held_out/held_out.csv", "predictions.jsonl"} <= set(files)


def test_a_dry_run_contacts_nobody(run, hub, capsys, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    assert share(run, "--dry-run", "--private") == 0
    out = capsys.readouterr().out
    assert re.search(r"would upload to ada/mine \(private\): \d+ files, ", out)
    assert "licence: cc-by-4.0 for the data" in out
    assert hub.requests == []


def test_an_edited_card_is_published_as_it_is_but_not_with_texts_of_rows(run, hub, capsys):
    rows = read_jsonl(run / "predictions.jsonl")
    long = next(row["input"] for row in rows if len(row["input"]) >= 16)
    (run / "README.md").write_text(f"---\nlicense: mit\n---\n# Mine\n\n| {long} |\n")
    assert share(run) == 2
    assert "README.md, which you edited, has texts of 1 held-out rows" in capsys.readouterr().err
    (run / "README.md").write_text("---\nlicense: mit\n---\n# Mine\n")
    assert share(run) == 0
    assert hub.files(REPO)["README.md"] == (run / "README.md").read_bytes()
    assert "licence: mit for the model, by the card; cc-by-4.0 for the data" in capsys.readouterr().out


def test_a_file_with_a_token_is_refused(run, hub, capsys):
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps({**config, "token": TOKEN}))
    assert share(run) == 2
    captured = capsys.readouterr()
    assert "config.json has a token of the Hugging Face Hub in it" in captured.err
    assert TOKEN not in captured.err + captured.out
    assert hub.requests == []


def test_the_token_is_in_no_file_and_no_line(run, hub, capsys):
    """Not in what is printed, not in the run's files, not in the repository; only in the headers of requests."""
    assert share(run, "--json") == 0
    hub.before = lambda request, count: request.reply(403, {"error": f"no rights for {TOKEN}"}) or True
    assert share(run, "--json") == 12
    captured = capsys.readouterr()
    assert TOKEN not in captured.out + captured.err
    assert "(the token)" in captured.err
    assert [path for path in run.rglob("*") if path.is_file() and TOKEN.encode() in path.read_bytes()] == []
    assert [name for name, body in hub.files(REPO).items() if TOKEN.encode() in body] == []
    assert {path for _, path, token in hub.requests if token is None} <= {
        path for _, path, _ in hub.requests if "/lfs/" in path
    }


def test_the_second_upload_changes_nothing_and_sends_nothing(run, hub, capsys):
    assert share(run) == 0
    sent = list(hub.sent)
    assert share(run) == 0
    assert hub.sent == sent
    assert len(hub.repositories[REPO].commits) == 2
    assert "already up to date" in capsys.readouterr().out


def test_files_of_an_earlier_model_go_and_others_stay(run, hub, capsys):
    hub.repositories[REPO] = Repository(private=False)
    earlier = {"model-00001-of-00002.safetensors": b"old", "adapter_config.json": b"{}", "notes/mine.txt": b"mine"}
    hub.repositories[REPO].commits.append(("1" * 40, {**hub.repositories[REPO].files, **earlier}))
    assert share(run) == 0
    files = hub.files(REPO)
    assert "notes/mine.txt" in files
    assert not {"model-00001-of-00002.safetensors", "adapter_config.json"} & set(files)
    assert "deleted there, not part of this model: adapter_config.json" in capsys.readouterr().out


def test_a_public_repository_is_refused_where_a_private_one_is_wanted(run, hub, capsys):
    assert share(run, "--private") == 0
    assert hub.repositories[REPO].private
    hub.repositories[REPO].private = False
    assert share(run, "--private") == 2
    assert "ada/mine exists and is public, but it must be private" in capsys.readouterr().err


@pytest.mark.parametrize("repo", ["mine", "ada/mi ne", "a/b/c", "ada/..", "ada/mine.git"])
def test_a_wrong_name_is_refused(repo, run, hub, capsys):
    assert cli.main(["share", str(run), "--repo", repo]) == 2
    assert "is named owner/name" in capsys.readouterr().err
    assert hub.requests == []


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")  # peft's own use of the name
def test_an_adapter_is_published_as_it_is_or_merged(tmp_path, hub, capsys):
    """Merged: one model that predicts as base and adapter do, with a card for it, and nothing left of the adapter."""
    base, model = tmp_path / "little-t5", {"type": "lora", "r": 2}
    tokenizer = train_tokenizer(["where is my card", "i lost it", "what is the rate", "card_arrival lost_card"], 60)
    build_model(MODEL, tokenizer, seed=1).save_pretrained(base)
    tokenizer.save_pretrained(base)
    config = RunConfig.model_validate(
        settings(tmp_path, training__max_steps=2, model={"path": str(base), "adapter": model}, data__max_eval_samples=3)
    )
    finish(config)
    assert share(config.output_dir) == 0
    files = hub.files(REPO)
    assert {"adapter_model.safetensors", "adapter_config.json"} <= set(files)
    assert "model.safetensors" not in files
    assert "library_name: peft" in files["README.md"].decode()
    assert share(config.output_dir, "--merge") == 0
    files = hub.files(REPO)
    assert not {"adapter_model.safetensors", "adapter_config.json"} & set(files)
    card = files["README.md"].decode()
    assert "library_name: transformers" in card
    assert "PeftModel" not in card
    assert "little-t5 with a lora adapter merged into it, which alone was trained" in card
    there = tmp_path / "there"
    there.mkdir()
    for name, body in files.items():
        (there / name).write_bytes(body)
    inputs = tokenizer("where is my card", return_tensors="pt")
    inputs["decoder_input_ids"] = torch.zeros(1, 1, dtype=torch.long)
    adapted = PeftModel.from_pretrained(AutoModelForSeq2SeqLM.from_pretrained(base), config.output_dir)
    merged = AutoModelForSeq2SeqLM.from_pretrained(there)
    torch.testing.assert_close(merged(**inputs).logits, adapted(**inputs).logits, atol=1e-5, rtol=1e-5)
    assert not (config.output_dir / "merged.tmp").exists()


def test_a_run_of_several_sets_is_published_with_their_card(tmp_path, capsys):
    values = settings(tmp_path, training__max_steps=1)
    data = values["data"]
    one = {key: data.pop(key) for key in ("train_file", "validation_file", "source_column", "target_column")}
    data["sets"] = {"cards": one, "others": dict(one)}
    config = RunConfig.model_validate(values)
    finish(config)
    assert share(config.output_dir, "--dry-run") == 0
    assert "would upload to ada/mine" in capsys.readouterr().out


def test_merging_needs_an_adapter(run, hub, capsys):
    assert share(run, "--merge") == 2
    assert "--merge is for a model with an adapter" in capsys.readouterr().err


def test_a_run_that_is_not_finished_is_refused(run, hub, capsys):
    (run / "checkpoints" / "finished.json").unlink()
    assert share(run) == 9
    assert "is not the output_dir of a finished run. `fullshard train`" in capsys.readouterr().err
    assert cli.main(["share", str(run / "nowhere"), "--repo", REPO]) == 9


def one_sentence(capsys):
    err = capsys.readouterr().err
    assert "Traceback" not in err
    (line,) = [line for line in err.splitlines() if line.strip()]
    assert line.startswith("HubError: ")
    return line


@pytest.mark.parametrize(
    ("status", "at", "text"),
    [
        (401, "/api/models/", "The Hub does not accept the token (HTTP 401: no). Make one that may write at https://"),
        (403, "/api/repos/create", "The token may not write to ada/mine (HTTP 403: no). Use a token of its owner"),
        (403, "/commit/", "The token may not write to ada/mine (HTTP 403: no). Use a token of its owner"),
        (404, "/api/repos/create", "The Hub has no ada/mine, or no such owner (HTTP 404: no). Correct the name"),
        (409, "/commit/", "ada/mine was changed by somebody else meanwhile and is not overwritten (HTTP 409: no). Run"),
        (412, "/commit/", "ada/mine was changed by somebody else meanwhile"),
        (413, "/commit/", "The Hub refused the upload to ada/mine (HTTP 413: no)"),
        (
            429,
            "/preupload/",
            "The Hub limits the number of requests (HTTP 429: no). Wait 7 s. Run the same command again",
        ),
        (500, "/commit/", "The Hub failed, and ada/mine is as before (HTTP 500: no)"),
        (503, "/lfs/", "The Hub failed, and ada/mine is as before (HTTP 503"),
        (502, "objects/batch", "The Hub failed, and ada/mine is as before (HTTP 502: no)"),
    ],
)
def test_each_refusal_is_one_sentence_and_the_command_completes_it_later(status, at, text, run, hub, capsys):
    def refuse(request, count):
        if at in request.path:
            request.body()  # closing with an unread body resets the connection, and the answer may be lost
            request.close_connection = True
            request.reply(status, {"error": "no"}, Retry_After="7")
            return True
        return False

    hub.before = refuse
    assert share(run) == 12
    assert text in one_sentence(capsys)
    assert not hub.files(REPO)
    hub.before = lambda request, count: False
    assert share(run) == 0
    assert "model.safetensors" in hub.files(REPO)


@pytest.mark.parametrize("at", ["/api/models/", "/lfs/", "/commit/"])
def test_a_cut_connection_is_one_sentence(at, run, hub, capsys):
    hub.before = lambda request, count: at in request.path and (request.cut() or True)
    assert share(run) == 12
    line = one_sentence(capsys)
    assert f"The connection to the Hub at {hub.url} failed: " in line
    assert "Check the network. Run the same command again" in line
    assert not hub.files(REPO)


@pytest.mark.parametrize("at", ["/api/models/", "/commit/"])
def test_a_silent_hub_is_given_up(at, run, hub, capsys, monkeypatch):
    monkeypatch.setattr(uploads, "LIMIT_S", 0.3)
    ended = threading.Event()
    hub.before = lambda request, count: at in request.path and ended.wait(30)
    try:
        assert share(run) == 12
    finally:
        ended.set()
    assert "did not answer within 0.3 s" in one_sentence(capsys)


def test_no_hub_at_all_is_one_sentence(run, hub, capsys, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert share(run) == 12
    assert "The connection to the Hub at http://127.0.0.1:9 failed" in one_sentence(capsys)


def test_no_token_and_offline_are_said(run, hub, capsys, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert share(run) == 12
    assert "HF_HUB_OFFLINE is set, so the Hub was not contacted. Unset it" in one_sentence(capsys)
    monkeypatch.delenv("HF_TOKEN")
    assert share(run) == 12
    assert "There is no token of the Hugging Face Hub. Make one that may write at https://" in one_sentence(capsys)
    assert hub.requests == []


def test_a_commit_of_somebody_else_is_not_overwritten(run, hub, capsys):
    assert share(run) == 0

    def interfere(request, count):
        if "/commit/" in request.path:
            one = hub.repositories[REPO]
            one.commits.append(("2" * 40, {**one.files, "theirs.txt": b"theirs"}))
        return False

    save_file({"changed": load_file(run / "model.safetensors")["shared.weight"]}, run / "model.safetensors")
    hub.before = interfere
    assert share(run) == 12
    assert "was changed by somebody else meanwhile" in one_sentence(capsys)
    assert hub.repositories[REPO].head == "2" * 40
    hub.before = lambda request, count: False
    assert share(run) == 0
    assert hub.files(REPO)["theirs.txt"] == b"theirs"
