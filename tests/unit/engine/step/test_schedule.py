"""The schedule is a pure function from events to actions: exact answers, and the same collectives on every rank."""

import itertools

import pytest

from fullshard.core.engine.step.schedule import Schedule, Verb
from fullshard.core.policy import Prefetch

ROOT, A, B, C, D = range(5)


class Rank:
    """One rank that runs blocks in order and walks backward over those it used; keeps what it would issue."""

    def __init__(self, units=4, trainable=None):
        self.schedule = Schedule(trainable or [True] * units, root=ROOT)
        self.blocks = list(range(1, units))
        self.state = dict.fromkeys(range(units), "sharded")
        self.issued = []

    def perform(self, actions):
        for verb, unit in actions:
            if verb in (Verb.GATHER, Verb.PREFETCH) and self.state[unit] == "sharded":
                self.state[unit] = "gathered"
                self.issued.append(("gather", unit))
            elif verb is Verb.RESHARD:
                self.state[unit] = "sharded"
            elif verb is Verb.REDUCE:
                self.issued.append(("reduce", unit))

    def step(self, used=None, arrives=None):
        """One step; ``used``: blocks its loss depends on; ``arrives``: units that get gradients."""
        used = self.blocks if used is None else used
        arrives = set(range(len(self.state))) if arrives is None else arrives
        schedule, self.issued = self.schedule, []
        schedule.pass_begins()
        root_call, actions = schedule.forward_begins(ROOT)
        self.perform(actions)
        calls = {}
        for block in self.blocks:
            calls[block], actions = schedule.forward_begins(block, input_node=True)
            self.perform(actions)
            assert self.state[block] == "gathered"
            self.perform(schedule.forward_ends(calls[block], needs_backward=True))
        self.perform(schedule.forward_ends(root_call, needs_backward=True))
        schedule.pass_ends()
        forward, self.issued = self.issued, []
        self.perform(schedule.backward_begins(root_call))
        for block in reversed(self.blocks):
            if block not in used:
                continue
            self.perform(schedule.backward_begins(calls[block]))
            assert self.state[block] == "gathered"
            if block in arrives:
                self.perform(schedule.all_arrived(block))
            self.perform(schedule.backward_ends(calls[block]))
        if ROOT in arrives:
            self.perform(schedule.all_arrived(ROOT))
        self.perform(schedule.sweep())
        checksum = schedule.checksum
        schedule.reset()
        self.state = dict.fromkeys(self.state, "sharded")
        return forward, self.issued, checksum


def test_the_first_step_guesses_nothing_and_later_ones_gather_one_ahead():
    rank = Rank()
    first, _, _ = rank.step()
    assert first == [("gather", u) for u in (ROOT, A, B, C)]
    actions = []
    rank.schedule.pass_begins()
    for unit in (ROOT, A, B):
        actions += rank.schedule.forward_begins(unit)[1]
    assert actions == [
        (Verb.GATHER, ROOT), (Verb.GATHER, A), (Verb.PREFETCH, B), (Verb.GATHER, B), (Verb.PREFETCH, C),
    ]  # fmt: skip


def test_backward_gathers_one_ahead_and_reduces_in_order():
    _, backward, _ = Rank().step()
    assert backward == [
        ("gather", C), ("gather", B), ("reduce", C), ("gather", A), ("reduce", B), ("reduce", A), ("reduce", ROOT),
    ]  # fmt: skip


@pytest.mark.parametrize("used", [u for n in range(4) for u in itertools.combinations((A, B, C), n)])
@pytest.mark.parametrize("arrives", [{ROOT, A, B, C}, {A, C}, {ROOT}, set()])
def test_whatever_a_rank_skips_it_issues_the_same_collectives(used, arrives):
    _, expected, checksum = Rank().step()
    _, issued, own_checksum = Rank().step(used=used, arrives=arrives)
    assert issued == expected
    assert own_checksum == checksum


def test_frozen_units_are_gathered_and_not_reduced():
    _, backward, _ = Rank(trainable=[True, False, True, False]).step()
    assert [unit for verb, unit in backward if verb == "reduce"] == [B, ROOT]
    assert [unit for verb, unit in backward if verb == "gather"] == [C, B, A]


def test_a_unit_used_twice_is_reduced_once_after_its_first_call():
    schedule = Schedule([True, True], root=ROOT)
    schedule.pass_begins()
    root_call, _ = schedule.forward_begins(ROOT)
    first, _ = schedule.forward_begins(A, input_node=True)
    schedule.forward_ends(first, needs_backward=True)
    second, _ = schedule.forward_begins(A, input_node=True)
    schedule.forward_ends(second, needs_backward=True)
    schedule.forward_ends(root_call, needs_backward=True)
    actions = schedule.backward_begins(root_call) + schedule.backward_begins(second)
    actions += schedule.backward_ends(second)
    assert Verb.REDUCE not in [verb for verb, _ in actions]
    actions = schedule.backward_begins(first) + schedule.backward_ends(first)
    assert (Verb.REDUCE, A) in actions


def test_a_call_without_an_input_node_is_released_when_all_its_gradients_are_there():
    schedule = Schedule([True, True], root=ROOT)
    call, _ = schedule.forward_begins(A)
    schedule.forward_ends(call, needs_backward=True)
    schedule.backward_begins(call)
    assert schedule.all_arrived(A) == [(Verb.REDUCE, A), (Verb.RESHARD, A)]


def test_a_forward_pass_that_backward_never_comes_to_costs_no_gathers():
    rank = Rank()
    schedule = rank.schedule
    for unit in (A, B, C):
        call, _ = schedule.forward_begins(unit, input_node=True)
        schedule.forward_ends(call, needs_backward=True)
    _, issued, _ = rank.step()
    assert [unit for verb, unit in issued if verb == "gather"] == [C, B, A]


def test_calls_outside_the_plan_flush_what_arrived():
    schedule = Schedule([True, True], root=ROOT)
    call, _ = schedule.forward_begins(A, input_node=True)
    schedule.forward_ends(call, needs_backward=True)
    schedule.reset()
    assert schedule.backward_begins(call) == [(Verb.GATHER, A)]
    assert schedule.backward_ends(call) == [(Verb.FLUSH, A), (Verb.RESHARD, A)]


def test_what_an_earlier_pass_gathered_for_nothing_does_not_count_against_the_bound():
    schedule = Schedule([True] * 5, root=ROOT, prefetch=Prefetch(max_in_flight=2))
    for units in ((A, B, C, D), (A,)):  # the second pass gathers B ahead, and does not run it
        schedule.pass_begins()
        for unit in units:
            call, _ = schedule.forward_begins(unit)
            schedule.forward_ends(call, needs_backward=False)
        schedule.pass_ends()
    schedule.pass_begins()
    assert schedule.forward_begins(C)[1] == [(Verb.GATHER, C), (Verb.PREFETCH, D)]
