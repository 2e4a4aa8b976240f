"""Two machines on this one: network, host name and process ids of their own, and a cable (veth) between them."""

import contextlib
import os
import shutil
import subprocess
from pathlib import Path

ADDRESSES = ("10.213.77.1", "10.213.77.2")
UNSHARE = ["unshare", "--net", "--uts", "--pid", "--mount", "--mount-proc", "--fork", "--kill-child=KILL"]
INSIDE = """
hostname node{number}
read plugged
ip link set lo up
ip addr add {address}/24 dev {end}
ip link set {end} up
exec "$@"
"""


def can_unshare():
    """Whether this user may make namespaces, and a cable between them."""
    if shutil.which("unshare") is None or shutil.which("ip", path=_PATH) is None or os.geteuid() != 0:
        return False
    ends = ("fstry0", "fstry1")
    made = _ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1]).returncode == 0
    _ip("link", "del", ends[0])
    return made and subprocess.run([*UNSHARE, "true"], capture_output=True).returncode == 0


_PATH = f"/usr/sbin:/sbin:{os.environ.get('PATH', '')}"


def _ip(*arguments):
    return subprocess.run(["ip", *arguments], capture_output=True, env=os.environ | {"PATH": _PATH})


@contextlib.contextmanager
def two_machines(commands, env, *, apart=True):
    """Run a command on each of two machines; the processes, with pipes for what they write. Killed at the end.

    The namespaces, and the cable with them, are gone when their processes are. Not ``apart``: on this machine as it is.
    """
    machines = []
    try:
        for number, command in enumerate(commands):
            inside = INSIDE.format(number=number, address=ADDRESSES[number], end=ends()[number])
            machines.append(
                subprocess.Popen(
                    [*UNSHARE, "sh", "-c", inside, "sh", *command] if apart else command,
                    env=env | {"PATH": _PATH},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        if apart:
            _plug(machines)
        yield machines
    finally:
        for machine in machines:
            machine.kill()
            machine.wait()
            for pipe in (machine.stdin, machine.stdout, machine.stderr):
                pipe.close()


def ends():
    """The names of the cable's ends, one in each machine."""
    return [f"fs{os.getpid() % 100_000}{side}" for side in "ab"]


def _plug(machines):
    """Lay the cable: an end in each machine, which goes on then."""
    plugs = ends()
    _ip("link", "add", plugs[0], "type", "veth", "peer", "name", plugs[1]).check_returncode()
    try:
        for machine, end in zip(machines, plugs, strict=True):
            _ip("link", "set", end, "netns", str(inner_pid(machine))).check_returncode()
    except BaseException:
        _ip("link", "del", plugs[0])
        raise
    for machine in machines:
        machine.stdin.write("plugged\n")
        machine.stdin.flush()


def inner_pid(machine):
    """The process that runs in a machine, by its number outside of it."""
    children = Path(f"/proc/{machine.pid}/task/{machine.pid}/children")
    while not (found := children.read_text().split()):
        assert machine.poll() is None, machine.stderr.read()
    return int(found[0])


def set_link(machines, number, state):
    """Cut (``down``) or mend (``up``) the cable of two machines, at the end in machine ``number``."""
    inside = ["nsenter", "--target", str(inner_pid(machines[number])), "--net"]
    subprocess.run([*inside, "ip", "link", "set", ends()[number], state], check=True, env=os.environ | {"PATH": _PATH})
