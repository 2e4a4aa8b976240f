"""A lane: what its gathered buffer holds when, its memory, and gradients written into it."""

import pytest
import torch

from fullshard.core.comm import Mesh, SoloComm
from fullshard.core.comm.device import Device
from fullshard.core.engine.step import lane as lane_module
from fullshard.core.engine.step.lane import BufferTracker, Lane, LaneState
from fullshard.core.engine.step.precision import Dtypes
from fullshard.core.layout import plan_unit
from fullshard.core.testing import run_ranks
from fullshard.errors import InvariantError

SHAPES = ((5, 4), (3,), (7, 2))
CPU = torch.device("cpu")


def lane_of(comm, **changes):
    """A lane of ``SHAPES`` whose full elements count up from 0."""
    (layout,) = plan_unit(SHAPES, comm.size).lanes
    low, high = layout.shard_bounds(comm.rank)
    options = {
        "shapes": [SHAPES[placement.index] for placement in layout.placements],
        "dtypes": Dtypes(*[torch.float32] * 5),
        "trainable": True,
        "replicated": False,
        "pinned": False,
        "device": Device(CPU),
        "tracker": BufferTracker(),
    }
    lane = Lane(layout, Mesh(comm, SoloComm(CPU)), torch.arange(low, high).float(), **(options | changes))
    lane.allocate()
    lane.release()
    return lane


def gather(lane):
    lane.issue_gather()
    if lane.gather_work is not None:
        lane.gather_work.wait()
    lane.finish_gather()


def settle(lane):
    lane.unsettled = None


def test_it_is_gathered_between_issue_and_release_and_its_memory_only_then():
    def work(comm):
        lane = lane_of(comm)
        assert (lane.state, lane.full.held, lane.tracker.live["gathered"]) == (LaneState.SHARDED, False, 0)
        lane.issue_gather()
        assert lane.state is LaneState.GATHERING
        lane.gather_work.wait()
        lane.finish_gather()
        assert lane.state is LaneState.GATHERED
        assert torch.equal(lane.full.tensor, torch.arange(lane.numel).float())
        assert lane.tracker.live["gathered"] == 4 * lane.numel
        assert torch.equal(lane.own_part, lane.shard)
        settle(lane)
        lane.release()
        assert (lane.state, lane.full.held, lane.tracker.live["gathered"]) == (LaneState.SHARDED, False, 0)

    run_ranks(3, work)


def test_views_of_the_gathered_buffer_hold_the_parameters_again_after_the_next_gather():
    def work(comm):
        lane = lane_of(comm)
        gather(lane)
        view = lane.full.tensor[:20].view(5, 4)
        settle(lane)
        lane.release()
        lane.shard.add_(1)
        gather(lane)
        assert torch.equal(view.flatten(), torch.arange(20) + 1.0)

    run_ranks(2, work)


def test_it_is_not_released_before_other_ranks_have_read_their_part():
    def work(comm):
        lane = lane_of(comm)
        lane.issue_gather()
        with pytest.raises(InvariantError, match="not settled"):
            lane.release()
        lane.gather_work.wait()
        lane.finish_gather()
        with pytest.raises(InvariantError, match="not settled"):
            lane.release()

    run_ranks(2, work)


def test_freed_early_it_is_gathered_again_only_once_it_was_reclaimed():
    def work(comm):
        lane = lane_of(comm)
        gather(lane)
        settle(lane)
        lane.free_early()
        assert (lane.state, lane.full.held) == (LaneState.SPENT, False)
        lane.reclaim()
        assert lane.state is LaneState.SHARDED
        gather(lane)
        lane.reclaim()
        assert lane.state is LaneState.GATHERED

    run_ranks(2, work)


def test_a_replicated_lane_shows_its_shard_and_takes_no_memory_besides():
    def work(comm):
        lane = lane_of(comm, replicated=True)
        gather(lane)
        assert lane.gather_work is lane.unsettled is None
        assert lane.full.tensor.data_ptr() == lane.shard.data_ptr()
        assert lane.tracker.live["gathered"] == 0

    run_ranks(1, work)


