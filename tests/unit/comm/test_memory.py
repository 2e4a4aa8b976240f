"""The memory meter counts the allocator's bytes, temporaries included."""

import time

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fullshard.core.comm import MemoryMeter
from fullshard.core.comm.memory import live_tensor_bytes

MIB = 1 << 20


def test_peak_counts_temporaries_and_what_was_there_before():
    before = torch.ones(MIB // 4)
    with MemoryMeter(torch.device("cpu")) as meter:
        kept = torch.ones(MIB // 4)
        (torch.ones(MIB) + 1).sum()
        del kept
    assert meter.start_bytes >= before.nbytes
    above = meter.peak_bytes - meter.start_bytes
    assert 9 * MIB <= above <= 9 * MIB + 4096


def test_memory_that_is_given_back_lowers_the_count():
    with MemoryMeter(torch.device("cpu")) as meter:
        held = torch.ones(MIB)
        held.untyped_storage().resize_(0)
        torch.ones(2 * MIB)
    assert 8 * MIB <= meter.peak_bytes - meter.start_bytes <= 8 * MIB + 4096


def test_the_timeline_is_on_the_clock_of_perf_counter():
    with MemoryMeter(torch.device("cpu")) as meter:
        before = time.perf_counter()
        held = torch.ones(MIB)
        between = time.perf_counter()
        del held
        after = time.perf_counter()
    # The profiler's clock is calibrated, not read: to well under a millisecond.
    near = 1e-3
    counts = [meter.start_bytes, *(count for _, count in meter.timeline)]
    changes = {new - old: at for (at, new), old in zip(meter.timeline, counts, strict=False)}
    assert before - near <= changes[4 * MIB] <= between + near
    assert between - near <= changes[-4 * MIB] <= after + near
    assert meter.peak_bytes == max(count for _, count in meter.timeline)


def test_tensors_that_a_compiler_made_up_have_no_memory():
    before = live_tensor_bytes()
    shapes = ShapeEnv()
    with FakeTensorMode(shape_env=shapes):
        symbolic = torch.empty(shapes.create_unbacked_symint())
        plain = torch.ones(MIB)
    assert not isinstance(symbolic.untyped_storage().nbytes(), int)
    assert live_tensor_bytes() - before < MIB < plain.nbytes
    assert type(live_tensor_bytes()) is int
