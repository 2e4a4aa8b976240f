"""The memory meter counts the allocator's bytes, temporaries included."""

import torch

from fullshard.comm import MemoryMeter

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
