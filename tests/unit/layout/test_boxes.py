"""Boxes cover the run, in order, and are as few as possible."""

from itertools import pairwise
from math import prod

from hypothesis import given, settings, strategies as st

from fullshard.core.layout import boxes

bounded = settings(max_examples=200, deadline=None, derandomize=True)


@st.composite
def runs(draw, largest=5):
    shape = tuple(draw(st.lists(st.integers(1, largest), max_size=4)))
    start, stop = sorted((draw(st.integers(0, prod(shape))), draw(st.integers(0, prod(shape)))))
    return shape, start, stop


def elements(shape, box):
    """The flattened elements of a box, in the order of its own flattened elements."""
    found = [0]
    for size, offset, count in zip(shape, box.offsets, box.sizes, strict=True):
        found = [base * size + offset + i for base in found for i in range(count)]
    return found


def fewest(shape, start, stop):
    """Fewest boxes for the run, by trying every box that begins at every element."""
    strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    best = {stop: 0}
    for first in range(stop - 1, start - 1, -1):
        ends = [first + 1] if not shape else []
        for size, stride in zip(shape, strides, strict=True):
            if first % stride == 0:
                ends += [first + n * stride for n in range(1, size - first // stride % size + 1)]
        best[first] = 1 + min(best[end] for end in ends if end <= stop)
    return best[start]


@given(runs())
@bounded
def test_boxes_hold_exactly_the_run_in_order(run):
    shape, start, stop = run
    found = boxes(shape, start, stop)
    assert [one for box in found for one in elements(shape, box)] == list(range(start, stop))
    assert [box.start for box in found] == [elements(shape, box)[0] for box in found]
    assert all(before.start + before.numel == after.start for before, after in pairwise(found))


@given(runs())
@bounded
def test_boxes_are_as_few_as_can_be(run):
    shape, start, stop = run
    found = boxes(shape, start, stop)
    assert len(found) == fewest(shape, start, stop)
    assert len(found) <= max(1, 2 * len(shape) - 1)


def test_an_empty_tensor_has_no_boxes():
    assert boxes((0, 8), 0, 0) == []
    assert boxes((), 0, 0) == []
