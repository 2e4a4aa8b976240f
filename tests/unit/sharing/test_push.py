"""``training.push_to_hub``: uploads of a run never delay, end or damage it, and say how to upload it later."""

import threading

import pytest
from transformers import AutoModelForSeq2SeqLM

from fullshard.program.config import RunConfig
from fullshard.program.sharing import PushSink, push_finished
from support.alone import finish
from support.tiny_run import settings

REPO = "ada/mine"


def config_of(directory, **push):
    wanted = settings(
        directory,
        training__max_steps=4,
        training__eval_strategy="steps",
        training__eval_steps=1,
        training__push_to_hub={"repo": REPO, **push},
    )
    return RunConfig.model_validate(wanted)


def load(hub, directory):
    directory.mkdir()
    for name, body in hub.files(REPO).items():
        (directory / name).write_bytes(body)
    return AutoModelForSeq2SeqLM.from_pretrained(directory)


def test_a_finished_run_is_uploaded(tmp_path, hub):
    config, said = config_of(tmp_path, private=True), []
    finish(config)
    push_finished(config, said.append)
    assert said[-1] == f"model uploaded to {hub.url}/{REPO}"
    assert hub.repositories[REPO].private
    assert "README.md" in hub.files(REPO)
    load(hub, tmp_path / "there")


def test_a_failed_upload_leaves_the_run_and_names_the_command(tmp_path, hub, monkeypatch):
    config, said = config_of(tmp_path, private=True), []
    finish(config)
    hub.before = lambda request, count: request.reply(503) or True
    push_finished(config, said.append)
    assert said[-2].startswith("warning: the model was not uploaded: The Hub failed")
    command = f"fullshard share {config.output_dir} --repo {REPO} --private"
    assert said[-1] == f"the run is complete; to upload it: {command}"
    AutoModelForSeq2SeqLM.from_pretrained(config.output_dir)
    monkeypatch.delenv("HF_TOKEN")
    push_finished(config, said.append)
    assert "There is no token" in said[-2]


def test_the_best_models_on_the_way_are_complete_models(tmp_path, hub):
    """The run is held at each best model until its commit arrives, so that none is skipped."""
    config, said, best = config_of(tmp_path, checkpoints=True), [], []
    committing = threading.Semaphore(0)
    hub.before = lambda request, count: "/commit/" in request.path and committing.release()

    class Paced(PushSink):
        def evaluation(self, report, *, is_best):
            super().evaluation(report, is_best=is_best)
            if is_best:
                best.append(report.step)
                assert committing.acquire(timeout=60)

    sink = Paced(config, said.append)
    finish(config, sink)
    sink.join()
    assert len(hub.repositories[REPO].commits) == 1 + len(best) >= 2
    load(hub, tmp_path / "there")
    assert [line for line in said if "waiting" not in line] == []
    assert not (config.output_dir / "push").exists()
    push_finished(config, said.append)
    assert "README.md" in hub.files(REPO)


def test_training_does_not_wait_for_a_hub_that_does_not_answer(tmp_path, hub):
    config, said, ended = config_of(tmp_path, checkpoints=True), [], threading.Event()
    hub.before = lambda request, count: ended.wait(60) and False
    sink = PushSink(config, said.append)
    summary = finish(config, sink)
    assert (summary.steps, hub.files(REPO)) == (4, None)
    assert len(hub.requests) == 1, "one is being sent, the others wait or are skipped"
    ended.set()
    sink.join()
    push_finished(config, said.append)
    load(hub, tmp_path / "there")


def test_a_hub_that_fails_on_the_way_is_said_and_training_continues(tmp_path, hub):
    config, said = config_of(tmp_path, checkpoints=True), []
    hub.before = lambda request, count: request.reply(403, {"error": "no"}) or True
    sink = PushSink(config, said.append)
    assert finish(config, sink).steps == 4
    sink.join()
    said = [line for line in said if "waiting" not in line]
    assert said
    assert all(line.startswith("warning: the model of step ") for line in said)
    assert all(line.endswith("Training continues.") for line in said)


@pytest.mark.parametrize(
    ("push", "text"),
    [("mine", "expected owner/name, such as ada/my-t5"), ({"repo": REPO, "token": "hf_secret"}, "push_to_hub.token")],
)
def test_wrong_settings_are_refused(push, text, tmp_path):
    with pytest.raises(ValueError, match=text):
        RunConfig.model_validate(settings(tmp_path, training__push_to_hub=push))


def test_models_on_the_way_need_evaluations(tmp_path):
    push = {"repo": REPO, "checkpoints": True}
    with pytest.raises(ValueError, match="which needs evaluations"):
        RunConfig.model_validate(settings(tmp_path, training__push_to_hub=push, training__eval_strategy="no"))


def test_the_short_form_is_the_mapping(tmp_path):
    config = RunConfig.model_validate(settings(tmp_path, training__push_to_hub=REPO))
    assert config.training.push_to_hub is not None
    assert config.as_plain()["training"]["push_to_hub"] == {"repo": REPO, "private": False, "checkpoints": False}
    assert RunConfig.model_validate(config.as_plain()) == config
