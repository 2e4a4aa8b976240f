"""The work of a planned step: what it computes, and between what its collectives run."""

import pytest
import torch
from torch import nn

import fullshard
from fullshard import MinNumel, MixedPrecision
from fullshard.planner import Hardware, PlannedStep, hardware, simulate
from fullshard.planner.work import Awaited, Computed, Issued

WIDTH, ROWS, LAYERS = 32, 8, 3


def planned_step(size=2, **options):
    def build(comm):
        blocks = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
        model = fullshard.fully_shard(blocks, comm, wrap=MinNumel(WIDTH), **options)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        x = torch.zeros(ROWS, WIDTH)

        def step():
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()

        return PlannedStep(model, optimizer, step)

    return simulate(build, 0, size)


def test_products_count_twice_their_multiplications_three_times_a_step():
    work = planned_step().work
    flops = sum(work.operators[event.operator].flops for event in work.events if isinstance(event, Computed))
    assert flops == 2 * ROWS * WIDTH * WIDTH * (3 * LAYERS - 1)  # the first layer's input needs no gradient


def test_bytes_of_a_product_are_those_of_its_tensors_and_views_move_none():
    operators = planned_step().work.operators.values()
    product = next(one for one in operators if one.key.startswith("aten.addmm.default"))
    assert product.nbytes == 4 * (WIDTH + 2 * ROWS * WIDTH + WIDTH * WIDTH)
    assert all(not one.nbytes for one in operators if one.key.startswith(("aten.t.default", "aten.view")))


def test_every_collective_of_the_step_is_issued_and_waited_for():
    found = planned_step()
    issued = [event for event in found.work.events if isinstance(event, Issued)]
    assert {kind: sum(one.kind == kind for one in issued) for kind in found.sent} == {
        kind: count for kind, (count, _) in found.sent.items()
    }
    assert all(one.ranks == range(2) for one in issued)
    places = {event.number: place for place, event in enumerate(found.work.events) if isinstance(event, Issued)}
    waited = {event.number: place for place, event in enumerate(found.work.events) if isinstance(event, Awaited)}
    assert set(waited) == set(places)
    assert all(places[number] < waited[number] for number in places)


def test_the_next_layer_is_gathered_before_backward_needs_it():
    events = planned_step().work.events
    gathers = [e.number for e in events if isinstance(e, Issued) and e.kind == "all_gather"]
    between = [
        events.index(Awaited(number))
        - next(place for place, e in enumerate(events) if isinstance(e, Issued) and e.number == number)
        for number in gathers
    ]
    assert max(between) > 5


def test_one_rank_sends_nothing():
    assert not any(isinstance(event, Issued) for event in planned_step(1).work.events)


def wide(world_size=2, gpu="h100", width=512, **options):
    return fullshard.plan(
        lambda: nn.Linear(width, width),
        lambda: torch.zeros(64, width),
        world_size=world_size,
        loss_fn=lambda model, x: model(x).mean(),
        gpu=gpu,
        wrap=None,
        **options,
    )


def test_a_gpu_adds_what_it_holds_besides_tensors_and_the_time():
    plan, on_cpu = wide(), wide(gpu=None)
    sheet = hardware("h100")
    assert plan.peak_bytes == on_cpu.peak_bytes
    assert plan.needed_bytes > on_cpu.needed_bytes + sheet.workspace_bytes + sheet.outside_bytes
    assert plan.fits()
    assert not plan.fits(sheet.outside_bytes)
    assert plan.as_dict()["device"] == "h100"
    assert plan.timing is not None
    assert plan.timing.step_s == pytest.approx(
        plan.timing.compute_s + plan.timing.optimizer_s + plan.timing.exposed_s + plan.timing.issue_s
    )
    for line in ("context, kernels, NCCL", "memory of the h100", "waiting for the CPU"):
        assert line in str(plan)
        assert line not in str(on_cpu)


def test_without_a_gpu_the_memory_must_be_given():
    with pytest.raises(fullshard.ConfigError, match="pass memory_bytes, or plan with gpu="):
        wide(gpu=None).fits()


@pytest.mark.slow
def test_a_slower_network_never_predicts_less_time():
    own = hardware("h100")
    times = []
    for rate in (1e12, 1e10, 1e8):
        slower = Hardware(**{**vars(own), "link_bytes_per_s": rate, "network_bytes_per_s": rate})
        times.append(wide(16, slower, mp_policy=MixedPrecision(param="bfloat16", reduce="float32")).timing.step_s)
    assert times == sorted(times)
    assert times[0] < times[-1]
