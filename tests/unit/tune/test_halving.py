"""Successive halving with a fake clock and deterministic times, beside an exhaustive search."""

import math
import random

import pytest

from fullshard.program.train.setup.tuned import Setting
from fullshard.program.tune.candidates import SAME, Candidate
from fullshard.program.tune.halving import FINALISTS, FULL, NO_TIME, UNTIMED, Halving, Measured


class Machine:
    """Plays the measurements of candidates whose true times are given; its clock is what they would take."""

    def __init__(self, times, *, noise=0.0, setup_s=2.0, at_once=1, left_out=()):
        self.times, self.noise, self.setup_s, self.at_once = times, noise, setup_s, at_once
        self.left_out, self.now, self.asked = dict(left_out), 0.0, []
        self.random = random.Random(1)

    def measure(self, candidate, steps):
        self.asked.append(candidate)
        if candidate in self.left_out:
            return self.left_out[candidate]
        true = self.times[candidate]
        steps = max(steps, self.at_once)
        taken = tuple(true * (1 + self.random.uniform(-self.noise, self.noise)) for _ in range(steps))
        took = self.setup_s + (UNTIMED + steps) * true
        self.now += took
        setting = Setting(candidate.ways, candidate.recompute, candidate.rows, candidate.times)
        return Measured(setting, taken, tokens=100, took_s=took, compile_s=0.0, reserved_bytes=0)

    def run(self, limit_s=1e9):
        return Halving(self.measure, lambda: self.now, limit_s).run(list(self.times))


def space(seed):
    """Candidates of two ways, recompute and rows, with effects that do not just multiply."""
    chance = random.Random(seed)
    effects = {}
    for value in ("flex", "compile", "none", "all", 8, 4, 2, 1):
        effects[value] = chance.uniform(0.6, 1.6)
    found = {}
    for attention in ("", "flex"):
        for blocks in ("", "compile"):
            for recompute in ("none", "all"):
                for rows in (8, 4, 2, 1):
                    one = Candidate(attention, "", blocks, recompute, rows, 8 // rows)
                    values = [value for value in (attention, blocks, recompute, rows) if value]
                    seconds = 0.5
                    for value in values:
                        seconds *= effects[value]
                    found[one] = seconds * chance.uniform(0.85, 1.15)
    return dict(sorted(found.items(), key=lambda pair: len(pair[0].ways)))


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("at_once", [1, FULL])
def test_the_choice_is_within_5_percent_of_an_exhaustive_search(seed, at_once):
    times = space(seed)
    machine = Machine(times, noise=0.03, at_once=at_once)
    best = next(iter(machine.run().measured))
    assert times[best] <= 1.05 * min(times.values())
    first = [machine.asked.index(one) for one in times]
    assert sorted(first) == list(range(len(times)))  # each once before any of them again


def test_the_first_rounds_time_a_step_and_the_last_three():
    times = space(0)
    machine = Machine(times)
    found = list(machine.run().measured.items())
    counts = [len(one.steps_s) for _, one in found]
    assert min(counts[:FINALISTS]) >= FULL
    assert counts[FINALISTS : math.ceil(len(times) / 4)] == [3] * (math.ceil(len(times) / 4) - FINALISTS)
    assert counts[-len(times) // 2 :] == [1] * (len(times) // 2)
    order = [one.step_s for _, one in found]
    assert order[0] == min(order)


def test_with_little_time_what_is_predicted_slow_is_left_out_and_the_limit_holds():
    times = space(3)
    machine = Machine(times)
    outcome = machine.run(limit_s=80.0)
    assert machine.now <= 80.0 + 2.0 + 8 * max(times.values())
    left_out = [one for one, why in outcome.left_out.items() if why == NO_TIME]
    assert left_out
    assert len(left_out) + len(outcome.measured) == len(times)
    best = next(iter(outcome.measured))
    assert times[best] <= 1.25 * min(times.values())


def test_what_one_axis_does_is_measured_first_and_then_what_is_predicted_fastest():
    plain, rows = Candidate(rows=4), Candidate(rows=2, times=2)
    flex, all_of_them = Candidate("flex", rows=4), Candidate(recompute="all", rows=4)
    both, slow = Candidate("flex", rows=2, times=2), Candidate("flex", recompute="all", rows=4)
    fewer = Candidate(rows=1, times=4)
    times = {slow: 1.8, plain: 1.0, fewer: 3.0, rows: 1.5, all_of_them: 1.4, both: 1.2, flex: 0.7}
    machine = Machine(times)
    Halving(machine.measure, lambda: machine.now, 1e9).run([plain, rows, fewer, all_of_them, flex, both, slow])
    # Two rows are slower than four, so one row, no faster than two, waits for what is predicted to be faster.
    assert machine.asked[:7] == [plain, rows, all_of_them, flex, slow, both, fewer]


def test_one_is_measured_however_little_time_there_is():
    machine = Machine(space(0))
    outcome = machine.run(limit_s=0.0)
    assert len(outcome.measured) == 1
    assert len(machine.asked) == 1


def test_what_is_left_out_keeps_its_reason_unless_it_is_another_candidate_by_another_name():
    times = space(0)
    some = list(times)
    machine = Machine(times, left_out={some[0]: "too large", some[5]: SAME, some[9]: "wrong"})
    outcome = machine.run()
    assert outcome.left_out == {some[0]: "too large", some[9]: "wrong"}
    assert len(outcome.measured) == len(times) - 3


def test_a_finalist_that_is_lost_later_is_no_choice():
    times = dict(list(space(0).items())[:6])
    machine = Machine(times)
    best = min(times, key=times.get)
    real = machine.measure

    def measure(one, steps):
        return "rank 1 failed" if one is best and machine.asked.count(best) else real(one, steps)

    outcome = Halving(measure, lambda: machine.now, 1e9).run(list(times))
    assert best not in outcome.measured
    assert outcome.left_out == {best: "rank 1 failed"}


def test_the_best_are_measured_again_in_turns_and_once_more_while_their_steps_overlap():
    a, b = Candidate(rows=2), Candidate(rows=1, times=2)
    machine = Machine({a: 1.0, b: 1.001}, noise=0.02, at_once=FULL)
    outcome = machine.run()
    assert machine.asked[:2] == [a, b]
    assert len(machine.asked) == 6
    assert {len(one.steps_s) for one in outcome.measured.values()} == {9}
    far = Machine({a: 1.0, b: 2.0}, noise=0.02, at_once=FULL)
    far.run()
    assert far.asked == [a, b, a, b]


def test_what_an_attempt_before_has_measured_is_taken_however_little_time_is_left():
    times = space(5)
    first = Machine(times, setup_s=40.0)
    recorded = {one: first.measure(one, FULL) for one in list(times)[:9]}
    again = Machine(times, setup_s=40.0)

    def measure(one, steps):
        return recorded.pop(one) if one in recorded else again.measure(one, steps)

    halving = Halving(measure, lambda: again.now, 1.0, is_recorded=lambda one: one in recorded)
    best = next(iter(halving.run(list(times)).measured))
    assert best == min(list(times)[:9], key=times.get)
    assert again.asked == []


@pytest.mark.parametrize(("seconds", "chosen"), [(0.99, ()), (0.9, ("flex",))])
def test_a_way_that_gains_next_to_nothing_is_not_chosen(seconds, chosen):
    found = Machine({Candidate(): 1.0, Candidate(attention="flex"): seconds}).run()
    assert next(iter(found.measured)).ways == chosen
