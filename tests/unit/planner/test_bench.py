"""Steps and collectives that are taken to measure a machine: they are those that a plan lists."""

from collections import Counter

import pytest
import torch

from fullshard import fully_shard
from fullshard.core.testing import run_ranks
from fullshard.errors import ConfigError
from fullshard.planner import PlannedStep, bench, measure_rates, simulate, time_step
from fullshard.planner.bench import Trial, rates_of, try_steps
from fullshard.planner.work import Awaited, Computed, Issued, Operator
from support.planned import batch, build, make_model

CPU = torch.device("cpu")


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "size"), [(0, 1), (0, 2), (2, 3)])
def test_a_trial_runs_the_operators_and_collectives_of_the_plan(rank, size):
    trial = try_steps(build, rank, size, CPU, lambda seconds: 1, lambda: None)
    planned = simulate(build, rank, size).work
    assert trial.calls == Counter(event.operator for event in planned.events if isinstance(event, Computed))
    assert trial.issued == [event for event in planned.events if isinstance(event, Issued)]
    assert len(trial.steps_s) == 1


def test_a_trial_computes_with_the_ranks_own_values_in_the_place_of_others():
    seen = []

    def watched(comm):
        made = build(comm)
        made.model.register_forward_hook(lambda model, args, output: seen.append(float(output.loss)))
        return made

    try_steps(watched, 1, 3, CPU, lambda seconds: 1, lambda: None)
    assert len(seen) == 5
    assert all(0 < loss < 100 for loss in seen)


def test_ranks_that_are_all_there_compute_with_each_others_values():
    """Else a router may send tokens to other experts than in training, and products take another time."""

    def trial(comm):
        def watched(ranks):
            model = make_model().eval()  # no dropout
            for number, weight in enumerate(model.parameters()):  # the threads share torch's random numbers
                draw = torch.Generator().manual_seed(number)
                weight.data = torch.randn(weight.shape, generator=draw) / 20
            model.register_forward_hook(lambda model, args, output: seen.append(float(output.loss)))
            optimizer = torch.optim.SGD(fully_shard(model, ranks).parameters(), lr=0.1)

            def step():
                optimizer.zero_grad()
                model(**batch()).loss.backward()
                optimizer.step()

            return PlannedStep(model, optimizer, step)

        seen = []
        real = watched(comm)
        for _ in range(5):
            real.step()
        try_steps(watched, comm.rank, comm.size, CPU, lambda seconds: 1, lambda: None, comm)
        return seen

    for losses in run_ranks(2, trial):
        assert losses[5:] == losses[:5]
        assert losses[4] < losses[0]


def test_ranks_at_hand_agree_on_rates_that_give_a_time():
    found = run_ranks(2, lambda comm: measure_rates(build, comm, 4))
    assert found[0] == found[1]
    assert {sent for sent, _, _ in found[0].collectives["all_gather"]} == {
        event.sent_bytes
        for event in simulate(build, 0, 4).work.events
        if isinstance(event, Issued) and event.kind == "all_gather"
    }
    timing = time_step(simulate(build, 0, 4).work, found[0])
    assert timing.step_s > timing.compute_s > 0


def test_fewer_planned_ranks_than_at_hand_are_refused():
    with pytest.raises(ConfigError, match=r"must be at least 1, the ranks that measure; got 0"):
        run_ranks(1, lambda comm: measure_rates(build, comm, 0))


def trial(steps_s, seconds, spans):
    operator = Operator("aten.add.Tensor(float32[8](1,))", flops=0, nbytes=96, dtype=torch.float32)
    return Trial(steps_s, steps_s, {operator.key: (operator, seconds)}, {operator.key: 4}, spans, [])


def issued(number):
    return Issued(number, "all_gather", 8, range(2))


def test_rates_are_means_over_ranks_and_their_waits_for_the_slowest():
    one = trial([10.0, 10.0, 12.0], 1.0, [[(1.0, issued(0)), (0.0, Awaited(0)), (3.0, None)]])
    other = trial([12.0, 12.0, 12.0], 2.0, [[(3.0, issued(0)), (0.0, Awaited(0)), (1.0, None)]])
    found = rates_of([one, other], {})
    (_, seconds), *_ = found.operators.values()
    slower = (3.0 + 3.0) / 4.0
    assert seconds == 1.5 * slower
    assert found.host_s == (11.0 - 4 * 1.5) / 4 * slower
    assert rates_of([one, other], {}, queues=True).host_s == 11.0 / 4 * slower


def test_a_rank_waits_until_the_others_have_issued_a_collective_not_for_their_wait():
    one = trial([4.0], 1.0, [[(0.0, issued(0)), (3.0, Awaited(0)), (1.0, None)]])
    other = trial([4.0], 1.0, [[(0.0, issued(0)), (1.0, Awaited(0)), (3.0, None)]])
    (_, seconds), *_ = rates_of([one, other], {}).operators.values()
    assert seconds == 1.0


PAIR = range(2)
PRODUCT_S = 0.001


class Clock:
    """Time that passes only where a test says so."""

    now = 0.0

    def mark(self):
        return self.now

    def seconds(self, since, marks):
        return [mark - since for mark in marks]

    def finish(self):
        pass


class Transfer:
    """A collective that takes ``seconds``: from its issue on, or only while it is waited for."""

    def __init__(self, clock, seconds, *, by_itself):
        self.clock, self.seconds, self.end = clock, seconds, clock.now + seconds if by_itself else None

    def wait(self):
        self.clock.now = self.clock.now + self.seconds if self.end is None else max(self.clock.now, self.end)


class Link:
    """Two ranks with a link of 1 MB a second each way."""

    rank, size, device = 0, 2, torch.device("cpu")

    def __init__(self, clock, *, by_itself):
        self.clock, self.by_itself = clock, by_itself

    def all_gather(self, full, shard):
        return Transfer(self.clock, shard.nbytes / 1e6, by_itself=self.by_itself)

    def reduce_scatter(self, shard, full):
        return Transfer(self.clock, full.nbytes / 2 / 1e6, by_itself=self.by_itself)

    def all_reduce(self, tensor, op="sum"):
        return Transfer(self.clock, tensor.nbytes / 1e6, by_itself=self.by_itself)

    def all_gather_object(self, value):
        return [value] * self.size

    def barrier(self):
        pass


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(bench, "clock_of", lambda device: clock)

    def run(self, products):
        clock.now += products * PRODUCT_S

    monkeypatch.setattr(bench._Computation, "run", run)
    return clock


@pytest.mark.parametrize(("by_itself", "never_hidden"), [(True, 0.0), (False, 1.0)])
def test_what_computation_does_not_hide_is_measured(by_itself, never_hidden, clock):
    sizes = ((0, "all_gather", 8000), (1, "all_gather", 4000), (2, "reduce_scatter", 4000), (3, "all_reduce", 2000))
    wanted = [Issued(number, kind, sent, PAIR) for number, kind, sent in sizes]
    found = bench.measure_collectives(Link(clock, by_itself=by_itself), wanted)
    for kind, measured in found.items():
        for sent, alone, exposed in measured:
            assert alone == pytest.approx(sent / 1e6), kind
            assert exposed == pytest.approx(never_hidden * alone, abs=1e-12), kind
    assert [sent for sent, _, _ in found["all_gather"]] == [4000, 8000]


def test_other_kinds_are_measured_as_all_gathers(clock):
    found = bench.measure_collectives(Link(clock, by_itself=True), [Issued(0, "broadcast", 400, PAIR)])
    assert list(found) == ["all_gather"]
