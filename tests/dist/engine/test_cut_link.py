"""Two machines whose network is cut: each says so within seconds, goes on if it is mended, else names it at the end."""

import os
import re
import select
import sys
from pathlib import Path

import pytest

from support.namespaces import ADDRESSES, can_unshare, ends, set_link, two_machines
from support.processes import SOURCE

SCRIPT = Path(__file__).with_name("cut_link_main.py")
LINE_S = 50.0


class Talk:
    """The lines that a machine's rank says."""

    def __init__(self, machine):
        self.machine = machine
        self.rest = b""

    def line(self):
        while b"\n" not in self.rest:
            assert select.select([self.machine.stdout], [], [], LINE_S)[0], "it says nothing"
            read = os.read(self.machine.stdout.fileno(), 65536)
            assert read, self.machine.stderr.read()
            self.rest += read
        line, self.rest = self.rest.split(b"\n", 1)
        # Who beats and who does not is said as well; which of the two comes first is chance.
        return self.line() if b" has issued no collective for " in line else line.decode()

    def go_on(self):
        self.machine.stdin.write("\n")
        self.machine.stdin.flush()


@pytest.fixture(scope="module")
def said():
    """What each rank said while the network was cut, after it was mended, and when it was cut for good."""
    if not can_unshare():
        pytest.skip("this user may not make namespaces")
    env = os.environ | {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    env |= {"MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": "29500"}
    commands = [
        ["env", f"GLOO_SOCKET_IFNAME={ends()[number]}", sys.executable, str(SCRIPT), str(number)] for number in (0, 1)
    ]
    with two_machines(commands, env) as machines:
        talks = [Talk(machine) for machine in machines]
        assert [talk.line() for talk in talks] == ["ready"] * 2
        set_link(machines, 1, "down")
        for talk in talks:
            talk.go_on()
        cut = [talk.line() for talk in talks]
        set_link(machines, 1, "up")
        mended = [talk.line() for talk in talks]
        assert [talk.line() for talk in talks] == ["ready"] * 2
        set_link(machines, 1, "down")
        for talk in talks:
            talk.go_on()
        yield cut, mended, [[talk.line(), talk.line()] for talk in talks]


REMOTE = [
    "Rank 1 does not answer: the network is cut, the process is stopped, or its Python is in one long call.",
    "The store of the ranks does not answer: the network to the process that holds it (rank 0, or the launcher of the "
    "first machine) is cut, or that process is stopped.",
]


@pytest.mark.slow
@pytest.mark.dist
def test_each_rank_says_within_seconds_that_the_other_is_out_of_reach(said):
    cut, _, _ = said
    for number, line in enumerate(cut):
        assert re.fullmatch(
            rf"logged Rank {number} has waited \d s in all-reduce \(sum\) of 2 float32\. " + re.escape(REMOTE[number]),
            line,
        )


@pytest.mark.slow
@pytest.mark.dist
def test_ranks_go_on_when_the_network_is_mended(said):
    _, mended, _ = said
    assert mended == ["sum 2"] * 2


@pytest.mark.slow
@pytest.mark.dist
def test_at_the_groups_timeout_the_error_names_the_cut(said):
    _, _, final = said
    for number, (logged, error) in enumerate(final):
        assert logged.startswith(f"logged Rank {number} has waited ")
        assert re.fullmatch(
            rf"ProcessGroupError: Rank {number} waited \d\.\d s in all-reduce \(sum\) of 2 float32, longer than the "
            rf"group's timeout\. Missing: rank {1 - number}\. " + re.escape(REMOTE[number]) + " If these ranks .*",
            error,
        )
