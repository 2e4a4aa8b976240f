"""An option says beside its value what resuming, plans, the search and the prompt's file do with it; no list does."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated

import pytest

from fullshard.errors import ConfigError
from fullshard.planner import hardware
from fullshard.program.config import RunConfig, TrainingConfig, option_of, options, prompt_text, schema
from fullshard.program.config.section import SAME, Option, Searched, fields_of
from fullshard.program.train import memory_check, search
from fullshard.program.train.setup.resume import choose_starting_point, deciding_settings, read_values
from support.forged import forge_index
from support.interrupted_run import SMALL, run_until_stopped
from support.tiny_run import settings


class Training(TrainingConfig):
    """The section with an option of each kind more."""

    free: Annotated[int, Option("free", planned=False)] = 1
    same: Annotated[int, Option("same", before=7)] = 7
    compared: Annotated[int, Option("evaluation", travels=True)] = 1
    state: Annotated[int, Option("state")] = 1
    file: Annotated[Path | None, Option("same", names="file")] = None
    searched: Annotated[bool, Option("free", searched=Searched("rank", (False, True)))] = False


class Run(RunConfig):
    """The run file with that section."""

    training: Annotated[Training, SAME] = Training()


@pytest.fixture
def config_of(tmp_path, monkeypatch):
    monkeypatch.setattr(schema, "RunConfig", Run)

    def make(precision="fp32", **changes):
        changes = changes | {"precision": precision}
        training = {f"training__{key}": value for key, value in changes.items()}
        return Run.model_validate(settings(tmp_path, **SMALL, **training, speed__ways=[]))  # as chosen before

    return make


def test_every_field_of_the_run_file_has_its_option():
    assert [key for key, _ in fields_of(RunConfig) if key not in options()] == []


def test_a_field_without_one_is_found():
    class Bare(RunConfig):
        bare: int = 1

    assert [key for key, _ in fields_of(Bare) if key not in schema.options_of(Bare)] == ["bare"]


@pytest.mark.parametrize(
    ("key", "resume"),
    [
        ("training.push_to_hub.repo", "free"),
        ("data.sets.mine.validation_file", "evaluation"),
        ("model.config.d_model", "state"),  # a key of free text
        ("model.of_another_version", "state"),
        ("training.of_another_version", "same"),
    ],
)
def test_the_option_of_a_key_is_its_own_or_that_of_the_section_around_it(key, resume):
    assert option_of(key).resume == resume


@pytest.mark.usefixtures("unmetered")
def test_resuming_follows_the_option(tmp_path, config_of, monkeypatch):
    with monkeypatch.context() as before:
        before.setattr(schema, "RunConfig", RunConfig)
        path = Path(run_until_stopped(tmp_path, None, training__precision="fp32").checkpoint)
    forge_index(path, lambda index: index["values"]["settings"].update({"training.compared": 1, "training.state": 1}))
    assert read_values(path)[1]["settings"]["training.same"] == 7  # what runs did that did not have it

    assert choose_starting_point(config_of(free=2), 1).path == path
    with pytest.raises(ConfigError, match=r"training\.same: 8; in the checkpoint 7"):
        choose_starting_point(config_of(same=8), 1)
    named = {"resume": path}
    start = choose_starting_point(config_of(same=8).model_copy(update=named), 1)
    assert start.comparable
    assert not choose_starting_point(config_of(compared=2).model_copy(update=named), 1).comparable
    with pytest.raises(ConfigError, match=r"has changed:\n  training\.state: 2; in the checkpoint 1"):
        choose_starting_point(config_of(state=2).model_copy(update=named), 1)


def test_what_a_setting_names_is_compared_by_content(tmp_path, config_of):
    found = []
    for name, text in (("a", "x"), ("b", "x"), ("c", "y")):
        (tmp_path / name).write_text(text)
        found.append(deciding_settings(config_of(file=tmp_path / name), 1)["training.file"])
    assert found[0] == found[1] != found[2]


def test_plans_and_the_models_own_file_follow_the_option(config_of):
    plans = [memory_check._key(config_of(**changes), 2) for changes in ({}, {"free": 2}, {"state": 2})]
    assert plans[0] == plans[1] != plans[2]
    kept = json.loads(prompt_text(config_of(compared=3), None, conversations=False))["training"]
    assert kept.get("compared") == 3
    assert "state" not in kept


def test_the_search_varies_the_option(config_of, monkeypatch):
    tried = []

    monkeypatch.setattr(search, "first_numbers", lambda *_, **how: SimpleNamespace(nbytes=0))

    def plan_prepared(config, *_, **how):
        tried.append((config.training.searched, config.training.fused_cross_entropy))
        raise ConfigError("none")

    monkeypatch.setattr(search, "plan_prepared", plan_prepared)

    def load(more):
        given = dict(one.removeprefix("training.").split("=") for one in more if one.startswith("training."))
        return config_of(**given, gradient_checkpointing=False)

    search.search(load, 2, hardware("h100"), data=SimpleNamespace(tokenizer=None))
    assert list(dict.fromkeys(tried)) == [(False, "auto"), (True, "auto"), (False, True), (True, True)]
