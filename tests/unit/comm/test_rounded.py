"""Rounded messages: what arrives is the rounding of what was sent, on every rank, in so many bytes."""

import gc
import math

import pytest
import torch

from fullshard.core.comm import Mesh, RecordingComm, SoloComm, rounded as rounded_module
from fullshard.core.comm.rounded import _FORMATS, BLOCK, RoundedGroup
from fullshard.core.testing import run_ranks
from fullshard.core.torch_private import dispatch_mode
from fullshard.planner.fake_tensors import FakeMode
from fullshard.planner.memory_tracker import MemoryTracker
from fullshard.planner.ranks import PlannedComm
from fullshard.planner.work import is_view
from support import poison
from support.poison import LateComm

SIZES = [1, 2, 3, 4]
NUMELS = [1, 127, 128, 300]


def numbers(rank, numel, dtype=torch.float32):
    generator = torch.Generator().manual_seed(rank)
    return (torch.randn(numel, generator=generator) * 10.0 ** (rank - 1)).to(dtype)


def in_bf16(values):
    return values.to(torch.bfloat16).to(values.dtype)


def in_fp8(values):
    """By torch's own cast, block by block; a tail is a block of its own."""
    blocks = []
    for block in values.float().split(BLOCK):
        scale = block.abs().max() / 448 if block.abs().max() else torch.tensor(1.0)
        blocks.append((block / scale).to(torch.float8_e4m3fn).float() * scale)
    return torch.cat(blocks).to(values.dtype)


ROUNDED = {"bf16": in_bf16, "fp8": in_fp8}


@pytest.mark.parametrize("messages", ROUNDED)
@pytest.mark.parametrize("numel", NUMELS)
@pytest.mark.parametrize("size", SIZES)
def test_every_rank_gathers_the_rounding_of_every_part_its_own_too(size, numel, messages):
    def work(comm):
        full = torch.full((size * numel,), math.nan)
        mine = full.view(size, -1)[comm.rank]
        mine.copy_(numbers(comm.rank, numel))
        group = RoundedGroup(LateComm(comm), messages)
        sent = group.rounded(numbers(comm.rank, numel))
        group.all_gather(full, mine).wait()
        assert torch.equal(sent, full.view(size, -1)[comm.rank])
        return full

    poison.dropped.clear()
    expected = torch.cat([ROUNDED[messages](numbers(rank, numel)) for rank in range(size)])
    for full in run_ranks(size, work):
        assert torch.equal(full, expected)
    gc.collect()
    assert poison.dropped == []  # other ranks had read what this one let go of


@pytest.mark.parametrize("messages", ROUNDED)
@pytest.mark.parametrize("numel", NUMELS)
@pytest.mark.parametrize("size", SIZES)
def test_a_reduce_adds_the_roundings_in_float32_and_in_rank_order(size, numel, messages):
    def work(comm):
        full, shard = numbers(comm.rank, size * numel), torch.full((numel,), math.nan)
        RoundedGroup(LateComm(comm), messages).reduce_scatter(shard, full).wait()
        assert torch.equal(full, numbers(comm.rank, size * numel))  # what was given is unchanged
        return shard

    for rank, shard in enumerate(run_ranks(size, work)):
        expected = torch.zeros(numel)
        for other in range(size):
            expected += ROUNDED[messages](numbers(other, size * numel).view(size, -1)[rank])
        assert torch.equal(shard, expected)


@pytest.mark.parametrize(("messages", "share"), [("bf16", 0.5), ("fp8", 0.25 + 1 / BLOCK)])
def test_the_bytes_on_the_way_are_half_or_a_quarter_and_the_scales(messages, share):
    def sent(comm, group):
        ledger = RecordingComm(comm)
        full = torch.zeros(comm.size * 1024)
        over = group(ledger)
        over.all_gather(full, full[:1024].clone()).wait()
        over.reduce_scatter(torch.zeros(1024), full).wait()
        return [entry.sent_bytes for entry in ledger.entries]

    def work(comm):
        return sent(comm, lambda ledger: ledger), sent(comm, lambda ledger: RoundedGroup(ledger, messages))

    for plain, less in run_ranks(3, work):
        assert less == [share * nbytes for nbytes in plain]


@pytest.mark.parametrize(
    ("messages", "dtype"),
    [("bf16", torch.bfloat16), ("bf16", torch.float16), ("bf16", torch.int64), ("fp8", torch.uint8)],
)
def test_what_is_not_wider_travels_as_it_is(messages, dtype):
    def work(comm):
        ledger = RecordingComm(comm)
        group, shard = RoundedGroup(ledger, messages), torch.tensor([3, 1 + comm.rank]).to(dtype)
        full = torch.zeros(4, dtype=dtype)
        group.all_gather(full, shard).wait()
        total = torch.zeros(2, dtype=dtype)
        group.reduce_scatter(total, full).wait()
        assert ledger.names == ["all_gather", "reduce_scatter"]
        assert torch.equal(group.rounded(shard), shard)
        return full.tolist(), total.tolist()

    (full, first), (_, second) = run_ranks(2, work)
    assert (full, first, second) == ([3, 1, 3, 2], [6, 2], [6, 4])


