"""Ranks as threads share torch's random state, which building a model uses."""

import threading

import pytest

from fullshard.train.setup import model as modelling


@pytest.fixture
def one_at_a_time(monkeypatch):
    """Have threads build their models one after the other, so that all get the same weights."""
    lock, make_model = threading.Lock(), modelling.make_model

    def locked(*args):
        with lock:
            return make_model(*args)

    monkeypatch.setattr(modelling, "make_model", locked)
