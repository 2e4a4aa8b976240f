"""Fixtures for runs in one process, whose ranks are threads."""

import contextlib
import threading

import pytest

from fullshard.program.train.run import step as step_module
from fullshard.program.train.setup import model as modelling
from support.interrupted_run import OFTEN, run


@pytest.fixture
def one_at_a_time(monkeypatch):
    """Have threads build their models one after the other, so that all get the same weights."""
    lock, make_model = threading.Lock(), modelling.make_model

    def locked(*args):
        with lock:
            return make_model(*args)

    monkeypatch.setattr(modelling, "make_model", locked)


@pytest.fixture(scope="module")
def unmetered():
    """The memory meter is slow, and listens to the whole process, so that only one rank of it can measure."""

    class FakeMeter(contextlib.nullcontext):
        peak_bytes, start_bytes, timeline = 1, 0, ()

        def __init__(self, device, beside_bytes=0):
            super().__init__()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_module, "MemoryMeter", FakeMeter)
        yield


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, unmetered):
    """Eight steps with dropout in two epochs, evaluated after each second step."""
    directory = tmp_path_factory.mktemp("uninterrupted")
    run(directory, **OFTEN)
    return directory