def test_the_shard_is_cast_to_the_compute_dtype():
    def work(comm):
        lane = lane_of(comm, dtypes=Dtypes(torch.float32, torch.float32, torch.bfloat16, torch.float32, torch.float32))
        gather(lane)
        assert torch.equal(lane.full.tensor, torch.arange(lane.numel).bfloat16())
        settle(lane)
        lane.release()
        lane.retype(Dtypes(*[torch.float64] * 5))
        assert lane.tracker.live["shards"] == 8 * lane.shard.numel()
        gather(lane)
        assert torch.equal(lane.full.tensor, torch.arange(lane.numel).double())

    run_ranks(2, work)


def test_the_complete_gradient_is_the_sum_of_what_arrived_and_zero_elsewhere():
    def work(comm):
        lane = lane_of(comm)
        lane.device.empty = lambda numel, dtype: torch.full((numel,), float("nan"), dtype=dtype)
        lane.add_gradient(0, torch.ones(lane.shapes[0]))
        lane.add_gradient(0, torch.ones(lane.shapes[0]))
        view, unwritten = lane.gradient_of(2)
        assert unwritten
        view.fill_(5.0)
        assert not lane.gradient_of(2)[1]
        expected = torch.zeros(lane.numel)
        for place, value in ((0, 2.0), (2, 5.0)):
            placement = lane.layout.placements[place]
            expected[placement.start : placement.stop] = value
        assert torch.equal(lane.complete_gradient(), expected)
        assert lane.tracker.live["gradients"] == 4 * lane.numel
        lane.drop_gradient()
        assert (lane.gradient, lane.written, lane.tracker.live["gradients"]) == (None, set(), 0)

    run_ranks(2, work)


def test_a_frozen_lane_has_no_gradient_to_reduce():
    with pytest.raises(InvariantError, match="frozen"):
        lane_of(SoloComm(CPU), trainable=False).complete_gradient()


def test_gradients_that_arrive_together_are_copied_and_cast_together(monkeypatch):
    low, calls, copy = torch.bfloat16, [], torch._foreach_copy_

    def counting(views, grads):
        calls.append(len(grads))
        copy(views, grads)

    monkeypatch.setattr(lane_module, "foreach_copy", counting)
    lane = lane_of(SoloComm(CPU), dtypes=Dtypes(torch.float32, torch.float32, low, torch.float32, torch.float32))
    gradients = [torch.rand(lane.shapes[place]).to(low) for place in range(3)]
    for place, gradient in enumerate(gradients):
        lane.add_gradient(place, gradient)
    assert calls == []
    lane.add_gradient(1, gradients[1])  # what was held is there before more is added
    assert calls == [3]
    full = lane.complete_gradient()
    assert calls == [3]
    for place, (placement, gradient) in enumerate(zip(lane.layout.placements, gradients, strict=True)):
        part = full[placement.start : placement.start + placement.numel].view(lane.shapes[place])
        assert torch.equal(part, gradient.float() * (2 if place == 1 else 1))


def test_held_gradients_are_bounded_and_dropped_with_the_rest(monkeypatch):
    lane = lane_of(SoloComm(CPU))
    first, second, _ = (4 * placement.numel for placement in lane.layout.placements)
    monkeypatch.setattr("fullshard.core.engine.step.lane.HELD_BYTES", first + second)
    lane.add_gradient(1, torch.ones(lane.shapes[1]))
    assert len(lane.held) == 1
    lane.add_gradient(0, torch.ones(lane.shapes[0]))
    assert lane.held == []
    lane.add_gradient(2, torch.ones(lane.shapes[2]))
    lane.drop_gradient()
    assert (lane.held, lane.gradient, lane.written) == ([], None, set())
