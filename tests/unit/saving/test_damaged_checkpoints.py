"""A damaged newest checkpoint is an error on every rank that names the good one; going back to that is a choice."""

import logging
import shutil

import pytest
import torch
from torch import nn

from fullshard import Checkpoints, fully_shard, load_checkpoint
from fullshard.core.engine import local_tensors
from fullshard.core.testing import run_ranks
from fullshard.errors import CheckpointError
from fullshard.state.storage.contents import verify
from support.forged import as_version_1, forge_index
from support.parity import replicas


def small():
    return nn.Sequential(nn.Linear(6, 4))


def on_ranks(size, work):
    _, models = replicas(small, size)
    return run_ranks(size, lambda comm: work(fully_shard(models[comm.rank], comm), comm), timeout_s=20.0)


def value_of(model):
    return {one.tensor[0].item() for one in local_tensors(model) if one.tensor.numel()}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Steps 1, 2, 3; the weights are the step, the metric is best at 3."""
    directory = tmp_path_factory.mktemp("checkpoints")

    def work(model, comm):
        with Checkpoints(directory, ranks=comm, keep_last=None) as checkpoints:
            for step in (1, 2, 3):
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.fill_(step)
                checkpoints.save(model, step=step, metric=step)

    on_ranks(2, work)
    return directory


@pytest.fixture
def directory(written, tmp_path):
    return shutil.copytree(written, tmp_path / "checkpoints")


def flip(file, place):
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)


DAMAGE = {
    "index flipped": (lambda path: flip(path / "index.json", 30), "index.json was changed after it was written"),
    "index missing": (lambda path: (path / "index.json").unlink(), "index.json is missing"),
    "index cut": (lambda path: (path / "index.json").write_text("{"), r"index.json has 1 bytes, expected"),
    "index forged": (
        lambda path: forge_index(path, lambda v: v.update(step=-1)),
        r"index.json cannot be read as a .* -1",
    ),
    "completion flipped": (lambda path: flip(path / "complete.json", 30), r"complete.json cannot be read"),
    "completion missing": (lambda path: (path / "complete.json").unlink(), "complete.json, which is written last, is"),
    "completion empty": (lambda path: (path / "complete.json").write_text(""), "complete.json cannot be read"),
    "shard missing": (lambda path: (path / "shard-00001-of-00002.safetensors").unlink(), "safetensors is missing"),
    "everything missing": (lambda path: [file.unlink() for file in path.glob("*.*")], "complete.json, which is"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_newest_checkpoint_is_one_error_on_every_rank_and_verify_says_it_too(damage, directory):
    newest, good = directory / "step-00000003", directory / "step-00000002"
    do, words = DAMAGE[damage]
    do(newest)

    def work(model, comm):
        texts = []
        before = value_of(model)
        with Checkpoints(directory, ranks=comm) as checkpoints:
            for ask in (lambda: checkpoints.load(model), checkpoints.latest):
                with pytest.raises(CheckpointError, match=words) as info:
                    ask()
                texts.append(str(info.value))
        assert value_of(model) == before
        return texts

    texts = {text for of_rank in on_ranks(3, work) for text in of_rank}
    assert len(texts) == 1
    (text,) = texts
    assert text.startswith(str(newest))
    assert f"The newest good one is {good}. " in text
    assert "resume=previous in fullshard train" in text
    assert "previous=True to Checkpoints.load" in text
    assert newest.exists()
    found = verify(directory)
    assert found.problems
    assert f"a run does not resume: {text}" in found.notes


@pytest.mark.parametrize("damage", DAMAGE)
def test_going_back_is_a_choice_and_the_damaged_one_is_kept_aside(damage, directory, caplog):
    newest, good, aside = (directory / name for name in ("step-00000003", "step-00000002", "step-00000003.damaged"))
    DAMAGE[damage][0](newest)

    def work(model, comm):
        with caplog.at_level(logging.WARNING, "fullshard"), Checkpoints(directory, ranks=comm) as checkpoints:
            restored = checkpoints.load(model, previous=True)
            assert (restored.step, restored.path) == (2, good)
            assert value_of(model) in ({2.0}, set())
            assert checkpoints.latest() == good
            checkpoints.save(model, step=3)
            assert checkpoints.load(model).step == 3
            assert checkpoints.load(model, previous=True).step == 3

    on_ranks(2, work)
    assert aside.is_dir()
    (record,) = caplog.records
    assert record.getMessage().endswith(f"the damaged one is now {aside}.")
    assert str(newest) in record.getMessage()
    found = verify(directory)
    assert not found.problems
    assert found.notes == (f"{aside} was damaged and set aside by resume=previous, and is not verified",)


def test_several_damaged_ones_are_set_aside_together_each_under_its_own_name(directory):
    (directory / "step-00000003.damaged").mkdir()
    for step in (2, 3):
        (directory / f"step-0000000{step}" / "index.json").unlink()

    def work(model, comm):
        with Checkpoints(directory, ranks=comm) as checkpoints:
            with pytest.raises(CheckpointError, match=r"will be renamed to step-00000003.damaged.1\."):
                checkpoints.load(model)
            return checkpoints.load(model, previous=True).step

    assert on_ranks(2, work) == [1, 1]
    names = sorted(path.name for path in directory.glob("*.damaged*"))
    assert names == ["step-00000002.damaged", "step-00000003.damaged", "step-00000003.damaged.1"]


def test_with_no_good_one_even_the_choice_is_an_error_and_nothing_is_renamed(directory):
    for path in directory.glob("step-*"):
        (path / "index.json").unlink()

    def work(model, comm):
        with Checkpoints(directory, ranks=comm) as checkpoints:
            texts = []
            for previous in (False, True):
                with pytest.raises(CheckpointError, match="No checkpoint there is complete") as info:
                    checkpoints.load(model, previous=previous)
                texts.append(str(info.value))
            return texts

    assert len({text for of_rank in on_ranks(2, work) for text in of_rank}) == 1
    assert len(list(directory.glob("step-0000000?"))) == 3


@pytest.mark.parametrize("file", ["index.json", "complete.json"])
def test_a_damaged_older_checkpoint_stands_in_nobodys_way(file, directory):
    """The other file of it knows when it was saved."""
    (directory / "step-00000001" / file).write_text("{")

    def work(model, comm):
        with Checkpoints(directory, ranks=comm) as checkpoints:
            if file == "index.json":
                return checkpoints.load(model).step, checkpoints.best().name
            with pytest.raises(CheckpointError, match="step-00000001 may be the best checkpoint"):
                checkpoints.best()  # its metric is in the file that is damaged
            return checkpoints.load(model).step, checkpoints.latest().name

    assert on_ranks(2, work) == [(3, "step-00000003")] * 2
    assert [bool(result.problems) for result in verify(directory).results] == [True, False, False]
    assert not verify(directory).notes


def test_an_older_checkpoint_that_cannot_say_when_it_was_saved_may_be_the_newest(directory):
    """A run that went back saves smaller steps later."""
    for file in ("index.json", "complete.json"):
        (directory / "step-00000001" / file).write_text("{")

    def work(model, comm):
        with Checkpoints(directory, ranks=comm) as checkpoints:
            with pytest.raises(CheckpointError, match="step-00000001 may be the newest checkpoint"):
                checkpoints.load(model)
            return checkpoints.load(model, previous=True).step

    assert on_ranks(2, work) == [3, 3]


def test_after_going_back_a_damaged_checkpoint_of_a_smaller_step_is_the_newest(tmp_path):
    def work(model, comm):
        with Checkpoints(tmp_path, ranks=comm, keep_last=None) as checkpoints:
            for step in (200, 300):
                checkpoints.save(model, step=step)
            checkpoints.load(model, path=tmp_path / "step-00000200")
            checkpoints.save(model, step=210)
            if comm.rank == 0:
                flip(tmp_path / "step-00000210" / "complete.json", 40)
            comm.barrier()
            with pytest.raises(CheckpointError, match=r"step-00000210 is the newest .* good one is \S*step-00000300\."):
                checkpoints.load(model)
            checkpoints.save(model, step=205)  # its number is after that of the damaged one
            return checkpoints.load(model).step

    assert on_ranks(2, work) == [205, 205]


def test_a_damaged_best_checkpoint_is_an_error_that_names_the_best_good_one(directory):
    flip(directory / "step-00000003" / "index.json", 30)

    def work(model, comm):
        with Checkpoints(directory, ranks=comm) as checkpoints, pytest.raises(CheckpointError) as info:
            checkpoints.best()
        return str(info.value)

    one, other = on_ranks(2, work)
    assert one == other
    assert f"step-00000003 is the best checkpoint in {directory}; no other is used silently." in one
    assert f"The best good one is {directory / 'step-00000002'}" in one


def test_a_named_checkpoint_is_used_whatever_else_is_damaged(directory):
    flip(directory / "step-00000003" / "index.json", 30)

    def work(model, comm):
        with Checkpoints(directory, ranks=comm) as checkpoints:
            with pytest.raises(CheckpointError, match=r"previous=True chooses .* Pass one\."):
                checkpoints.load(model, path=directory / "step-00000002", previous=True)
            assert load_checkpoint(model, None, directory / "step-00000001").step == 1
            return checkpoints.load(model, path=directory / "step-00000002").step

    assert on_ranks(2, work) == [2, 2]


def test_checkpoints_of_version_1_are_loaded_and_theirs_that_are_damaged_are_errors(directory):
    for path in directory.glob("step-*"):
        as_version_1(path)

    def work(model, comm):
        with Checkpoints(directory, ranks=comm) as checkpoints:
            assert checkpoints.load(model).step == 3
            comm.barrier()
            if comm.rank == 0:
                flip(directory / "step-00000003" / "index.json", 30)
            comm.barrier()
            with pytest.raises(CheckpointError, match="step-00000003 is the newest"):
                checkpoints.load(model)
            return checkpoints.load(model, previous=True).step

    assert on_ranks(2, work) == [2, 2]
