"""A run compares what it will write with what is free before its first step, and tells where it resumes."""

import errno
import os
from pathlib import Path

import pytest

from fullshard.errors import CheckpointError
from fullshard.program.train.run import loop
from fullshard.program.train.run.disk import Demand, Target, require_room
from support.interrupted_run import STEPS, before, run, run_until_stopped
from support.tiny_run import MODEL

pytestmark = pytest.mark.usefixtures("unmetered")

MIB = 1 << 20
WIDE = {"model": {"config": MODEL | {"d_model": 128, "d_kv": 64, "d_ff": 512}, "tokenizer": {"vocab_size": 60}}}


def files_bytes(directory):
    return sum(path.stat().st_size for path in Path(directory).rglob("*") if path.is_file())


def room(free, directory, *, replaced=(), store=False, **changes):
    """The notes on a run with checkpoints of 30 MiB and models of 10 MiB on one disk."""
    needed = Demand(**{"checkpoint": 30 * MIB, "model": 10 * MIB, "saves": 8, "evaluations": 8, "limit": 2} | changes)
    checkpoints = None if store else Target(directory / "out" / "checkpoints", replaced)
    return require_room(needed, checkpoints, Target(directory / "out"), lambda path: free)


@pytest.mark.parametrize(
    ("changes", "least", "most"),
    [
        ({}, 40, 110),  # three checkpoints and two models at once
        ({"limit": 1}, 40, 80),
        ({"limit": None}, 40, 260),
        ({"saves": 1, "evaluations": 1}, 40, 40),
        ({"evaluations": 0}, 40, 100),  # the last model
        ({"saves": 0}, 10, 20),
        ({"saves": 0, "evaluations": 0}, 10, 10),
        ({"store": True}, 10, 20),  # an object store is not compared
        ({"kept": 1, "has_best": True}, 30, 70),
        ({"kept": 2, "has_best": True}, 30, 40),  # one goes for each that comes
        ({"kept": 2}, 30, 50),
        ({"kept": 5, "has_best": True}, 30, 40),  # of a higher limit before
        ({"saves": 0, "evaluations": 0, "kept": 2, "has_best": True}, 0, 0),
    ],
)
def test_what_fits_is_silent_what_may_not_is_noted_what_does_not_is_refused(tmp_path, changes, least, most):
    assert room(most * MIB, tmp_path, **changes) == ()
    if most > least:
        (note,) = room(most * MIB - 1, tmp_path, **changes)
        assert str(tmp_path / "out") in note
        assert f"{float(most)} MiB" in note
        assert len(room(least * MIB, tmp_path, **changes)) == 1
    if least:
        with pytest.raises(CheckpointError, match=rf"{float(least)} MiB.*output_dir"):
            room(least * MIB - 1, tmp_path, **changes)


def test_what_the_run_deletes_first_counts_as_free_unless_it_has_another_name(tmp_path):
    old = tmp_path / "out" / "checkpoints" / "step-00000004"
    old.mkdir(parents=True)
    (old / "shard").write_bytes(bytes(MIB))
    assert room(109 * MIB, tmp_path, replaced=(old,)) == ()
    os.link(old / "shard", tmp_path / "published")
    assert len(room(109 * MIB, tmp_path, replaced=(old,))) == 1


def test_two_disks_are_compared_each_with_its_own(tmp_path):
    other = Path("/dev/shm")
    if not other.is_dir() or other.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("one file system")
    needed = Demand(30 * MIB, 10 * MIB, saves=1, evaluations=1, limit=2)
    free = {other.stat().st_dev: 30 * MIB, tmp_path.stat().st_dev: 10 * MIB}

    def compare():
        return require_room(needed, Target(other / "c"), Target(tmp_path / "o"), lambda path: free[path.stat().st_dev])

    assert compare() == ()
    free[tmp_path.stat().st_dev] -= 1
    with pytest.raises(CheckpointError, match=r"10\.0 MiB: 1 model of 10\.0 MiB\. No step was taken"):
        compare()


