"""The time of a step by a device's rates: what overlaps, what waits for what, and which link bytes go over."""

from dataclasses import replace

import pytest
import torch

from fullshard.errors import ConfigError
from fullshard.planner.timing import Hardware, collective_seconds, hardware, names, time_step
from fullshard.planner.work import Awaited, Computed, Issued, Operator, Work

DEVICE = Hardware(
    name="slow",
    memory_bytes=1 << 30,
    outside_bytes=0,
    workspace_bytes=0,
    flops_per_s={torch.float32: 100.0},
    bytes_per_s=10.0,
    kernel_s=1.0,
    host_s=0.0,
    link_bytes_per_s=20.0,
    network_bytes_per_s=5.0,
    devices_each=4,
    latency_s=0.5,
)
PAIR = range(2)


def work(*events):
    made = Work(lambda: "forward")
    made.operators = {
        "product": Operator("product", flops=300, nbytes=10, dtype=torch.float32),  # 3 s of arithmetic, 1 s of bytes
        "sum": Operator("sum", flops=0, nbytes=50, dtype=torch.float32),  # 5 s
        "view": Operator("view", flops=0, nbytes=0, dtype=torch.float32),
    }
    made.events = [Computed(one, "forward") if isinstance(one, str) else one for one in events]
    return made


def test_an_operator_takes_the_longer_of_arithmetic_and_bytes_and_views_take_nothing():
    found = time_step(work("product", "view", "sum"), DEVICE)
    assert (found.step_s, found.compute_s, found.exposed_s, found.flops) == (10.0, 10.0, 0.0, 300)


def test_a_collective_behind_computation_is_hidden_and_what_is_left_is_waited_for():
    send = Issued(0, "all_gather", 90, PAIR)  # 0.5 s and 90 / 20 s
    assert time_step(work(send, "sum", Awaited(0)), DEVICE).exposed_s == 0
    found = time_step(work(send, "product", Awaited(0), "product"), DEVICE)
    assert (found.exposed_s, found.step_s) == (1.0, 9.0)


def test_collectives_of_a_group_queue_and_those_of_another_group_do_not():
    both = [Issued(0, "all_gather", 90, PAIR), Issued(1, "all_gather", 90, PAIR)]
    assert time_step(work(*both, Awaited(1)), DEVICE).step_s == 10.0
    apart = [both[0], Issued(1, "all_gather", 90, range(0, 4, 2))]
    assert time_step(work(*apart, Awaited(0), Awaited(1)), DEVICE).step_s == 5.0


def test_a_collective_starts_after_what_was_computed_before_it():
    assert time_step(work("product", Issued(0, "all_gather", 90, PAIR), Awaited(0)), DEVICE).step_s == 9.0


def test_a_slow_cpu_is_waited_for():
    found = time_step(work("view", "product", "view", "view"), replace(DEVICE, host_s=3.0))
    assert (found.step_s, found.compute_s, found.issue_s) == (12.0, 4.0, 8.0)


def test_the_optimizer_is_apart_and_more_micro_batches_do_not_repeat_it():
    made = work("product")
    made.events.append(Computed("sum", "optimizer"))
    found = time_step(made, DEVICE, times=3)
    assert (found.step_s, found.compute_s, found.optimizer_s) == (18.0, 12.0, 6.0)


@pytest.mark.parametrize(
    ("ranks", "rate"),
    [
        (range(4), 20.0),  # one machine: its links
        (range(8), 20.0),  # two: four ports each carry 5, as much as the links
        (range(0, 8, 2), 10.0),  # two of the group in each machine
        (range(0, 8, 4), 5.0),  # replicas, one in each machine
    ],
)
def test_ranks_of_one_machine_use_its_links_and_others_the_network_of_their_ports(ranks, rate):
    assert collective_seconds(DEVICE, Issued(0, "all_reduce", 100, ranks)) == 0.5 + 100 / rate


def test_products_in_a_dtype_without_a_figure_are_refused():
    with pytest.raises(ConfigError, match=r"slow has no figure for matrix products in torch\.float32"):
        time_step(work("product"), replace(DEVICE, flops_per_s={torch.float16: 1.0}))


def test_every_sheet_can_be_read_and_gives_less_than_the_data_sheet_says():
    assert "h100" in names()
    for name in names():
        sheet = hardware(name.upper())
        assert sheet.name == name
        assert 10 << 30 < sheet.memory_bytes < 200 << 30
        assert sheet.flops_per_s[torch.float16] > sheet.flops_per_s[torch.float32] > 1e12
    assert hardware("h100").bytes_per_s < 3.35e12


def test_an_unknown_gpu_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"no data sheet for 'h1000'. Known are .*h100"):
        hardware("h1000")
