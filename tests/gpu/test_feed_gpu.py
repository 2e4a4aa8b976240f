"""Batches that a thread sends to the device ahead are those that were made, whatever the compute stream is doing."""

import threading

import pytest
import torch

from fullshard.program.data import CollateSpec, EpochPlan, feed, steps
from support.one_step import tokenized

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

ROWS = tokenized([[row + 3] * 1024 for row in range(64)], [[row + 3] * 64 for row in range(64)])


def made():
    return steps(ROWS, EpochPlan(64, 1, 4, accumulation=2), 0, CollateSpec(0))


def test_each_step_reads_its_own_batches_while_the_device_is_behind():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    device = torch.device("cuda", 0)
    expected = [(batch.input_ids_BS.sum(), batch.labels_BT.sum()) for step in made() for batch in step]
    sums = []
    busy = torch.randn(4096, 4096, device=device)
    for step in feed(made(), device):
        for _ in range(20):  # the device is behind, so later steps are sent and dropped before these are read
            busy = busy @ busy
        for batch in step:
            assert batch.input_ids_BS.device == device
            sums.append(torch.stack([batch.input_ids_BS.sum(), batch.labels_BT.sum()]))
        del step, batch
    assert [tuple(one) for one in torch.stack(sums).tolist()] == [tuple(map(int, one)) for one in expected]
    assert not [one for one in threading.enumerate() if one.name.startswith("feed-ahead")]
