"""Operators on tensors without memory count what the allocator counts when they run."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from fullshard import Quantize
from fullshard.core.comm import MemoryMeter
from fullshard.core.quantized import formats, linear
from fullshard.core.quantized.formats import bitsandbytes, format_of
from fullshard.errors import ModelError
from fullshard.planner import fake_tensors
from fullshard.planner.fake_tensors import FakeMode, real_tensors
from fullshard.planner.memory_tracker import MemoryTracker

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


def stored_in_4_bits():
    """Codes and scales of a weight, and its format."""
    format = format_of(Quantize("nf4", double_quant=False))
    sizes = format.codes_shape(ROWS), (format.scales_bytes(ROWS),)
    return format, [torch.empty(size, dtype=torch.uint8) for size in sizes]


def product_in_4_bits():
    """bitsandbytes' one operator makes the dequantised weight on the way."""
    format, stored = stored_in_4_bits()
    return format.linear(torch.empty(8, ROWS[1]), *stored, ROWS, None)


def attention_with_a_trained_bias():
    """As T5's: torch's softmax of it keeps a mask of all scores until it returns."""
    query, key, value = torch.empty(3, 2, 4, 64, 8).unbind()
    bias = torch.empty(2, 1, 64, 64, requires_grad=True)
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=bias)


def attention_that_casts_its_mask():
    """In bf16 the scores are fp32, and the mask is added to them in place from a cast of it."""
    query, key, value = torch.empty(3, 2, 4, 64, 8, dtype=torch.bfloat16).unbind()
    bias = torch.empty(2, 4, 64, 64, dtype=torch.bfloat16, requires_grad=True)
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=bias)


def a_transposed_gradient_of_an_embedding():
    """Its kernel copies the gradient into rows in order."""
    table = torch.empty(32, 64, requires_grad=True)
    found = torch.nn.functional.embedding(torch.zeros(2, 64, dtype=torch.long), table)
    found.backward(torch.empty(64, 2, 64).permute(1, 2, 0))


def a_sum_of_exponentials():
    torch.empty(ROWS).logsumexp(-1)


def a_sum_in_another_dtype():
    (torch.empty(ROWS) > 0).sum(-1)


def rows_of_a_gradient_in_16_bits():
    x = torch.empty(ROWS, dtype=torch.bfloat16, requires_grad=True)
    x.gather(-1, torch.zeros(ROWS[0], 3, dtype=torch.long)).sum().backward()
    x.topk(2)[0].exp().sum().backward()


def products_of_expanded_matrices():
    x, weight = torch.empty(ROWS, requires_grad=True), torch.empty(ROWS[1], 80, requires_grad=True)
    (x @ weight).sum().backward()


def a_loss_of_logits_from_parts():
    x = torch.empty(ROWS, dtype=torch.bfloat16)
    torch.nn.functional.binary_cross_entropy_with_logits(x, x)


def a_mean_in_16_bits():
    torch.empty(ROWS, dtype=torch.bfloat16, requires_grad=True).mul(2).mean().backward()


PROGRAMS = [views, freed, resized, two_dtypes, used_twice, held_gradients, checkpointed, product_in_4_bits]
PROGRAMS += [attention_with_a_trained_bias, attention_that_casts_its_mask, a_transposed_gradient_of_an_embedding]
PROGRAMS += [a_sum_in_another_dtype, rows_of_a_gradient_in_16_bits, products_of_expanded_matrices]
PROGRAMS += [a_sum_of_exponentials, a_loss_of_logits_from_parts, a_mean_in_16_bits]


def assert_same_peak(program):
    """Compare the planned peak of a program with the allocator's."""
    torch.manual_seed(0)
    with MemoryMeter(torch.device("cpu")) as measured:
        program()
    tracker = MemoryTracker()
    with FakeMode(tracker):
        program()
    assert max(tracker.peaks.values()) == pytest.approx(measured.peak_bytes - measured.start_bytes, abs=256)
    assert tracker.live < 256


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_peak_is_the_allocators(program):
    assert_same_peak(program)


