"""A run that is killed continues from the snapshots in memory, and ends as if undisturbed."""

import shutil

import pytest
from safetensors.torch import load_file, save_file

from fullshard.errors import CheckpointError, ConfigError
from fullshard.program.train.run.checkpoints import RunCheckpoints
from fullshard.program.train.setup import resume
from fullshard.state.saving import memory as snapshots
from fullshard.state.storage import find_checkpoints, read_index
from support.interrupted_run import OFTEN, STEPS, assert_same, metrics, run, run_until_killed, run_until_stopped
from support.t5_directory import write_t5
from support.tiny_run import WORDS

pytestmark = pytest.mark.usefixtures("unmetered")


@pytest.fixture(autouse=True)
def keep(tmp_path, monkeypatch):
    """The launcher's directory in the first attempt; a snapshot follows every step."""
    monkeypatch.setattr(snapshots, "FIRST_GAP", 1)
    monkeypatch.setattr(snapshots, "_interval", lambda *_: 1)
    monkeypatch.setenv("FULLSHARD_KEEP_DIR", str(tmp_path / "keep"))
    monkeypatch.setenv("FULLSHARD_ATTEMPT", "0")
    return tmp_path / "keep"


def killed_and_again(directory, place, monkeypatch, **changes):
    run_until_killed(directory, place, **changes)
    monkeypatch.setenv("FULLSHARD_ATTEMPT", "1")
    return run(directory, **changes)


@pytest.mark.parametrize("save", ["no", "epoch"])
@pytest.mark.parametrize(
    "place", [("step", 4), ("step", 6), ("evaluating", 4), ("evaluation", 4), ("evaluating", STEPS), ("step", STEPS)]
)
def test_killed_anywhere_it_ends_the_same_to_the_bit(place, save, tmp_path, uninterrupted, monkeypatch):
    memory = killed_and_again(tmp_path, place, monkeypatch, training__save_strategy=save, **OFTEN)
    # Killed while it evaluates, a run has what it saved before, on disk or in memory.
    assert memory.begun[0].resumed_step == place[1] - (place[0] == "step")
    assert_same(tmp_path, uninterrupted)


@pytest.mark.parametrize("asked", ["never", "previous"])
def test_what_resume_says_is_for_the_first_attempt(asked, tmp_path, uninterrupted, monkeypatch):
    memory = killed_and_again(tmp_path, ("step", 6), monkeypatch, resume=asked, **OFTEN)
    assert memory.begun[0].resumed_step == 5
    assert any(note.startswith("resuming after step 5 from the snapshot in memory") for note in memory.begun[0].notes)
    assert_same(tmp_path, uninterrupted)


@pytest.mark.parametrize("snapshots_too", [True, False])
def test_a_checkpoint_of_another_directory_is_not_forgotten(snapshots_too, tmp_path, uninterrupted, monkeypatch):
    """Killed before it has saved a checkpoint of its own, a run begins again at the one that resume names."""
    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()
    monkeypatch.delenv("FULLSHARD_KEEP_DIR")
    from_step = str(run_until_stopped(tmp_path / "first", ("step", 3), **OFTEN).checkpoint)
    monkeypatch.setenv("FULLSHARD_KEEP_DIR", str(tmp_path / "keep"))
    if not snapshots_too:
        monkeypatch.setattr(RunCheckpoints, "snapshot", lambda *_: None)
    options = {**OFTEN, "resume": from_step, "training__save_strategy": "no"}
    memory = killed_and_again(tmp_path / "second", ("step", 6), monkeypatch, **options)
    assert memory.begun[0].resumed_step == (5 if snapshots_too else 4)
    ours, theirs = (one / "out" / "model.safetensors" for one in (tmp_path / "second", uninterrupted))
    assert ours.read_bytes() == theirs.read_bytes()


@pytest.mark.parametrize(
    "changes",
    [
        {"data__streaming": True},
        {"training__gradient_accumulation_steps": 1},
        {"training__optimizer": "adafactor"},
        {"training__save_strategy": "steps", "training__save_steps": 1},
        {"training__early_stopping_patience": 1, "training__early_stopping_threshold": 0.4},
        {"training__logging_steps": 3},
    ],
    ids=["streaming", "no accumulation", "adafactor", "saves under way", "early stop", "logging"],
)
@pytest.mark.slow
def test_killed_twice_it_ends_the_same_to_the_bit_however_it_trains(changes, tmp_path, monkeypatch):
    calm, killed = tmp_path / "calm", tmp_path / "killed"
    for directory in (calm, killed):
        directory.mkdir()
    monkeypatch.delenv("FULLSHARD_KEEP_DIR")
    run(calm, **changes, **OFTEN)
    monkeypatch.setenv("FULLSHARD_KEEP_DIR", str(tmp_path / "keep"))
    for attempt, place in enumerate((("step", 2), ("evaluation", 4))):
        monkeypatch.setenv("FULLSHARD_ATTEMPT", str(attempt))
        run_until_killed(killed, place, **changes, **OFTEN)
    monkeypatch.setenv("FULLSHARD_ATTEMPT", "2")
    run(killed, **changes, **OFTEN)
    assert_same(killed, calm)


