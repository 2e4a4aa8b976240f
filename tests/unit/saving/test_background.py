"""Laws of the writer thread: in order, never more than it was promised, and gone when it is not wanted any more."""

import contextlib
import threading

import pytest

from fullshard.errors import CheckpointError
from fullshard.state.saving import full
from fullshard.state.saving.full import BackgroundWriter


class Disk:
    """Takes items while its gate is open, and knows how it was left."""

    def __init__(self, fail_at=None):
        self.items, self.left, self.gate = [], [], threading.Event()
        self.fail_at = fail_at
        self.gate.set()

    @contextlib.contextmanager
    def opened(self):
        try:
            yield self.write
        except BaseException as error:
            self.left.append(type(error).__name__)
            raise
        self.left.append("committed")

    def write(self, item):
        self.gate.wait()
        if len(self.items) == self.fail_at:
            raise CheckpointError("the disk is full")
        self.items.append(item)
        return item


def test_items_are_written_in_order_and_counted():
    disk = Disk()
    with BackgroundWriter(disk.opened(), most=2) as writer:
        for item in range(20):
            writer.give(item)
            assert writer.room(10) == ""
        writer.end()
        assert writer.outcome(10) == ""
    assert disk.items == list(range(20))
    assert disk.left == ["committed"]
    assert writer.done_bytes == sum(range(20))


def test_there_is_room_for_so_many_and_no_more():
    disk = Disk()
    disk.gate.clear()
    with BackgroundWriter(disk.opened(), most=2) as writer:
        for item in (1, 2):
            writer.give(item)
            assert writer.room(0) == ""
        writer.give(3)
        assert writer.room(0) is None
        assert writer.room(0.01) is None
        disk.gate.set()
        assert writer.room(10) == ""
        writer.end()
        assert writer.outcome(10) == ""


def test_a_failure_is_told_at_once_and_to_whoever_asks_later():
    disk = Disk(fail_at=1)
    with BackgroundWriter(disk.opened(), most=10) as writer:
        writer.give(1)
        assert writer.room(10) == ""
        writer.give(2)
        assert writer.outcome(10) == "the disk is full"
        assert writer.room(0) == "the disk is full"
    assert isinstance(writer.failure, CheckpointError)
    assert disk.left == ["CheckpointError"]


def test_what_is_no_user_error_is_told_by_its_kind():
    @contextlib.contextmanager
    def opened():
        raise ZeroDivisionError("whoever divided")
        yield

    with BackgroundWriter(opened(), most=0) as writer:
        assert writer.outcome(10) == "Rank 0 could not write the model: ZeroDivisionError('whoever divided')."


@pytest.mark.parametrize("waits", [True, False])
def test_ctrl_c_ends_the_thread_without_a_commit(waits, monkeypatch):
    """A disk that answers within reason is waited for; one that does not is left behind and stops by itself."""
    monkeypatch.setattr(full, "JOIN_SECONDS", 10.0 if waits else 0.01)
    disk = Disk()
    disk.gate.clear()
    writer = BackgroundWriter(disk.opened(), most=10)

    def interrupted():
        with writer:
            for item in range(8):
                writer.give(item)
            if waits:
                threading.Timer(0.05, disk.gate.set).start()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    disk.gate.set()
    writer._thread.join(10)
    assert not writer._thread.is_alive()
    assert disk.left == ["_GivenUpError"]
    assert len(disk.items) <= 1
