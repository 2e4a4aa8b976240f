"""Ranks that part are told within seconds, by name, on every rank; ranks that are merely slow are not."""

import json
import re
from pathlib import Path

import pytest

from support.processes import run_processes

pytestmark = pytest.mark.dist

SCRIPT = Path(__file__).with_name("desync_main.py")
PARTED = [
    ("kinds", 1, "rank 0: all-gather of 16 float32 (all-gather of unit blocks.2); "
                 "rank 1: reduce-scatter of 16 float32 (reduce-scatter of unit blocks.3)"),
    ("sizes", 1, "rank 0: all-gather of 16 float32; rank 1: all-gather of 18 float32"),
    ("dtypes", 1, "rank 0: all-gather of 8 float32; rank 1: all-gather of 8 int32"),
    ("sums", 1, "rank 0: all-reduce (sum) of 4 float32; rank 1: all-reduce (sum) of 8 float32"),
    ("large_sums", 5, "rank 0: all-reduce (sum) of 100000 float32; rank 1: all-reduce (sum) of 100001 float32"),
    ("purposes", 1, "rank 0: all-gather of 16 float32 (all-gather of unit blocks.0); "
                    "rank 1: all-gather of 16 float32 (all-gather of unit blocks.1)"),
    ("reading", 6, "rank 0: all-gather of 100000 float32 (all-gather of unit blocks.0); "
                   "rank 1: all-gather of 100000 float32 (all-gather of unit blocks.1)"),
    ("large_kinds", 6, "rank 0: all-gather of 100000 float32; rank 1: reduce-scatter of 100000 float32"),
    ("ahead", 201, "rank 0: barrier; rank 1: all-gather of 16 float32"),
    ("objects", 1, "rank 0: all-gather of objects; rank 1: barrier"),
    ("prefetched", 2, "rank 0: all-gather of 16 float32, waiting in reduce-scatter of 16 float32; "
                      "rank 1: reduce-scatter of 16 float32"),
]  # fmt: skip
FINE = {
    "collectives": "as expected",
    "collectives_reading": "as expected",
    "opinions": "sum 1",
    "two_comms": "no error",
    "honest": "sum 2",
    "honest_behind": "sum 4",
}


def run(size, cases, directory):
    """What each rank wrote, in rank order."""
    run_processes(size, SCRIPT, "--only", ",".join(cases), "--directory", str(directory), timeout_s=100)
    return [json.loads((directory / f"rank{rank}.json").read_text()) for rank in range(size)]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    cases = [*(case for case, *_ in PARTED), *FINE, "large_honest", "skipped_pass", "timeout", "calls"]
    return run(2, cases, tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    return run(3, ["third", "late", "honest", "collectives", "collectives_reading"], tmp_path_factory.mktemp("three"))


def parted(ranks, case):
    """The one text that every rank raised, within seconds; the group stays refused for the same reason."""
    outcomes = [rank["outcomes"][case] for rank in ranks]
    assert len({outcome["text"] for outcome in outcomes}) == 1, outcomes
    assert max(outcome["seconds"] for outcome in outcomes) < 20
    assert all(outcome["then"] == ["MismatchError"] for outcome in outcomes), outcomes
    return outcomes[0]["text"]


@pytest.mark.parametrize(("case", "number", "places"), PARTED, ids=[case for case, *_ in PARTED])
def test_ranks_that_part_are_told_by_name(pair, case, number, places):
    assert parted(pair, case) == (
        f"MismatchError: Ranks are in different collectives, from number {number} of their group on: {places}. Every "
        "rank must call the same modules in the same order; check code that depends on the rank or the data."
    )


def test_a_rank_that_skips_a_forward_pass_is_told_with_the_units(pair):
    text = parted(pair, "skipped_pass")
    assert re.search(r": rank 0: all-gather of \d+ float32 \(.* of unit .*\); rank 1: .* \(.* of unit .*\)\.", text)


def test_ranks_that_exchange_objects_in_different_calls_are_told_each_call(pair):
    first, second = (rank["outcomes"]["calls"] for rank in pair)
    assert first["text"] == second["text"]
    assert re.search(
        r"rank 0: fully_shard, called at desync_main\.py:\d+ .*; rank 1: Checkpoints\.\w+, called at desync_main",
        first["text"],
    )
    assert first["then"] == []  # the exchange took place: the group is as good as before


@pytest.mark.parametrize("case", FINE)
def test_ranks_that_are_slow_or_only_ask_are_left_alone(pair, case):
    for rank in pair:
        assert rank["outcomes"][case]["text"] == FINE[case]


def test_a_long_wait_is_logged_once_with_who_is_missing(pair):
    line = re.compile(
        r"Rank 0 has waited \d s in all-reduce \(sum\) of 2 float32\. Missing so far: rank 1; rank 1 is at "
        r"desync_main\.py:\d+ \(main\)\."
    )
    assert sum(line.fullmatch(logged) is not None for logged in pair[0]["log"]) == 1
    assert pair[1]["log"] == []


def test_a_rank_that_does_not_come_in_time_is_named(pair):
    assert pair[1]["outcomes"]["timeout"]["text"] == "no error"
    assert re.match(
        r"ProcessGroupError: Rank 0 waited \d\.\d s in all-gather of 16 float32 \(all-gather of unit blocks\.2\), "
        r"longer than the group's timeout\. Missing: rank 1\. ",
        pair[0]["outcomes"]["timeout"]["text"],
    )


def test_of_three_ranks_one_parts(three):
    assert "ranks 0, 1: all-gather of 24 float32; rank 2: reduce-scatter of 24 float32." in parted(three, "third")


def test_a_rank_that_was_busy_when_the_others_parted_is_told_when_it_comes(three):
    assert re.search(
        r"from number 2 of their group on: rank 0: all-gather of 24 float32; rank 1: reduce-scatter of 24 float32; "
        r"rank 2: not issued so far, at desync_main\.py:\d+ \(main\)\.",
        parted(three, "late"),
    )


def test_three_ranks_of_which_one_is_slow(three):
    assert [rank["outcomes"]["honest"]["text"] for rank in three] == ["sum 3"] * 3
    for case in ("collectives", "collectives_reading"):
        assert [rank["outcomes"][case]["text"] for rank in three] == ["as expected"] * 3
    assert three[0]["outcomes"]["honest"]["seconds"] < 20


@pytest.mark.parametrize(("case", "numel"), [("leaves", 16), ("leaves_reading", 100_000)])
def test_a_rank_that_ended_is_named_at_once(tmp_path, case, numel):
    first, second = run(2, [case], tmp_path)
    assert second["outcomes"][case]["text"] == "no error"
    outcome = first["outcomes"][case]
    assert outcome["ended"] - json.loads((tmp_path / "rank1.json").read_text())["gone"] < 1
    assert re.match(
        rf"ProcessGroupError: Rank 0 waited \d+\.\d s in all-gather of {numel} float32 "
        r"\(all-gather of unit blocks\.2\) and lost its connection to rank 1: that rank has ended or failed, ",
        outcome["text"],
    )
    assert outcome["then"] == ["ProcessGroupError"]


def test_a_rank_may_change_what_it_gave_once_the_others_have_read_it(pair):
    assert [rank["outcomes"]["large_honest"]["text"] for rank in pair] == ["[-1.0, 2.0]", "[1.0, -1.0]"]
