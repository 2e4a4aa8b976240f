"""Runs that continue from memory: beside a damaged checkpoint, and on fewer ranks than have copies."""

import os
import threading

import pytest

from fullshard.state.resilience import snapshots
from fullshard.state.storage import find_checkpoints
from support.interrupted_run import OFTEN, assert_same, run, run_until_killed

pytestmark = pytest.mark.usefixtures("unmetered")


@pytest.fixture(autouse=True)
def _kept(tmp_path, monkeypatch):
    """The launcher's directory in the first attempt; a snapshot follows every step."""
    monkeypatch.setattr(snapshots, "FIRST_GAP", 1)
    monkeypatch.setattr(snapshots, "_interval", lambda *_: 1)
    monkeypatch.setenv("FULLSHARD_KEEP_DIR", str(tmp_path / "keep"))
    monkeypatch.setenv("FULLSHARD_ATTEMPT", "0")
    monkeypatch.setattr(os, "getpid", threading.get_native_id)  # ranks are threads here


def test_fewer_ranks_share_out_the_snapshots_that_several_of_them_have(tmp_path, monkeypatch):
    """Of four machines one is lost: those that are left have some snapshots twice, and each passes some on."""
    options = {"training__eval_strategy": "no", "training__save_strategy": "no"}
    options |= {"training__per_device_train_batch_size": 1, "training__gradient_accumulation_steps": 1}
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    run_until_killed(tmp_path, ("step", 5), ranks=4, **options)
    monkeypatch.setenv("FULLSHARD_ATTEMPT", "1")
    assert run(tmp_path, ranks=2, **options).begun[0].resumed_step == 4


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


def test_the_checkpoint_made_of_other_ranks_snapshots_replaces_a_damaged_one(tmp_path, monkeypatch):
    options = {"training__eval_strategy": "no", "training__save_strategy": "steps", "training__save_steps": 2}
    options |= {"training__save_total_limit": 9, "training__gradient_accumulation_steps": 1}
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    run_until_killed(tmp_path, ("step", 5), ranks=2, **options)
    newest = damage_newest(tmp_path)
    assert newest.name == "step-00000004"
    monkeypatch.setenv("FULLSHARD_ATTEMPT", "1")
    memory = run(tmp_path, **options)
    assert memory.begun[0].resumed_step == 4
    assert newest in find_checkpoints(newest.parent)
