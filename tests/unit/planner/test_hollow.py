"""Operators on tensors without memory count what the allocator counts when they run."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from fullshard.comm import MemoryMeter
from fullshard.errors import ModelError
from fullshard.planner.hollow import HollowMode
from fullshard.planner.meter import Meter

ROWS = (64, 1024)


def views():
    x = torch.ones(ROWS)
    y = x.t().reshape(-1, 8, 64)[2:].unsqueeze(0)
    return x.view(-1) * 2, y


def freed():
    x = torch.empty(ROWS)
    x = x.exp()
    return x.sin().sum()


def resized():
    x = torch.empty(ROWS)
    view = x[2:]
    x.untyped_storage().resize_(0)
    y = torch.empty(ROWS) + 1
    x.untyped_storage().resize_(y.nbytes)
    return view, y


def two_dtypes():
    x = torch.empty(ROWS, dtype=torch.bfloat16)
    total = torch.zeros(ROWS)
    return total.add_(x), total * x


def used_twice():
    """Autograd adds the second gradient to the first, in place."""
    table = torch.empty(ROWS, requires_grad=True) * 1
    ((table * 2).sum() + (table * 3).sum()).backward()


def held_gradients():
    """Gradients that a hook keeps are not added to in place."""
    kept = []
    table = torch.empty(ROWS, requires_grad=True) * 1
    one, other = table.view_as(table), table.view_as(table)
    one.register_hook(lambda gradient: kept.append(gradient))
    other.register_hook(lambda gradient: kept.append(gradient))
    ((one * 2).sum() + (other * 3).sum()).backward()
    return kept


def checkpointed():
    x = torch.empty(ROWS, requires_grad=True)
    for _ in range(3):
        x = checkpoint(lambda y: torch.nn.functional.dropout(y.exp().sin(), 0.5), x, use_reentrant=False)
    x.sum().backward()


@pytest.mark.parametrize("program", [views, freed, resized, two_dtypes, used_twice, held_gradients, checkpointed])
def test_the_peak_is_the_allocators(program):
    torch.manual_seed(0)
    with MemoryMeter(torch.device("cpu")) as measured:
        program()
    meter = Meter()
    with HollowMode(meter):
        program()
    assert max(meter.peaks.values()) == pytest.approx(measured.peak_bytes - measured.start_bytes, abs=256)
    assert meter.live < 256


def test_floats_are_unknown_and_whole_numbers_are_known():
    with HollowMode(Meter()):
        numbers = torch.tensor([3, 1, 2])
        assert numbers.sort().values.tolist() == [1, 2, 3]
        assert (torch.ones(4, 4) > 0).all()
        with pytest.raises(ModelError, match="reads a number"):
            torch.empty(3).exp().sum().item()
        numbers.copy_(torch.empty(3).exp())
        with pytest.raises(ModelError, match="reads a number"):
            numbers.sum().item()


def test_many_whole_numbers_are_not_computed():
    with HollowMode(Meter()), pytest.raises(ModelError):
        torch.zeros(1 << 19, dtype=torch.int64).sum().item()


def test_the_meta_device_has_no_memory():
    meter = Meter()
    with HollowMode(meter):
        before = meter.live
        x = torch.empty(ROWS, device="meta")
        assert (x + 1).is_meta
        assert torch.empty_like(x, device="cpu").shape == ROWS
        assert meter.peaks["before_first_step"] >= before + 64 * 1024 * 4
    assert meter.live < 256