def test_a_file_system_that_does_not_say_is_not_compared(tmp_path):
    assert room(None, tmp_path) == ()


def needs_of(monkeypatch, directory, **changes):
    """What a run of two ranks says it needs."""
    said = []

    def spy(needed, *rest):
        said.append(needed)
        return require_room(needed, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "require_room", spy)
        run(directory, ranks=2, training__max_steps=1, **changes)
    return said[0]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"sharding__strategy": "no_shard", "training__ema_decay": 0.9},
        {"training__optimizer": "adafactor"},
        {"training__optimizer": "adamw_8bit"},
    ],
)
def test_a_run_needs_what_it_then_writes(tmp_path, monkeypatch, settings):
    needed = needs_of(monkeypatch, tmp_path, **WIDE | settings)
    (checkpoint,) = (tmp_path / "out" / "checkpoints").glob("step-*")
    assert 1 <= files_bytes(checkpoint) / needed.checkpoint <= 1.1
    assert 1 <= files_bytes(tmp_path / "out" / "best") / needed.model <= 1.1
    assert (needed.saves, needed.evaluations, needed.kept, needed.has_best) == (1, 1, 0, False)


@pytest.mark.parametrize("resume", ["auto", "never"])
def test_a_run_that_does_not_fit_takes_no_step_and_deletes_nothing(tmp_path, monkeypatch, resume):
    run_until_stopped(tmp_path, before(2), **WIDE)
    (saved,) = (tmp_path / "out" / "checkpoints").glob("step-*")
    inside = files_bytes(saved)
    with monkeypatch.context() as patch:
        patch.setattr(loop, "free_bytes", lambda path: 0)
        # The room of the old checkpoint is not enough for a new one and a model.
        with pytest.raises(CheckpointError, match=r"has room for .*No step was taken"):
            run(tmp_path, ranks=2, resume=resume, **WIDE)
    assert files_bytes(saved) == inside
    assert run(tmp_path, **WIDE).begun[0].resumed_step == 2


def test_a_disk_that_may_be_full_before_the_end_is_a_note(tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "free_bytes", lambda path: 150_000)
    notes = run(tmp_path, training__save_strategy="steps", training__save_steps=1, training__save_total_limit=None)
    (note,) = [note for note in notes.begun[0].notes if "has room for" in note]
    assert f"{STEPS} checkpoints" in note
    assert "training.save_total_limit" in note


def full_disk(monkeypatch, *places):
    """Let writing to a path fail that holds one of these texts, as on a full disk."""
    pwrite, write = os.pwrite, os.write

    def refuse(descriptor):
        if any(place in os.readlink(f"/proc/self/fd/{descriptor}") for place in places):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", lambda one, *rest: (refuse(one), pwrite(one, *rest))[1])
    monkeypatch.setattr(os, "write", lambda one, *rest: (refuse(one), write(one, *rest))[1])


EACH = {"training__save_strategy": "steps", "training__save_steps": 1, "training__eval_strategy": "no"}


@pytest.mark.parametrize(
    ("place", "settings", "expected"),
    [
        ("step-00000003", EACH, "the same command resumes from step 2"),
        ("step-00000001", EACH, "the same command starts over"),
        ("/last", EACH, "the same command resumes from step 4"),
        ("/best", {}, "the same command resumes from step 2"),  # the checkpoint before the evaluation
        ("/best", {"training__save_strategy": "no"}, "the same command starts over"),
        ("step-00000003", EACH | {"resume": "never"}, "the same command with resume=auto resumes from step 2"),
    ],
)
def test_a_full_disk_tells_from_where_the_same_command_resumes(tmp_path, monkeypatch, place, settings, expected):
    with monkeypatch.context() as patch:
        full_disk(patch, place)
        with pytest.raises(CheckpointError, match=f"No space left on device.*{expected}\\."):
            run(tmp_path, ranks=2, **settings)
    step = int(expected.rpartition("step ")[2]) if "resumes" in expected else 0
    assert run(tmp_path, ranks=2, **settings | {"resume": "auto"}).begun[0].resumed_step == step
