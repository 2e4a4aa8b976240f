"""Ranks that end, fail, stop or are cut off: the others learn the first cause at once, without the group's timeout."""

import json
import re
from pathlib import Path

import pytest

from support.processes import run_ranks

pytestmark = pytest.mark.dist

SCRIPT = Path(__file__).with_name("lost_main.py")
PLACES = {
    "forward": r"all-gather of 96 float32 \(all-gather of unit 0\)",
    "large_forward": r"all-gather of \d+ float32 \(all-gather of unit 0\)",
    "backward": r"(reduce-scatter|all-gather) of \d+ float32 \(.* of unit \d\)",
    "clip": r"all-reduce \(sum\) of 1 float32 \(norm of the gradients\)",
    "save": r".* \(gather of unit 0 to rank 0\)",
    "barrier": r"barrier \(.*\)",
}


def run(size, cases, directory):
    """What each rank reported, by case and in rank order."""
    (output,) = run_ranks(1, SCRIPT, str(size), str(directory), ",".join(cases), timeout_s=110)
    files = {case: [directory / f"{case}.{rank}.json" for rank in range(size)] for case in cases}
    assert all(file.exists() for of_case in files.values() for file in of_case), output
    return {case: [json.loads(file.read_text()) for file in of_case] for case, of_case in files.items()}


LOST = [*((place, "killed") for place in PLACES), *((place, "raised") for place in ("forward", "clip", "save"))]
"""A rank that raises tells the others in one way wherever they wait; of one that is killed, each wait finds out."""


@pytest.fixture(scope="module")
def lost(tmp_path_factory):
    """What the survivors of three ranks reported, and when the last rank ended, by place and way."""
    found = run(3, [f"{place}_{how}" for place, how in LOST], tmp_path_factory.mktemp("lost"))
    return {case: (ranks[:-1], ranks[-1]["ended"]) for case, ranks in found.items()}


@pytest.mark.parametrize(("place", "how"), LOST)
def test_every_survivor_learns_it_at_once_and_names_the_rank_and_its_error(lost, place, how):
    survivors, ended = lost[f"{place}_{how}"]
    assert max(rank["learned"] - ended for rank in survivors) < 5, survivors
    for number, rank in enumerate(survivors):
        what = rf"ProcessGroupError: Rank {number} waited \d\.\d s in {PLACES[place]} and "
        if how == "raised":
            assert re.fullmatch(what + "rank 2 failed first: Fault: no rows left", rank["text"])
        else:
            assert re.match(
                what + r"((rank \d )?lost its connection to rank 2: that rank has ended or failed"
                r"|lost its connection to ranks \d, 2: they have ended)",
                rank["text"],
            )
        assert rank["log"] == []
        assert rank["known"] == [0, 1, 2]  # since the first collective, however late the watchdog's thread looks


@pytest.mark.parametrize("how", ["killed", "raised"])
def test_most_survivors_learn_it_in_under_a_second(lost, how):
    found = [one for case, one in lost.items() if case.endswith(how)]
    waits = sorted(rank["learned"] - ended for survivors, ended in found for rank in survivors)
    assert waits[len(waits) * 2 // 3] < 1, waits


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return run(2, ["ends", "barrier_of_torchs", "cut"], tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def with_stops(tmp_path_factory):
    return run(2, ["stopped_0", "stopped_1"], tmp_path_factory.mktemp("stopped"))


def test_a_rank_whose_data_are_over_ran_fewer_collectives(pair):
    first, second = pair["ends"]
    assert second["text"] == "no error"
    assert re.search(
        r"lost its connection to rank 1: the program of that rank has ended, so it ran fewer", first["text"]
    )


def test_a_rank_in_torchs_own_barrier_is_named_on_both(pair):
    first, second = pair["barrier_of_torchs"]
    assert re.fullmatch(
        r"MismatchError: Ranks are in different collectives, from number \d+ of their group on: rank 0: all-gather of "
        r"96 float32 \(all-gather of unit 0\); rank 1: not issued so far, at torch\.distributed\.barrier, called at "
        r"lost_main\.py:\d+ \(barrier_of_torchs\)\. Every rank must .*",
        first["text"],
    )
    assert second["text"].startswith("RuntimeError: ")
    assert [f"MismatchError: {line}" for line in second["log"]] == [first["text"]]
    assert first["log"] == []
    assert abs(second["learned"] - first["learned"]) < 5


@pytest.mark.slow
@pytest.mark.parametrize("who", [0, 1])
def test_a_stopped_rank_is_named_and_goes_on(with_stops, who):
    """Rank 0 holds the store, through which ranks tell each other where they are."""
    ranks = with_stops[f"stopped_{who}"]
    assert [rank["sum"] for rank in ranks] == [2, 2]
    assert ranks[who]["log"] == []
    (line,) = ranks[1 - who]["log"]
    assert re.fullmatch(
        rf"Rank {1 - who} has waited \d s in all-reduce \(sum\) of 2 float32\. The process of rank {who} \((\d+), on "
        r"this machine\) is stopped: `kill -CONT \1` continues it\.",
        line,
    )


@pytest.mark.slow
@pytest.mark.parametrize("who", [0, 1])
def test_ranks_that_part_after_one_was_stopped_are_told(with_stops, who):
    first, second = with_stops[f"stopped_{who}"]
    assert first["text"] == second["text"]
    assert " of their group on: rank 0: all-gather of 8 float32; rank 1: barrier." in first["text"]


def test_ranks_whose_connection_was_cut_both_say_so(pair):
    first, second = pair["cut"]
    for rank in (first, second):
        assert rank["learned"] - first["ended"] < 5
        assert "the connection between rank " in rank["text"]
        assert "is lost on both sides, while both run: the network between them was cut." in rank["text"]
