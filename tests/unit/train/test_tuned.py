"""What was tuned before: its key, ``training.speed: auto``, and ``plan --fit``."""

import json
from dataclasses import replace

import numpy as np
import pytest
import yaml

from fullshard.core.testing import run_ranks
from fullshard.planner import hardware
from fullshard.program.config import load_run
from fullshard.program.data import Ragged
from fullshard.program.train.auto import chosen_speed
from fullshard.program.train.fit import search
from fullshard.program.train.setup.prepare import prepare
from fullshard.program.train.setup.resume import checkpoints_directory
from fullshard.program.train.setup.tuned import (
    Setting,
    best_of,
    card_of,
    key_of,
    measured_step,
    place_of,
    read_tuned,
    write_tuned,
)
from fullshard.state.resilience import ScratchDirectory
from support.tiny_run import QUICK, write_run_file

FAST, SLOW = Setting(("flex", "compile"), "false", 4, 2), Setting((), "true", 4, 2)


@pytest.fixture(scope="module")
def run_file(tmp_path_factory):
    return write_run_file(tmp_path_factory.mktemp("tuned"), **QUICK, training__speed="auto", training__precision="fp32")


@pytest.fixture(scope="module")
def data(run_file):
    return prepare(load_run(run_file))


def key(run_file, data, *overrides, ranks=2, card="a card"):
    return key_of(load_run(run_file, overrides), data, ranks, card)


@pytest.mark.parametrize(
    "override",
    [
        "training.precision=bf16",
        "training.optimizer=adafactor",
        "training.per_device_train_batch_size=8",
        "sharding.strategy=no_shard",
        "model.attention_dropout=0.0",
        "training.packing=true",
    ],
)
def test_what_changes_a_step_changes_the_key(run_file, data, override):
    assert key(run_file, data, override) != key(run_file, data)


@pytest.mark.parametrize(
    "override",
    [
        "training.learning_rate=1.0",
        "seed=9",
        "output_dir=elsewhere",
        "speed.ways=[flex]",
        "training.gradient_checkpointing=true",
        "training.torch_compile=true",
        "training.num_train_epochs=9",
        "sharding.auto=true",
    ],
)
def test_what_does_not_or_is_varied_leaves_it(run_file, data, override):
    assert key(run_file, data, override) == key(run_file, data)


def test_rows_are_those_of_a_step_and_ranks_card_and_lengths_count(run_file, data):
    divided = ["training.per_device_train_batch_size=2", "training.gradient_accumulation_steps=4"]
    assert key(run_file, data, *divided) == key(run_file, data)
    others = [key(run_file, data, ranks=4), key(run_file, data, card="another")]
    rows = replace(data.train_set, source_ids=Ragged(np.zeros(25 * 40, np.int32), np.arange(26) * 40))
    others.append(key(run_file, replace(data, train_set=rows)))
    assert len({*others, key(run_file, data)}) == 4


def test_the_best_that_leaves_the_values_of_the_file_is_taken(run_file):
    measured = [(FAST, 1.0), (Setting(("compile",), "1", 4, 2), 1.5), (SLOW, 2.0)]

    def best(*overrides):
        found = best_of(measured, load_run(run_file, overrides))
        return found and found[0]

    assert best() == FAST
    assert best("training.torch_compile=false") == SLOW
    assert best("speed.ways=[]") == SLOW
    assert best("speed.ways=[compile]") == best("training.gradient_checkpointing=1") == measured[1][0]
    assert best("training.gradient_checkpointing=true") == SLOW  # not 1, which equals true in Python
    assert best("training.per_device_train_batch_size=2", "training.gradient_accumulation_steps=4") is None
    assert best("speed.ways=[varlen]") is None


def test_a_damaged_file_counts_as_none(tmp_path):
    path = tmp_path / "deep" / "tuned.json"
    assert read_tuned(path) == []
    write_tuned(path, [(FAST, 0.5)])
    assert read_tuned(path) == [(FAST, 0.5)]
    for text in ("", "{}", '[{"ways": 3}]', "[1]"):
        path.write_text(text)
        assert read_tuned(path) == []