def test_frozen_weights_are_read_again_and_not_kept(tmp_path, keep, monkeypatch):
    write_t5(tmp_path / "base", [*WORDS, *WORDS.values()] * 30)
    adapter = {"type": "lora", "r": 4, "lora_alpha": 32}
    options = {"model": {"path": str(tmp_path / "base"), "adapter": adapter}, **OFTEN}
    for name in ("calm", "killed"):
        (tmp_path / name).mkdir()
    run(tmp_path / "calm", **options)
    shutil.rmtree(keep)
    run_until_killed(tmp_path / "killed", ("step", 6), training__save_strategy="no", **options)
    kept = [read_index(path) for rank in keep.glob("*/rank-*") for path in find_checkpoints(rank)]
    names = {name for one in kept for name in one.tensors if name.startswith("model/")}
    assert len(kept) == 2
    assert names
    assert all("lora_" in name for name in names)
    monkeypatch.setenv("FULLSHARD_ATTEMPT", "1")
    memory = run(tmp_path / "killed", training__save_strategy="no", **options)
    assert memory.begun[0].resumed_step == 5
    assert metrics(tmp_path / "killed") == metrics(tmp_path / "calm")
    ours, theirs = (tmp_path / name / "out" / "adapter_model.safetensors" for name in ("killed", "calm"))
    assert ours.read_bytes() == theirs.read_bytes()


def test_other_frozen_weights_are_an_error(tmp_path, monkeypatch):
    """The digest of a model's files is that of rank 0, and an id on the Hub has none."""
    write_t5(tmp_path / "base", [*WORDS, *WORDS.values()] * 30)
    adapter = {"type": "lora", "r": 4, "lora_alpha": 32}
    options = {"model": {"path": str(tmp_path / "base"), "adapter": adapter}, "training__save_strategy": "no"}
    run_until_killed(tmp_path, ("step", 6), **options)
    monkeypatch.setenv("FULLSHARD_ATTEMPT", "1")
    monkeypatch.setattr(resume, "_content", lambda key, path: "the same")
    monkeypatch.setattr(resume, "_differences", lambda start, then: {})
    file = tmp_path / "base" / "model.safetensors"
    save_file({name: tensor + 1 for name, tensor in load_file(file).items()}, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="frozen weights differ from those that the snapshot was taken with"):
        run(tmp_path, **options)


def test_an_attempt_that_ends_after_the_run_has_ends_it_once_more(tmp_path, uninterrupted, monkeypatch):
    run(tmp_path, **OFTEN)
    monkeypatch.setenv("FULLSHARD_ATTEMPT", "1")
    memory = run(tmp_path, **OFTEN)
    assert memory.begun[0].resumed_step == STEPS
    assert not memory.steps
    assert_same(tmp_path, uninterrupted)


def test_a_run_file_that_was_changed_meanwhile_is_an_error(tmp_path, monkeypatch):
    changes = {**OFTEN, "training__save_strategy": "no"}
    run_until_killed(tmp_path, ("step", 4), **changes)
    monkeypatch.setenv("FULLSHARD_ATTEMPT", "1")
    with pytest.raises(ConfigError, match=r"settings have changed meanwhile:\n  training.learning_rate: 0.5"):
        run(tmp_path, training__learning_rate=0.5, **changes)


def damage_newest(directory):
    newest = find_checkpoints(directory / "out" / "checkpoints")[-1]
    (newest / "index.json").write_text("{}")
    return newest


def test_the_only_checkpoint_may_be_damaged_where_memory_has_a_later_step(tmp_path, uninterrupted, monkeypatch):
    options = {**OFTEN, "training__save_strategy": "steps", "training__save_steps": 4}
    run_until_killed(tmp_path, ("step", 6), **options)
    newest = damage_newest(tmp_path)
    monkeypatch.setenv("FULLSHARD_ATTEMPT", "1")
    memory = run(tmp_path, **options)
    assert memory.begun[0].resumed_step == 5
    assert any(note.startswith(f"{newest.name} is damaged and is ") for note in memory.begun[0].notes)
    assert_same(tmp_path, uninterrupted)
