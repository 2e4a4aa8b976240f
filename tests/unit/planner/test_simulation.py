"""What a simulation notes: activations by block, the timeline of a step, and its own work, which a limit ends."""

from functools import partial

import pytest
import torch
from torch import nn

import fullshard
from fullshard.errors import ConfigError
from fullshard.planner import TooMuchWorkError, plan, simulate, spend, work_limit
from fullshard.planner.simulation import OUTSIDE, REST, TimelineRecorder
from support.planned import batch, build, make_model

ROWS, WIDTH = 256, 64
ROW_BYTES = 4 * ROWS


class Layered(nn.Module):
    """Two blocks whose backward needs their output, and a head."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(WIDTH, 16 * WIDTH)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def planned(loss):
    return fullshard.plan(
        Layered, lambda: torch.zeros(ROWS, WIDTH), world_size=2, rank=0, loss_fn=lambda model, x: loss(model(x))
    )


def test_each_block_has_what_its_forward_made():
    # exp keeps its result for backward; at the fullest moment its gradient is there, and the product with it.
    plan = planned(lambda y: y.exp().sum())
    head = 16 * WIDTH * ROW_BYTES
    assert plan.activations["layers.*"] == 2 * WIDTH * ROW_BYTES
    assert plan.activations[OUTSIDE] == pytest.approx(head, abs=16)
    assert "head" not in plan.activations, "the head's output is freed with the last look at it"
    assert plan.activations[REST] == pytest.approx(head, abs=0.1 * head)
    assert "\n  layers.* " in str(plan)
    assert "\n  loss, rest of forward " in str(plan)


def test_the_head_has_the_logits():
    plan = planned(lambda y: y.square().sum())
    assert plan.activations["head"] == 16 * WIDTH * ROW_BYTES


@pytest.mark.parametrize("checkpointing", [False, True])
def test_blocks_add_up(checkpointing):
    plan = fullshard.plan(partial(make_model, checkpointing=checkpointing), batch, world_size=2, rank=0)
    assert sum(plan.activations.values()) == plan.parts["activations_and_temporaries"]
    assert min(plan.activations.values()) > 0
    of_blocks = sum(nbytes for name, nbytes in plan.activations.items() if name.endswith(".*"))
    assert (of_blocks > plan.activations[REST]) is not checkpointing


def test_the_fullest_moment_of_the_course_is_the_plans_peak():
    drawn, plain = simulate(build, 0, 2, draws=True), simulate(build, 0, 2)
    assert plain.timeline is None
    assert (drawn.parts, drawn.peaks) == (plain.parts, plain.peaks)
    timeline = drawn.timeline
    moments = list(zip(*timeline.parts.values(), strict=True))
    fullest = max(moments, key=sum)
    assert dict(zip(timeline.parts, fullest, strict=True)) == drawn.parts
    assert list(timeline.places) == sorted(timeline.places)
    assert 0 <= timeline.places[0] <= timeline.places[-1] <= timeline.operators
    assert max(timeline.places.count(place) for place in timeline.places) == 2


def test_every_unit_is_gathered_before_each_pass_and_reduced_after_the_last():
    timeline = simulate(build, 0, 2, draws=True).timeline
    assert len(timeline.units) > 2
    for unit in timeline.units:
        own = [span for span in timeline.spans if span.unit == unit]
        assert [span.kind for span in own].count("reduce") == 1
        starts, ends = {}, {}
        for span in own:  # the modules of a unit have a forward each
            starts[span.kind] = min(span.start, starts.get(span.kind, span.start))
            ends[span.kind] = max(span.end, ends.get(span.kind, 0))
        assert starts["gather"] <= starts["forward"] < ends["forward"] <= starts["backward"] < starts["reduce"]
        assert ends["backward"] <= ends["reduce"]
    optimizer = next(span for span in timeline.spans if span.kind == "optimizer")
    assert optimizer.start == max(span.end for span in timeline.spans if span.unit)
    assert optimizer.end == timeline.operators > optimizer.start


def test_gradients_that_were_cleared_are_not_counted():
    timeline = simulate(build, 0, 2, draws=True).timeline
    forwards = [span for span in timeline.spans if span.kind == "forward"]
    backward = min(span.start for span in timeline.spans if span.kind == "backward")
    held = dict(zip(timeline.places, timeline.parts["gradient_shards"], strict=True))
    first = min(span.start for span in forwards)
    assert {size for place, size in held.items() if first < place < backward} == {0}
    assert max(held.values()) > 0


def test_of_the_moments_of_one_operator_the_fullest_and_the_last_are_kept():
    recorder = TimelineRecorder(iter([0, 1, 1, 1, 1, 2, 2]).__next__)
    for size in (5, 9, 7, 3, 4):
        recorder.sample_parts({"shards": size})
    timeline = recorder.timeline([])
    assert (timeline.places, timeline.parts["shards"]) == ((1, 1, 2), (9, 3, 4))


def test_a_plan_stops_in_the_middle_of_its_operators():
    with work_limit(1000), pytest.raises(TooMuchWorkError, match="abandoned"):
        plan(make_model, batch, world_size=2)


def test_a_plan_ends_at_the_same_operator_every_time():
    def taken(limit):
        steps = []

        def inputs():
            steps.append(1)
            return batch()

        try:
            with work_limit(limit):
                plan(make_model, inputs, world_size=1, rank=0)
        except TooMuchWorkError:
            return None
        return len(steps)

    enough = 1
    while taken(enough) is None:
        enough *= 2
    assert [taken(enough), taken(enough // 2)] * 3 == [taken(enough), None] * 3


def test_the_inner_of_two_limits_holds_inside_it_and_the_outer_one_again_after_it():
    with work_limit(60):
        with work_limit(0), pytest.raises(ConfigError):
            spend(1)
        spend(60)
        with pytest.raises(ConfigError):
            spend(1)
    spend(10**9)