def choose(run_file, data, *overrides):
    """What two ranks take, and what they say."""

    def load(more):
        return load_run(run_file, [*overrides, *more])

    said = []
    found = run_ranks(2, lambda comm: chosen_speed(load, data, comm, said.append if comm.rank == 0 else str))
    assert found[0] == found[1]
    return load(found[0][0]), said


def keep(run_file, data, measured):
    config = load_run(run_file)
    card = run_ranks(1, lambda comm: card_of(comm, None))[0]
    write_tuned(place_of(config, key_of(config, data, 2, card)), measured)


def test_a_run_takes_the_kept_choice_and_keeps_it_when_it_resumes(run_file, data, tmp_path, monkeypatch):
    keep(run_file, data, [(FAST, 0.25), (SLOW, 0.5)])
    config, (line,) = choose(run_file, data, f"output_dir={tmp_path}")
    assert line.startswith("training.speed: ")
    assert line.endswith("(250 ms a step, as `fullshard tune` measured)")
    assert config.ways == ("flex", "compile")
    assert config.training.gradient_checkpointing is False
    assert config.training.speed == FAST.overrides
    (tmp_path / "run.json").write_text(json.dumps({"config": config.as_plain()}))
    keep(run_file, data, [(SLOW, 0.2)])
    again, (line,) = choose(run_file, data, f"output_dir={tmp_path}")
    assert again.ways == config.ways
    assert "as at this run's start" in line
    anew, _ = choose(run_file, data, f"output_dir={tmp_path}", "resume=never")
    assert (anew.ways, anew.training.gradient_checkpointing) == ((), True)
    # A later attempt of a run that began anew keeps it too: its snapshots are of that.
    monkeypatch.setenv("FULLSHARD_KEEP_DIR", str(tmp_path / "keep"))
    monkeypatch.setenv("FULLSHARD_ATTEMPT", "1")
    changes = [f"output_dir={tmp_path}", "resume=never"]
    ScratchDirectory.of(checkpoints_directory(load_run(run_file, changes))).mark_begun(2)
    assert choose(run_file, data, *changes)[0].ways == config.ways


def test_without_a_kept_choice_the_run_says_so_and_later_attempts_keep_that(run_file, data, tmp_path):
    keep(run_file, data, [])
    config, (line,) = choose(run_file, data, f"output_dir={tmp_path}")
    assert "nothing was measured here" in line
    assert "run `fullshard tune`" in line
    assert (config.ways, config.training.speed) == ((), ())
    (tmp_path / "run.json").write_text(json.dumps({"config": config.as_plain()}))
    keep(run_file, data, [(FAST, 0.25)])
    assert choose(run_file, data, f"output_dir={tmp_path}")[0].ways == ()


def test_without_auto_nothing_is_said(run_file, data):
    assert choose(run_file, data, "training.speed=null")[1] == []


def test_a_search_takes_measured_steps_in_place_of_predicted_ones(run_file, data):
    """Of a run on the GPU of a data sheet, which is the name that tuning keeps."""
    fixed = ["training.precision=bf16", "training.fused_cross_entropy=false", "sharding.strategy=full_shard"]
    config = load_run(run_file, fixed)

    def found(*measured):
        write_tuned(place_of(config, key_of(config, data, 2, "h100")), measured)
        load = lambda more: load_run(run_file, [*fixed, "training.gradient_checkpointing=false", *more])  # noqa: E731
        return search(load, 2, hardware("h100"), data=data)[0]

    predicted = found((SLOW, 1e-9), (FAST, 1e-12))  # neither has these ways and blocks
    assert predicted.measured_s is None
    assert predicted.step_s == predicted.plan.timing.step_s
    measured = found((SLOW, 1e-9), (Setting((), "false", 4, 2), 0.125))
    assert (measured.overrides, measured.measured_s, measured.step_s) == ((), 0.125, 0.125)
    assert measured.as_dict()["measured_s"] == 0.125
    assert measured_step(config, data, 2, "h100") == 0.125  # auto recomputes nothing in a plan


def test_the_run_file_that_was_written_is_the_setting(run_file):
    values = yaml.safe_load("\n".join(f"{one.replace('=', ': ')}" for one in FAST.overrides))
    assert values == FAST.values
