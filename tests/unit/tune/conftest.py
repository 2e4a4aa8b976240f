"""Ranks as threads build their models one after the other."""

import threading

import pytest

from fullshard.program.train.setup import model as modelling


@pytest.fixture
def one_at_a_time(monkeypatch):
    """Have threads build their models one after the other, so that all get the same weights."""
    lock, make_model = threading.Lock(), modelling.make_model

    def locked(*args):
        with lock:
            return make_model(*args)

    monkeypatch.setattr(modelling, "make_model", locked)
