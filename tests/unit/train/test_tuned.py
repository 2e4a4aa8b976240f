"""What was tuned before: its key, ``training.speed: auto``, and ``plan --fit``."""

import json
from dataclasses import replace

import numpy as np
import pytest
import yaml

from fullshard.core.testing import run_ranks
from fullshard.errors import ConfigError
from fullshard.planner import hardware
from fullshard.program.config import load_run
from fullshard.program.data import Ragged
from fullshard.program.train.auto import chosen_speed
from fullshard.program.train.fit import search
from fullshard.program.train.setup import tuned as tuned_module
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
    set_by_hand,
    with_others,
    write_tuned,
)
from fullshard.state.saving.scratch import ScratchDirectory
from support.tiny_run import QUICK, write_run_file

GPU = hardware("h100")
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
        "training.label_smoothing_factor=0.1",
        "training.z_loss=0.001",
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
    one = '[{"ways": WAYS, "recompute": BLOCKS, "rows": 4, "times": 2, "step_s": SECONDS}]'
    damaged = [("[]", "3", "1.0"), ('"abc"', '"3"', "1.0"), ("[]", '"3"', "NaN"), ('["later"]', '"3"', "1.0")]
    damaged = [one.replace("WAYS", a).replace("BLOCKS", b).replace("SECONDS", c) for a, b, c in damaged]
    for text in ("", "{}", '[{"ways": 3}]', "[1]", *damaged):
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


@pytest.mark.slow
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


def test_a_resumed_run_keeps_only_what_the_run_file_still_leaves_open(run_file, data, tmp_path):
    """What the user sets after the start is not overridden: values by hand, and rows of a step."""
    kept = Setting(("flex", "compile"), "false", 2, 2).overrides
    free = [f"output_dir={tmp_path}", "training.gradient_accumulation_steps=null"]
    config = load_run(run_file, [*free, *kept, f"training.speed={json.dumps(kept)}"])
    (tmp_path / "run.json").write_text(json.dumps({"config": config.as_plain()}))

    def again(*overrides):
        found = choose(run_file, data, *free, *overrides)[0]
        training = found.training
        rows = training.per_device_train_batch_size, training.gradient_accumulation_steps
        return found.ways, training.gradient_checkpointing, rows

    assert again() == (("flex", "compile"), False, (2, 2))
    assert again("training.per_device_train_batch_size=16") == (("flex", "compile"), False, (16, 1))
    assert again("training.gradient_checkpointing=true") == (("flex", "compile"), True, (2, 2))
    assert again("speed.ways=[]", "training.gradient_accumulation_steps=3") == ((), False, (4, 3))
    assert again("training.torch_compile=false") == ((), False, (2, 2))


@pytest.mark.slow
def test_a_predicted_step_is_as_far_off_as_those_that_were_measured(run_file, data):
    """Or a tuned setting would lose to each one that was never measured: data sheets are optimistic."""
    fixed = ["training.precision=bf16", "training.fused_cross_entropy=false", "training.gradient_checkpointing=false"]
    config = load_run(run_file, fixed)
    place = place_of(config, key_of(config, data, 2, "h100"))
    place.unlink(missing_ok=True)

    def order():
        return [one.overrides for one in search(lambda more: load_run(run_file, [*fixed, *more]), 2, GPU, data=data)]

    before = order()
    assert len(before) > 1
    settings = load_run(run_file, [*fixed, *before[0]])
    write_tuned(place_of(settings, key_of(settings, data, 2, "h100")), [(Setting((), "false", 4, 2), 0.5)])
    assert order() == before
    place_of(settings, key_of(settings, data, 2, "h100")).unlink()


def test_a_later_tuning_keeps_what_the_run_file_rules_out_now(run_file, tmp_path):
    path, medium = tmp_path / "tuned.json", Setting((), "1", 4, 2)
    write_tuned(path, [(FAST, 1.0), (medium, 1.5), (SLOW, 2.0)])
    plain = load_run(run_file, ["speed.ways=[]"])
    assert with_others([(SLOW, 0.9), (medium, 1.6)], path, plain) == [(SLOW, 0.9), (FAST, 1.0), (medium, 1.6)]
    assert with_others([(SLOW, 2.1)], path, load_run(run_file)) == [(SLOW, 2.1)]  # all others were tried again
    assert set_by_hand(plain) == ["speed.ways", "training.gradient_accumulation_steps"]


def test_names_of_ways_are_no_record(run_file):
    with pytest.raises(ConfigError, match=r"expected auto or null; got \['compile'\]\. Ways are named in speed.ways"):
        load_run(run_file, ["training.speed=[compile]"])


def test_a_library_that_a_way_needs_changes_the_key(run_file, data, monkeypatch):
    before = key(run_file, data)
    monkeypatch.setattr(tuned_module, "_version", lambda library: None if library == "liger-kernel" else "1")
    without = key(run_file, data)
    monkeypatch.setattr(tuned_module, "_version", lambda library: "1")
    assert len({before, without, key(run_file, data)}) == 3
