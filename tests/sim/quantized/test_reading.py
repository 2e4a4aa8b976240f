"""Weights are read by runs, the next one while one is quantised; neither changes a bit."""

import threading

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from fullshard import Pretrained, Quantize, fully_shard
from fullshard.core.engine.setup import weights
from fullshard.core.quantized.formats import NF4
from fullshard.core.testing import run_ranks
from fullshard.errors import CheckpointError
from support import quantized

SHAPES = [(64, 64), (130, 40), (33, 96), (5, 33)]
RUN = 256
"""Weights of a run: each layer but the last has more."""
RUNS = sum(-(-rows * width // RUN) for rows, width in SHAPES)


@pytest.fixture
def short_runs(monkeypatch):
    monkeypatch.setattr(weights, "CHUNK", RUN)


def linears():
    return nn.ModuleList(nn.Linear(width, rows, bias=False) for rows, width in SHAPES)


def sharded(comm, weights):
    with torch.device("meta"):
        model = linears().requires_grad_(requires_grad=False)
    return fully_shard(model, comm, wrap=None, weights=weights)


@pytest.mark.parametrize("type", ["nf4", "int8"])
def test_bits_do_not_depend_on_how_much_is_read_at_a_time(type, tmp_path, monkeypatch):
    torch.manual_seed(0)
    save_file(linears().state_dict(), tmp_path / "model.safetensors")

    def rank(comm):
        return quantized.stored(sharded(comm, Pretrained(tmp_path, quantize=Quantize(type))))

    (at_once,) = run_ranks(1, rank)
    monkeypatch.setattr(weights, "CHUNK", RUN)
    for size in (1, 2, 3):
        for stored in run_ranks(size, rank):
            for name, parts in stored.items():
                assert all(map(torch.equal, parts, at_once[name])), (size, name)


class Watched:
    """A source of numbers that counts its reads; the one with the number ``fails`` raises."""

    quantize = Quantize("nf4")

    def __init__(self, fails=None):
        self.fails = fails
        self.begun = 0
        self.changed = threading.Condition()

    def open(self, model, wanted):
        return self

    def has(self, name):
        return name.endswith("weight")  # not codes and scales

    def read(self, name, start, out):
        with self.changed:
            self.begun += 1
            self.changed.notify_all()
            if self.begun == self.fails:
                raise CheckpointError("the disk is gone")
        out.fill_(1.0)


def test_the_next_run_is_read_while_one_is_quantised_and_none_after_it(short_runs, monkeypatch):
    source, plain, runs = Watched(), NF4.quantise, []

    def held(format, values, shape):
        runs.append(values.numel())
        with source.changed:
            ahead = min(len(runs) + 1, RUNS)
            assert source.changed.wait_for(lambda: source.begun >= ahead, timeout=10)
            assert source.begun == ahead
        return plain(format, values, shape)

    monkeypatch.setattr(NF4, "quantise", held)
    run_ranks(1, lambda comm: sharded(comm, source))
    assert source.begun == len(runs) == RUNS


def test_a_read_that_fails_is_the_error_of_every_rank_and_leaves_no_thread(short_runs):
    before = set(threading.enumerate())

    def rank(comm):
        with pytest.raises(CheckpointError, match="the disk is gone"):
            sharded(comm, Watched(fails=3 if comm.rank else None))

    run_ranks(2, rank)
    assert not [one for one in threading.enumerate() if one not in before and "ThreadPool" in one.name]
