"""A small file that is added to a complete checkpoint, or replaced in it, leaves it complete at every moment."""

import shutil

import pytest
from torch import nn

from fullshard import Checkpoints, fully_shard
from fullshard.core.testing import run_ranks
from fullshard.errors import CheckpointError
from fullshard.state.storage import add_small_file, atomic, check_completion
from fullshard.state.storage.contents import verify


class KilledError(Exception):
    """Nothing more happens."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("checkpoints")

    def work(comm):
        with Checkpoints(directory, ranks=comm) as checkpoints:
            checkpoints.save(fully_shard(nn.Linear(3, 2), comm), step=1)

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
