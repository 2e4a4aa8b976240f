"""A unit: which parameters its modules show, when gradients complete it, and what a reduce leaves behind."""

import copy
import pickle

import pytest
import torch
from torch import nn

from fullshard import fully_shard
from fullshard.core.engine.step.lane import LaneState
from fullshard.core.engine.step.recorder import StepRecorder
from fullshard.core.engine.step.unit import Keep
from fullshard.core.shards import rows_of
from fullshard.core.testing import run_ranks
from fullshard.errors import InvariantError, ShardingError
from support.optimizers import copies


def on_two_ranks(work):
    """Call ``work(unit, module, full)`` on two ranks: the only unit, its module and the full parameters."""

    modules = copies(nn.Linear(8, 6), 2)

    def of_rank(comm):
        module = modules[comm.rank]
        full = {name: p.detach().clone() for name, p in module.named_parameters()}
        model = fully_shard(module, comm, wrap=None)
        (unit,) = model._fullshard_runtime.units
        return work(unit, model, full)

    return run_ranks(2, of_rank)


def gather(unit):
    unit.issue_gather()
    unit.finish_gather()


def fill(unit, value):
    """Have gradients of all parameters in the lane, as autograd would have accumulated them."""
    gather(unit)
    for param in unit.params:
        param.full.grad = torch.full_like(param.full, value)
        param.arrived = True
        unit.add_gradient(param)


def test_modules_show_full_parameters_between_finish_gather_and_to_sharded():
    def work(unit, module, full):
        assert unit.state is LaneState.SHARDED
        shards = dict(module.named_parameters())
        unit.issue_gather()
        assert (unit.state, unit.unsharded) == (LaneState.GATHERING, False)
        assert module.weight is shards["weight"]
        unit.finish_gather()
        assert (unit.state, unit.unsharded) == (LaneState.GATHERED, True)
        assert torch.equal(module.weight, full["weight"])
        unit.to_sharded()
        assert module.weight is shards["weight"]
        assert unit.state is LaneState.GATHERED
        unit.reshard()
        assert (unit.state, unit.unsharded) == (LaneState.SHARDED, False)

    on_two_ranks(work)


def test_a_gather_under_way_is_waited_for_before_its_memory_is_freed():
    def work(unit, module, full):
        unit.issue_gather()
        unit.reshard()
        assert all(lane.gather_work is lane.unsettled is None for lane in unit.lanes)
        gather(unit)
        assert torch.equal(module.bias, full["bias"])

    on_two_ranks(work)


def test_a_unit_that_was_not_gathered_is_not_finished():
    def work(unit, module, full):
        with pytest.raises(InvariantError, match="finish_gather"):
            unit.finish_gather()

    on_two_ranks(work)


def test_it_has_changed_if_a_shard_differs_from_its_part_of_the_gathered_buffer():
    def work(unit, module, full):
        assert unit.has_changed()  # nothing is gathered
        gather(unit)
        unit.to_sharded()
        assert not unit.has_changed()
        before = unit.version()
        unit.params[0].sharded.data.add_(1.0)
        assert (unit.has_changed(), unit.version()) == (True, before)
        with torch.no_grad():
            unit.params[0].sharded.add_(1.0)
        assert unit.version() > before

    on_two_ranks(work)


def test_it_is_complete_when_every_trainable_parameter_has_its_gradient():
    def work(unit, module, full):
        gather(unit)
        weight, bias = unit.params
        assert not unit.note_complete(weight)  # nothing arrived
        weight.arrived = bias.arrived = True
        assert not unit.note_complete(weight)
        assert not unit.note_complete(weight)  # counted once
        assert unit.note_complete(bias)
        unit.end_backward(synced=True)
        weight.arrived = True
        bias.sharded.requires_grad_(False)
        bias.bind(trainable=False)
        unit.count_trainable()
        assert unit.note_complete(weight)

    on_two_ranks(work)