@pytest.mark.parametrize("after", [0, 5], ids=["in the loss", "after it"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy"])
def test_a_loss_holds_its_elements_as_its_kernel_does(name, dtype, after):
    def program():
        x, y = torch.rand(ROWS, dtype=dtype), torch.rand(ROWS, dtype=dtype)
        loss = getattr(torch.nn.functional, name)(x, y)
        return loss, [torch.empty(ROWS, dtype=dtype) for _ in range(after)]

    assert_same_peak(program)


def test_of_a_weight_dequantised_in_parts_two_have_the_peak_of_all(monkeypatch):
    bitsandbytes()  # the tables that its import makes are not of the first way
    monkeypatch.setattr(linear, "RECYCLED_BELOW", 0)
    monkeypatch.setattr(formats, "_DEQUANTISED", 1 << 12)
    peaks, operators = [], []
    for most_parts in (None, 2, 1):
        kept = linear.Workspace()
        kept.most_parts = most_parts
        tracker = MemoryTracker()
        with FakeMode(tracker) as mode:
            format, stored = stored_in_4_bits()
            kept.weight(format, stored, ROWS, torch.float32, torch.float32)
        peaks.append(max(tracker.peaks.values()))
        operators.append(mode.operators)
    assert peaks[0] == peaks[1] > peaks[2]
    assert operators[0] > 2 * operators[1] > operators[2]


def test_floats_are_unknown_and_whole_numbers_are_known():
    with FakeMode(MemoryTracker()):
        numbers = torch.tensor([3, 1, 2])
        assert numbers.sort().values.tolist() == [1, 2, 3]
        assert (torch.ones(4, 4) > 0).all()
        with pytest.raises(ModelError, match="reads a number"):
            torch.empty(3).exp().sum().item()
        numbers.copy_(torch.empty(3).exp())
        with pytest.raises(ModelError, match="reads a number"):
            numbers.sum().item()


def test_a_single_drawn_number_is_a_half():
    """Models drop layers by it."""
    with FakeMode(MemoryTracker()):
        assert not torch.rand([]) < 0.05
        assert torch.rand(1, dtype=torch.float64) < 0.95
        with pytest.raises(ModelError, match="reads a number"):
            bool(torch.rand(2)[0] < 0.05)


def test_many_whole_numbers_are_not_computed():
    with FakeMode(MemoryTracker()), pytest.raises(ModelError):
        torch.zeros(1 << 19, dtype=torch.int64).sum().item()


def test_the_meta_device_has_no_memory():
    tracker = MemoryTracker()
    with FakeMode(tracker):
        before = tracker.live
        x = torch.empty(ROWS, device="meta")
        assert (x + 1).is_meta
        assert torch.empty_like(x, device="cpu").shape == ROWS
        assert tracker.peaks["before_first_step"] >= before + 64 * 1024 * 4
    assert tracker.live < 256


def test_lists_of_unknown_numbers_are_refused():
    with FakeMode(MemoryTracker()):
        assert torch.tensor([3, 1]).tolist() == [3, 1]
        with pytest.raises(ModelError, match="reads a number"):
            torch.empty(3).exp().tolist()
    assert "tolist" not in vars(torch.Tensor)


def test_an_assumed_number_is_read_instead():
    with FakeMode(MemoryTracker()) as mode:
        mode.assumed = lambda: 2.0
        unknown = torch.empty(2).exp()
        assert (unknown[0].item(), bool(unknown[0]), unknown.tolist()) == (2.0, True, [2.0, 2.0])
        assert torch.tensor(3.0).item() == 3.0
        mode.assumed = None
        with pytest.raises(ModelError, match="reads a number"):
            unknown[0].item()


def test_equal_numbers_of_other_types_are_other_operators():
    with FakeMode(MemoryTracker()):
        whole = torch.empty(1 << 19, dtype=torch.int64)
        assert [(whole + other).dtype for other in (1, 1.0, True)] == [torch.int64, torch.float32, torch.int64]


def test_an_operator_in_place_returns_its_own_tensor():
    with FakeMode(MemoryTracker()):
        one, other = torch.empty(ROWS), torch.empty(ROWS)
        assert one.add_(one).data_ptr() == one.data_ptr()
        assert one.add_(other).data_ptr() == one.data_ptr()
        assert other.add_(one).data_ptr() == other.data_ptr()


def test_tensors_above_the_machines_memory_have_address_space():
    tracker = MemoryTracker()
    with FakeMode(tracker):
        before = tracker.live
        large = torch.empty(1 << 42)
        assert tracker.live - before == 1 << 44
        storage = large.untyped_storage()
        storage.resize_(0)
        assert (storage.nbytes(), tracker.live) == (0, before)
        storage.resize_(1 << 44)
        assert (storage.nbytes(), tracker.live - before) == (1 << 44, 1 << 44)
        assert large[5:].exp().shape == ((1 << 42) - 5,)
    assert "nbytes" not in vars(torch.UntypedStorage)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_products_have_the_shape_and_the_dtype_that_they_have(dtype):
    rows, experts = torch.zeros(6, 16, dtype=dtype), torch.zeros(3, 16, 8, dtype=dtype)
    ends = torch.tensor([2, 4, 6], dtype=torch.int32)
    real = torch.nn.functional.grouped_mm(rows, experts, offs=ends)
    with FakeMode(MemoryTracker()):
        made = torch.nn.functional.grouped_mm(torch.empty(6, 16, dtype=dtype), experts, offs=ends)
    assert (made.shape, made.stride(), made.dtype) == (real.shape, real.stride(), real.dtype)


def test_real_tensors_have_values_and_are_not_counted():
    tracker = MemoryTracker()
    with FakeMode(tracker):
        before = tracker.live
        with real_tensors():
            made = torch.ones(ROWS).exp()
            assert made.sum().item() == pytest.approx(ROWS[0] * ROWS[1] * 2.71828, rel=1e-4)
        assert tracker.live == before


def test_rows_that_a_known_mask_picks_are_counted():
    mask = torch.arange(ROWS[0]) < 7

    def picked():
        x = torch.empty(ROWS, requires_grad=True) * 1
        x[mask].exp().sum().backward()

    with MemoryMeter(torch.device("cpu")) as measured:
        picked()
    tracker = MemoryTracker()
    with FakeMode(tracker):
        picked()
        with pytest.raises(ModelError, match="reads a number"):
            torch.empty(ROWS)[torch.empty(ROWS[0]).exp() > 1]
    assert max(tracker.peaks.values()) == pytest.approx(measured.peak_bytes - measured.start_bytes, abs=512)


def test_threads_that_do_not_plan_have_torchs_own_functions():
    fixed, tracker = torch.frombuffer(bytearray(64), dtype=torch.float32), MemoryTracker()

    def beside():
        torch.get_rng_state()
        with pytest.raises(RuntimeError, match="resize"):
            fixed.untyped_storage().resize_(128)
        return fixed.tolist()

    with ThreadPoolExecutor(1) as other, FakeMode(tracker):
        tracker.see(fixed, fake=True)
        before, tracker.peaks = tracker.live, {}
        assert other.submit(beside).result() == [0.0] * 16
        assert (tracker.live, tracker.peaks) == (before, {})
        with pytest.raises(ModelError, match="reads a number"):
            fixed.tolist()


def test_plans_of_two_threads_do_not_end_each_other():
    before = [getattr(owner, name) for owner, name, _ in fake_tensors._WITHOUT_OPERATORS]
    turn = threading.Barrier(2, timeout=60)

    def planned(first):
        tracker = MemoryTracker()
        for begins in (True, False):
            if begins is first:
                mode = FakeMode(tracker).__enter__()
            turn.wait()
        if first:  # ends while the other goes on
            mode.__exit__(None, None, None)
        turn.wait()
        if first:
            return None
        x = torch.empty(ROWS)
        live = tracker.live
        x.untyped_storage().resize_(0)
        mode.__exit__(None, None, None)
        return live - tracker.live

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(planned, (True, False))) == [None, 4 * ROWS[0] * ROWS[1]]
    assert [getattr(owner, name) for owner, name, _ in fake_tensors._WITHOUT_OPERATORS] == before
