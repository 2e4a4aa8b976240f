"""What ``complete.json`` vouches for: all files at the save, at every moment of a later change, wherever they lie."""

import errno
import os
import shutil
from pathlib import Path

import pytest
from torch import nn

from fullshard import Checkpoints, fully_shard
from fullshard.core.testing import run_ranks
from fullshard.errors import CheckpointError
from fullshard.state.storage import add_small_file, atomic, check_completion, find_checkpoints, read_index
from fullshard.state.storage.completion import copy_small_files
from fullshard.state.storage.contents import Kind, kind_of, verify


class KilledError(Exception):
    """Nothing more happens."""


def small_files(directory):
    (directory / "sub").mkdir()
    for name in ("config.json", "sub/config.json"):
        (directory / name).write_text("{}")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("checkpoints")

    def work(comm):
        with Checkpoints(directory, ranks=comm) as checkpoints:
            checkpoints.save(fully_shard(nn.Linear(3, 2), comm), step=1, assets=small_files)

    run_ranks(1, work)
    return directory / "step-00000001"


def add(path, text, metric):
    add_small_file(path, "evaluation.json", text, metric=metric, greater_is_better=True)


def test_an_added_file_is_listed_hashed_and_replaced(checkpoint, tmp_path):
    path = shutil.copytree(checkpoint, tmp_path / "step-00000001")
    for text, metric in (('{"a": 1}', 0.5), ("[]", float("nan"))):
        add(path, text, metric)
        done = check_completion(path)
        assert (done.files["evaluation.json"], done.greater_is_better) == (len(text), True)
        assert done.metric == (0.5 if metric == 0.5 else None)
        assert not verify(path).problems
    (path / "evaluation.json").write_text("{}")
    (problem,) = verify(path).results[0].problems
    assert problem.file == "evaluation.json"
    (path / "complete.json").unlink()
    with pytest.raises(CheckpointError, match="not a complete checkpoint"):
        add(path, "[]", 0.5)


@pytest.mark.parametrize("before", [None, '{"another": "size"}'])
@pytest.mark.parametrize("kills", range(8))
def test_a_kill_between_any_two_renames_leaves_it_complete(before, kills, checkpoint, tmp_path, monkeypatch):
    path = shutil.copytree(checkpoint, tmp_path / "step-00000001")
    if before:
        add(path, before, 0.25)
    replace, left = atomic.os.replace, [kills // 2]

    def killing(source, target):
        if left[0] == 0 and kills % 2 == 0:
            raise KilledError
        replace(source, target)
        if left[0] == 0:
            raise KilledError
        left[0] -= 1

    with monkeypatch.context() as patch:
        patch.setattr(atomic.os, "replace", killing)
        try:
            add(path, "[]", 0.5)
        except KilledError:
            pass
        else:
            assert kills // 2 >= 2 + bool(before)
    done = check_completion(path)
    assert done.metric in (None, 0.25, 0.5)
    add(path, "[]", 0.5)
    assert check_completion(path).metric == 0.5


def test_a_file_that_cannot_be_looked_at_fails_the_save(tmp_path, monkeypatch):
    stat = Path.stat

    def failing(path, **options):
        if path.name == "config.json":
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return stat(path, **options)

    def work(comm):
        model = fully_shard(nn.Linear(3, 2), comm)
        with Checkpoints(tmp_path, ranks=comm) as checkpoints:
            monkeypatch.setattr(Path, "stat", failing)
            checkpoints.save(model, step=1, assets=small_files)

    with pytest.raises(CheckpointError, match=r"(?s)Could not write checkpoint.*Input/output error.*unchanged"):
        run_ranks(1, work)
    monkeypatch.undo()
    assert find_checkpoints(tmp_path) == []


def test_files_behind_links_and_in_directories_that_cannot_be_listed_are_found(checkpoint, tmp_path, monkeypatch):
    path = shutil.copytree(checkpoint, tmp_path / "step-00000001")
    for name in ("model/sub", "model"):
        shutil.move(path / name, tmp_path / f"moved-{Path(name).name}")
        (path / name).symlink_to(tmp_path / f"moved-{Path(name).name}")
    assert "model/sub/config.json" in check_completion(path).files
    copy_small_files(path, tmp_path / "copied")
    assert (tmp_path / "copied" / "sub" / "config.json").exists()

    def refused(*_args):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    for name in ("listdir", "scandir"):
        monkeypatch.setattr(os, name, refused)
    assert read_index(path).step == 1
    assert kind_of(path) is Kind.CHECKPOINT


def test_a_leftover_that_cannot_be_looked_at_hides_no_checkpoint(checkpoint, tmp_path):
    path = shutil.copytree(checkpoint, tmp_path / "step-00000001")
    (tmp_path / "step-00000003.tmp").symlink_to("a" * 300)
    assert find_checkpoints(tmp_path) == [path]
