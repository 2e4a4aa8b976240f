"""The lock of a live run holds when somebody deletes its file; where it cannot, the run finds out before it saves."""

import errno
import fcntl
import os
import shutil
import stat

import pytest

from fullshard import Checkpoints, fully_shard
from fullshard.core.testing import run_ranks
from fullshard.errors import CheckpointError
from fullshard.state.storage import DirectoryLock, find_checkpoints
from support.models import TinyLM
from support.parity import replicas


@pytest.fixture
def files_only(monkeypatch):
    """As on NFS, which locks no directories."""
    flock = fcntl.flock

    def refuse(descriptor, operation):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EBADF, "Bad file descriptor")
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", refuse)


def test_a_second_run_is_refused_though_the_lock_file_was_deleted(tmp_path):
    lock = DirectoryLock(tmp_path)
    (tmp_path / "lock").unlink()
    with pytest.raises(CheckpointError, match=r"Another run is writing to .* \(process unknown, its lock file was del"):
        DirectoryLock(tmp_path)
    assert not (tmp_path / "lock").exists()
    lock.release()
    DirectoryLock(tmp_path).release()


@pytest.mark.usefixtures("files_only")
def test_where_only_files_are_locked_a_second_run_is_refused_by_the_file(tmp_path):
    lock = DirectoryLock(tmp_path)
    with pytest.raises(CheckpointError, match=rf"process {os.getpid()} on "):
        DirectoryLock(tmp_path)
    lock.release()
    DirectoryLock(tmp_path).release()


def test_a_deleted_lock_is_made_again_at_the_next_save_and_said(tmp_path, caplog):
    lock = DirectoryLock(tmp_path)
    lock.require_held()
    assert not caplog.records
    (tmp_path / "lock").unlink()
    lock.require_held()
    (record,) = caplog.records
    assert f"{tmp_path / 'lock'} was deleted while this run held it, and was made again" in record.getMessage()
    assert str(os.getpid()) in (tmp_path / "lock").read_text()
    with pytest.raises(CheckpointError, match=f"process {os.getpid()}"):
        DirectoryLock(tmp_path)
    lock.release()
    DirectoryLock(tmp_path).release()


@pytest.mark.usefixtures("files_only")
def test_a_second_run_that_got_the_lock_ends_the_saves_of_the_first(tmp_path):
    """On every rank with one text, each time, and nothing of the second run is touched."""
    _, models = replicas(TinyLM, 2)

    def work(comm):
        model = fully_shard(models[comm.rank], comm)
        first = Checkpoints(tmp_path, ranks=comm, keep_last=1)
        first.save(model, step=1)
        comm.barrier()
        if comm.rank == 0:
            (tmp_path / "lock").unlink()
        comm.barrier()
        second = Checkpoints(tmp_path, ranks=comm, keep_last=1)
        second.save(model, step=2)
        texts = []
        for _ in range(2):
            with pytest.raises(CheckpointError) as info:
                first.save(model, step=3)
            texts.append(str(info.value))
        second.close()
        first.save(model, step=4)  # it has ended
        first.close()
        return texts

    one, other = run_ranks(2, work)
    assert one == other
    assert one[0] == one[1]
    assert one[0].startswith(f"{tmp_path / 'lock'} was deleted while this run held it, and a second run has started")
    assert "Another run is writing" in one[0]
    assert [path.name for path in find_checkpoints(tmp_path)] == ["step-00000004"]


def test_a_directory_that_is_gone_is_an_error_at_the_next_save(tmp_path):
    directory = tmp_path / "checkpoints"
    lock = DirectoryLock(directory)
    shutil.move(directory, tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="was deleted or moved while this run was writing"):
        lock.require_held()
    directory.mkdir()
    lock.require_held()
    with pytest.raises(CheckpointError, match="Another run"):
        DirectoryLock(directory)
    lock.release()


def test_a_file_that_is_deleted_while_the_lock_is_taken_is_made_again(tmp_path, monkeypatch):
    flock, deleted = fcntl.flock, []

    def deleting(descriptor, operation):
        flock(descriptor, operation)
        if not deleted and (tmp_path / "lock").exists():
            deleted.append(True)
            (tmp_path / "lock").unlink()

    monkeypatch.setattr(fcntl, "flock", deleting)
    lock = DirectoryLock(tmp_path)
    assert deleted
    lock.require_held()
    assert os.path.samestat(os.stat(tmp_path / "lock"), os.fstat(lock._file))
    lock.release()
