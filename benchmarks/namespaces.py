"""Two machines on this one: network and process namespaces joined by a link of a given rate (Linux, root)."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

SPACES = ("fullshard-a", "fullshard-b")
ADDRESSES = ("10.77.0.1", "10.77.0.2")
PORT = 29519


@contextmanager
def link(rate: str) -> Iterator[None]:
    """Context in which the namespaces exist, with a link that lets through ``rate`` each way, as ``tc`` writes it.

    Raises:
        CalledProcessError: They cannot be made.
    """
    ends = [f"{space}-0" for space in SPACES]
    try:
        run("ip", "link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for space, end, address in zip(SPACES, ends, ADDRESSES, strict=True):
            run("ip", "netns", "add", space)
            run("ip", "link", "set", end, "netns", space)
            inside = ("ip", "netns", "exec", space)
            run(*inside, "ip", "addr", "add", f"{address}/24", "dev", end)
            run(*inside, "ip", "link", "set", end, "up")
            run(*inside, "ip", "link", "set", "lo", "up")
        limit(rate)
        yield
    finally:
        for space in SPACES:
            subprocess.run(["ip", "netns", "del", space], check=False, capture_output=True)


def limit(rate: str) -> None:
    """Let through ``rate`` each way from now on."""
    for space in SPACES:
        bucket = ("tbf", "rate", rate, "burst", "512kb", "latency", "400ms")
        run("ip", "netns", "exec", space, "tc", "qdisc", "replace", "dev", f"{space}-0", "root", *bucket)


def run(*command: str) -> None:
    """Run a command.

    Raises:
        CalledProcessError: It failed.
    """
    subprocess.run(command, check=True)


def start_rank(machine: int, *, rank: int, world: int, per_machine: int = 1) -> subprocess.Popen[bytes]:
    """Start this program again as a rank in a machine, where it cannot read the memory of ranks elsewhere."""
    environment = {
        **os.environ,
        **{"RANK": str(rank), "WORLD_SIZE": str(world), "GROUP_RANK": str(machine)},
        **{"LOCAL_RANK": str(rank % per_machine), "LOCAL_WORLD_SIZE": str(per_machine)},
        **{"MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": str(PORT), "GLOO_SOCKET_IFNAME": f"{SPACES[machine]}-0"},
        "OMP_NUM_THREADS": "1",
    }
    inside = ("ip", "netns", "exec", SPACES[machine], "unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
    return subprocess.Popen([*inside, sys.executable, *sys.argv], env=environment)


def on_two_machines(rate: str, per_machine: int = 1) -> list[int]:
    """Run this program as ``per_machine`` ranks in each of two machines; return their exit codes."""
    world = 2 * per_machine
    with link(rate):
        started = [
            start_rank(rank // per_machine, rank=rank, world=world, per_machine=per_machine) for rank in range(world)
        ]
        return [rank.wait() for rank in started]