def test_a_reduce_leaves_the_mean_over_ranks_in_the_shards_and_no_unsharded_gradient():
    def work(unit, module, full):
        rank = unit.lanes[0].mesh.rank
        fill(unit, 1.0 + rank)
        fill(unit, 2.0)  # a second arrival is added
        assert unit.holds_gradient
        unit.issue_reduce(across=True, final=True)
        assert unit.reducing
        assert not unit.holds_gradient
        unit.finish_reduce()
        assert not unit.reducing
        for param in unit.params:
            assert param.full.grad is None
            rows = param.sharded.detach()
            assert (
                param.sharded.grad is None
                if not rows.numel()
                else torch.equal(param.sharded.grad, torch.full_like(rows, 3.5))
            )
        assert unit.lanes[0].tracker.live["gradients"] == 0
        assert unit.gradient_bytes() == sum(rows_of(param.sharded).numel() * 4 for param in unit.params)

    on_two_ranks(work)


def test_sparse_gradients_and_gradients_with_a_graph_are_refused():
    def work(unit, module, full):
        gather(unit)
        weight = unit.params[0]
        weight.full.grad = torch.zeros_like(weight.full).to_sparse()
        with pytest.raises(ShardingError, match="sparse=False"):
            unit.add_gradient(weight)
        weight.full.grad = torch.ones_like(weight.full, requires_grad=True) * 2
        with pytest.raises(ShardingError, match="create_graph"):
            unit.add_gradient(weight)

    on_two_ranks(work)


def test_an_abandoned_backward_leaves_nothing_behind():
    def work(unit, module, full):
        fill(unit, 1.0)
        unit.issue_reduce(across=True, final=True)
        fill(unit, 1.0)
        unit.drop_gradients()
        assert not unit.reducing
        assert not unit.holds_gradient
        assert unit.lanes[0].tracker.live["gradients"] == 0
        assert not any(param.arrived or param.waiting for param in unit.params)

    on_two_ranks(work)


def test_reasons_of_a_backward_to_stay_gathered_end_with_it():
    def work(unit, module, full):
        unit.keep |= {Keep.OUTPUT, Keep.NEXT_PASS, Keep.CONTEXT}
        assert unit.stays_unsharded
        unit.end_backward(synced=True)
        assert unit.keep == {Keep.CONTEXT}
        unit.keep = {Keep.NEXT_PASS}
        assert not unit.stays_unsharded

    on_two_ranks(work)


def test_it_is_neither_copied_nor_pickled():
    def work(unit, module, full):
        for action in (copy.deepcopy, pickle.dumps):
            with pytest.raises(ShardingError, match="cannot be copied or pickled"):
                action(unit)

    on_two_ranks(work)


def test_a_write_to_a_full_parameter_is_told_once():
    def work(unit, module, full):
        gather(unit)
        with torch.no_grad():
            module.weight.add_(1.0)
        with pytest.raises(ShardingError, match="changed a parameter in place, one of weight, bias"):
            unit.refuse_writes()
        unit.refuse_writes()

    on_two_ranks(work)


def test_a_unit_is_trainable_while_one_of_its_parameters_is():
    def work(unit, module, full):
        trainable = []
        for param in unit.params:
            trainable.append(unit.trainable)
            param.trainable = False
            unit.count_trainable()
        return [*trainable, unit.trainable, *(lane.trainable for lane in unit.lanes)]

    assert on_two_ranks(work) == [[True, True, False, False]] * 2


def test_a_recorder_is_given_the_works_of_both_collectives():
    class Works(StepRecorder):
        def __init__(self):
            super().__init__()
            self.counts = []

        def issued(self, unit, kind, works):
            self.counts.append((kind, len(works)))

    def work(unit, module, full):
        unit.recorder = Works()
        fill(unit, 1.0)
        unit.issue_reduce(across=True, final=True)
        unit.finish_reduce()
        return unit.recorder.counts, len(unit.lanes)

    for counts, lanes in on_two_ranks(work):
        assert counts == [("gather", lanes), ("reduce", lanes)]
