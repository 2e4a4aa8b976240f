"""Rows are added to a table in a fixed order, with nothing of the table's size."""

import pytest
import torch

from fullshard.core.comm.device import add_rows, add_rows_of_groups


def given(lookups, height, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    indices = torch.randint(0, height, (lookups,), generator=generator)
    return torch.randn(height, 5, generator=generator).to(dtype), indices, torch.randn(lookups, 5).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("lookups", "height"), [(0, 3), (1, 3), (40, 3), (40, 1000), (7, 7)])
def test_adding_by_groups_adds_each_row_to_its_own(lookups, height, dtype):
    table, indices, rows = given(lookups, height, dtype)
    expected = table.clone()
    for index, row in zip(indices.tolist(), rows, strict=True):
        expected[index] += row
    add_rows(other := table.clone(), indices, rows)
    add_rows_of_groups(table, indices, rows)
    torch.testing.assert_close(table, expected)
    torch.testing.assert_close(other, expected)


def test_rows_that_no_index_names_keep_their_bits():
    table, _, rows = given(30, 50, torch.float32)
    before = table.clone()
    indices = torch.full((30,), 7)
    add_rows_of_groups(table, indices, rows)
    others = torch.arange(50) != 7
    assert torch.equal(table[others], before[others])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("lookups", "height"), [(4096, 7), (20000, 32128)])
def test_cuda_gives_the_same_bits_each_time_and_waits_for_nothing(lookups, height, dtype):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    table, indices, rows = (part.cuda() for part in given(lookups, height, dtype))
    expected = table.double().index_add_(0, indices, rows.double())
    found = []
    for _ in range(3):
        one = table.clone()
        torch.cuda.set_sync_debug_mode("error")
        try:
            add_rows(one, indices, rows)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        found.append(one)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    # One rounding of the sum and one of the addition, of numbers as large as the largest sum.
    bound = 4 * torch.finfo(dtype).eps * expected.abs().max()
    assert (found[0].double() - expected).abs().max() <= bound * (1 if dtype == torch.bfloat16 else 64)