def test_float64_and_float16_in_fp8_arrive_in_their_own_dtype():
    for dtype in (torch.float64, torch.float16):
        full = torch.zeros(200, dtype=dtype)
        shard = numbers(1, 200, dtype)
        RoundedGroup(SoloComm(torch.device("cpu")), "fp8").all_gather(full, shard).wait()
        torch.testing.assert_close(full, in_fp8(shard), atol=0, rtol=torch.finfo(torch.float16).eps)


def test_fp8_keeps_zeros_and_the_smallest_numbers_and_shows_what_is_not_finite():
    group = RoundedGroup(SoloComm(torch.device("cpu")), "fp8")
    tiny = torch.full((BLOCK,), 1e-40)
    assert torch.equal(group.rounded(torch.zeros(300)), torch.zeros(300))
    assert group.rounded(tiny).isfinite().all()
    for bad in (math.inf, math.nan):
        values = torch.ones(2 * BLOCK)
        values[5] = bad
        arrived = group.rounded(values)
        assert not arrived[5].isfinite()
        assert torch.equal(arrived[BLOCK:], values[BLOCK:])


def test_pieces_are_blocks_and_change_nothing(monkeypatch):
    values = numbers(1, 1000)
    group = RoundedGroup(SoloComm(torch.device("cpu")), "fp8")
    in_one = group.rounded(values)
    monkeypatch.setattr(rounded_module, "_PIECE", 2 * BLOCK)
    assert torch.equal(group.rounded(values), in_one)


def test_a_mesh_rounds_units_alone():
    def work(comm):
        mesh = Mesh(comm, SoloComm(comm.device), "fp8")
        exact = torch.empty(2)
        mesh.shard_group.all_gather(exact, torch.tensor([1.0 + 1e-6 * comm.rank])).wait()
        return mesh.shard_group is comm, exact.tolist(), mesh.as_sent(torch.tensor([1.1, 300.0]), exact).tolist()

    for is_plain, exact, sent in run_ranks(2, work):
        assert is_plain
        assert exact == torch.tensor([1.0, 1.0 + 1e-6]).tolist()
        assert sent != torch.tensor([1.1, 300.0]).tolist()


# Lanes converted whole, as on CUDA


class AloneComm(PlannedComm):
    """One of several ranks, whose collectives move nothing."""

    all_gather = PlannedComm.reduce_scatter


class Operators(dispatch_mode):
    """Names of the operators that a device would run, without views and memory."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not is_view(func) and "empty" not in func.__name__:
            self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


def operators_of(messages, size, numel, dtype=torch.float32):
    """Return the operators of a gather and of a reduce on a rank of ``size``, each with ``numel`` numbers."""
    group = RoundedGroup(AloneComm(1, size, torch.device("cpu")), messages)
    group.whole = True
    full = torch.ones(size * numel, dtype=dtype)
    with Operators() as gather:
        group.all_gather(full, full[numel : 2 * numel]).wait()
    with Operators() as reduce:
        group.reduce_scatter(torch.zeros(numel), full.float()).wait()
    return gather.names, reduce.names


@pytest.mark.parametrize(("messages", "gather", "each"), [("bf16", 2, 1), ("fp8", 8, 5)])
def test_operators_do_not_grow_with_the_lane(messages, gather, each):
    for size in (2, 8):
        found, sums = operators_of(messages, size, 2 * BLOCK)
        assert len(found) == gather  # nor with the ranks
        # Those of a reduce do: terms are added in rank order.
        assert each * size <= len(sums) <= each * size + 5
        for numel in (64 * BLOCK, 1 << 21):
            assert operators_of(messages, size, numel) == (found, sums)
        tail, _ = operators_of(messages, size, 64 * BLOCK + 1)
        assert tail == operators_of(messages, size, (1 << 21) + 1)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("numel", [*NUMELS, 5 * BLOCK + 3])
def test_lanes_converted_whole_are_equal_to_the_bit(numel, dtype):
    values = torch.stack([numbers(rank, numel, dtype) for rank in range(3)])
    values[0, 0], values[1, -1], values[2, :BLOCK] = math.nan, math.inf, 0
    found = []
    for form in _FORMATS["fp8"]:
        messages = form.empty(3, numel, values)
        form.write(messages, values)
        arrived, total = torch.empty_like(values), torch.empty(numel)
        form.read(messages, arrived)
        form.add(messages.unbind(), total)
        found.append((messages, arrived, total))
    for pieces, whole in zip(*found, strict=True):
        torch.testing.assert_close(whole, pieces, rtol=0, atol=0, equal_nan=True)


def test_a_whole_conversion_holds_one_rank_s_part_in_float32():
    size, numel = 8, 1 << 12
    tracker = MemoryTracker()
    with FakeMode(tracker):
        full, total = torch.empty(size * numel), torch.empty(numel)
        form, rows = _FORMATS["fp8"][True], full.view(size, -1)
        messages = form.empty(size, numel, full)
        before = tracker.live
        tracker.restart(lambda: "conversions", lambda: None)
        form.write(messages, rows)
        form.read(messages, rows)
        form.add(messages.unbind(), total)
        held = tracker.peaks["conversions"] - before
    assert 4 * numel <= held <= 4 * numel * 1.01 + 4 * size * numel // BLOCK
