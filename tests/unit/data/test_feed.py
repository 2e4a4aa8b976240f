"""Micro-batches of the next step are made and sent while the caller works on this step's, by one thread that ends."""

import threading

import pytest
import torch

from fullshard.core.comm import Device
from fullshard.errors import DataError
from fullshard.program.data import CollateSpec, EpochPlan, feed, steps
from fullshard.program.data.batching import feed as module
from support.one_step import tokenized

ROWS = tokenized([[3, 4], [5], [6, 7, 8], [9]], [[1], [2, 3], [4], [5]])
WAIT_S = 30


class QueuedDevice(Device):
    """The CPU, as a device that works while Python does; notes who sends and who waits for what was sent."""

    queues = True

    def __init__(self):
        super().__init__(torch.device("cpu"))
        self.senders, self.takers = [], []
        self.sent = threading.Semaphore(0)

    def send(self, tensors):
        self.senders.append(threading.current_thread().name)
        self.sent.release()

        def arrived():
            self.takers.append(threading.current_thread())
            return [tensor.clone() for tensor in tensors]

        return arrived


@pytest.fixture
def device(monkeypatch):
    one = QueuedDevice()
    monkeypatch.setattr(module, "device_of", lambda _: one)
    return one


def made(start=0):
    return steps(ROWS, EpochPlan(4, 1, 1), 0, CollateSpec(0), start=start)


def feeders():
    return [thread for thread in threading.enumerate() if thread.name.startswith("feed-ahead")]


def same(one, other):
    assert one.indices == other.indices
    for name in ("input_ids_BS", "attention_mask_BS", "labels_BT", "prompt_ids_BP"):
        assert torch.equal(getattr(one, name), getattr(other, name))


@pytest.mark.parametrize("queues", [True, False])
def test_batches_and_their_order_are_those_made_in_the_callers_thread(device, queues):
    device.queues = queues
    expected = list(made(start=1))
    given = list(feed(made(start=1), torch.device("cpu")))
    assert len(given) == len(expected) == 3
    for (one,), (other,) in zip(given, expected, strict=True):
        same(one, other)
        assert one.prompt_ids_BP is one.input_ids_BS, "shared tensors are sent once"


def test_the_next_step_is_sent_before_this_one_ends_and_no_step_after_it(device):
    fed = feed(made(), torch.device("cpu"))
    for step in range(4):
        next(fed)
        for _ in range(2 if step == 0 else step < 3):
            assert device.sent.acquire(timeout=WAIT_S)
        assert len(device.senders) == min(step + 2, 4), "at most one step is ahead"
    assert all(name.startswith("feed-ahead") for name in device.senders)
    assert set(device.takers) == {threading.current_thread()}, "the stream that computes is the caller's"
    assert next(fed, None) is None
    assert not feeders()


def test_an_error_is_raised_at_its_step(device):
    def failing():
        yield from made(start=3)
        raise DataError("row 7 cannot be read")

    fed = feed(failing(), torch.device("cpu"))
    assert len(next(fed)) == 1
    with pytest.raises(DataError, match="row 7"):
        next(fed)
    assert not feeders()


def test_closed_early_it_leaves_no_thread_and_closes_what_it_reads(device):
    closed = []

    def endless():
        try:
            while True:
                yield next(made())
        finally:
            closed.append(threading.current_thread())

    fed = feed(endless(), torch.device("cpu"))
    next(fed)
    fed.close()
    assert closed == [threading.current_thread()]
    assert not feeders()


def test_on_a_device_without_a_queue_the_caller_makes_them():
    before = threading.active_count()
    fed = feed(made(), torch.device("cpu"))
    next(fed)
    assert threading.active_count() == before
    fed.close()
