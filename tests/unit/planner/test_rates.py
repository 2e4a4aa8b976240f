"""Measured rates: their file, what is said of operators that were not measured, and time without a queue."""

import json

import pytest
import torch

from fullshard.errors import ConfigError
from fullshard.planner import Rates, hardware, rates_before, read_rates, speed_of, time_step, write_rates
from fullshard.planner.work import Awaited, Computed, Issued, Operator, Work

PAIR = range(2)
PRODUCT = Operator("aten.mm.default(float32[4, 4](4, 1))", flops=128, nbytes=192, dtype=torch.float32)
SUM = Operator("aten.add.Tensor(float32[8](1,))", flops=0, nbytes=96, dtype=torch.float32)
VIEW = Operator("aten.view.default(float32[8](1,))", flops=0, nbytes=0, dtype=torch.float32)


def rates(ranks=2, **options):
    operators = {one.key: (one, seconds) for one, seconds in ((PRODUCT, 4.0), (SUM, 1.0), (VIEW, 0.5))}
    collectives = {"all_gather": [(100, 2.0, 1.0), (200, 4.0, 3.0)], "all_reduce": [(8, 0.5, 0.5)]}
    return Rates(**{"ranks": ranks, "host_s": 0.25, "operators": operators, "collectives": collectives, **options})


def like(operator, key, times):
    return Operator(key, operator.flops * times, operator.nbytes * times, operator.dtype)


def test_an_operator_takes_what_it_took():
    assert [rates().operator_seconds(one) for one in (PRODUCT, SUM, VIEW)] == [4.0, 1.0, 0.5]


def test_an_unmeasured_operator_is_in_proportion_to_the_nearest_of_its_name():
    assert rates().operator_seconds(like(SUM, "aten.add.Tensor(float32[16](1,))", 2)) == 2.0
    assert rates().operator_seconds(like(PRODUCT, "aten.mm.default(float32[8, 4](4, 1))", 3)) == 12.0
    assert rates().operator_seconds(like(SUM, "aten.sub.Tensor(float32[32](1,))", 4)) == 4.0  # another name: no product
    assert rates().operator_seconds(like(VIEW, "aten.view.default(float32[4](1,))", 1)) == 0.0


@pytest.mark.parametrize(
    ("sent", "seconds"), [(50, (2.0, 1.0)), (100, (2.0, 1.0)), (150, (3.0, 2.0)), (200, (4.0, 3.0)), (400, (8.0, 6.0))]
)
def test_collectives_are_interpolated_between_sizes_and_in_proportion_beyond(sent, seconds):
    assert rates().collective_seconds(Issued(0, "all_gather", sent, PAIR)) == seconds
    assert rates().collective_seconds(Issued(0, "broadcast", sent, PAIR)) == seconds  # as an all-gather


def test_without_collectives_several_ranks_have_no_time():
    with pytest.raises(ConfigError, match="measured on one rank"):
        rates(collectives={}).collective_seconds(Issued(0, "all_gather", 8, PAIR))


def work(*events):
    made = Work(lambda: "forward")
    made.operators = {one.key: one for one in (PRODUCT, SUM, VIEW)}
    made.events = [Computed(one.key, "forward") if isinstance(one, Operator) else one for one in events]
    return made


def test_without_a_queue_the_time_between_operators_adds_up():
    found = time_step(work(PRODUCT, VIEW, SUM), rates())
    assert (found.step_s, found.issue_s) == (5.5 + 3 * 0.25, 0.0)


def test_what_no_computation_hides_is_waited_for_once():
    send = Issued(0, "all_gather", 100, PAIR)  # 2 s alone, 1 of it never hidden
    assert time_step(work(send, PRODUCT, Awaited(0)), rates()).exposed_s == 1.0
    assert time_step(work(send, PRODUCT, Awaited(0), Awaited(0)), rates()).exposed_s == 1.0
    assert time_step(work(send, Awaited(0)), rates()).exposed_s == 2.0


def test_the_file_keeps_what_was_measured_for_each_number_of_ranks(tmp_path):
    path = tmp_path / "rates.json"
    write_rates(path, "here", rates(1, host_s=0.125))
    write_rates(path, "here", rates(2, travels=True))
    assert read_rates(path, 1) == rates(1, host_s=0.125)
    assert read_rates(path, 2) == read_rates(path, 64) == rates(2, travels=True)


def test_rates_of_another_machine_are_replaced(tmp_path):
    path = tmp_path / "rates.json"
    write_rates(path, "there", rates(1))
    write_rates(path, "here", rates(2))
    with pytest.raises(ConfigError, match=r"has rates for 2 ranks side by side, not for 1\. .*--world 1"):
        read_rates(path, 1)


def test_a_file_that_is_none_says_how_to_make_one(tmp_path):
    with pytest.raises(ConfigError, match=r"There is no .*fullshard bench RUN --out"):
        read_rates(tmp_path / "rates.json", 1)
    path = tmp_path / "other.json"
    for text in ("{}", "[1]", "none", json.dumps({"ranks": {"1": {"host_s": 1}}})):
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"other\.json holds no rates .*fullshard bench"):
            read_rates(path, 1)
        with pytest.raises(ConfigError, match=r"other\.json holds no rates .*--out"):
            rates_before(path)
        with pytest.raises(ConfigError, match=r"other\.json holds no rates .*--out"):
            write_rates(path, "here", rates())


def test_rates_of_cpus_give_no_time_of_gpus_nor_the_other_way_round():
    with pytest.raises(ConfigError, match=r"measured on CPU ranks, but the plan is for GPUs"):
        speed_of(hardware("h100"), rates())
    with pytest.raises(ConfigError, match=r"measured on GPUs, but the plan is for CPU ranks"):
        speed_of(None, rates(queues=True))
    assert speed_of(None, rates()) == rates()
    assert speed_of(hardware("h100"), rates(queues=True)) == rates(queues=True)
