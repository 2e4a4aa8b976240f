"""Machines on this one: network, host name, process ids and memory of their own, and cables (veth) between them."""

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


ALONE = """
mount -t tmpfs memory /dev/shm
printf "127.0.0.1 localhost\\n{hosts}" > /dev/shm/hosts
mount --bind /dev/shm/hosts /etc/hosts
"""


class Machines:
    """Machines at one switch that are started, lost and cut off one by one; each has its /dev/shm and all names.

    A machine that is lost takes what it kept in memory with it; started again, it is a new one with the same address.
    """

    def __init__(self, directory, env):
        """Write what machines say to ``directory``; their commands get the variables ``env``."""
        self.directory, self.env, self.running, self.starts = directory, env | {"PATH": _PATH}, {}, 0
        self.name = f"fs{os.getpid() % 100_000}"
        inside = "ip link add switch type bridge && ip link set switch up && echo up && exec sleep infinity"
        command = ["unshare", "--net", "sh", "-c", inside]
        self.switch = subprocess.Popen(command, env=self.env, stdout=subprocess.PIPE, text=True)
        assert self.switch.stdout.readline() == "up\n"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for number in list(self.running):
            self.lose(number)
        self.switch.kill()
        self.switch.wait()
        self.switch.stdout.close()

    def start(self, number, command):
        """Start a machine and plug it in, also one whose command has ended; what it says is in :meth:`said`."""
        if number in self.running:
            self.lose(number)
        self.starts += 1
        ends = [f"{self.name}{side}{self.starts}" for side in "ms"]
        address = f"{ADDRESSES[0].rpartition('.')[0]}.{number + 1}"
        hosts = "".join(f"{address} node{place}\\n" for place, address in enumerate(ADDRESSES))
        inside = ALONE.format(hosts=hosts) + INSIDE.format(number=number, address=address, end=ends[0])
        with self._file(number).open("a") as said:
            machine = subprocess.Popen(
                [*UNSHARE, "sh", "-c", inside, "sh", *command],
                env=self.env,
                stdin=subprocess.PIPE,
                stdout=said,
                stderr=said,
                text=True,
            )
        self.running[number] = (machine, ends)
        _ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1]).check_returncode()
        _ip("link", "set", ends[0], "netns", str(inner_pid(machine))).check_returncode()
        _ip("link", "set", ends[1], "netns", str(self.switch.pid)).check_returncode()
        self._at_switch("set", ends[1], "master", "switch", "up")
        machine.stdin.write("plugged\n")
        machine.stdin.flush()

    def cut(self, number):
        """Pull a machine's cable out of the switch."""
        self._at_switch("set", self.running[number][1][1], "down")

    def mend(self, number):
        """Plug it in again."""
        self._at_switch("set", self.running[number][1][1], "up")

    def lose(self, number):
        """Turn a machine off: nothing of it is left, and nobody is told."""
        machine, ends = self.running.pop(number)
        if machine.poll() is None:
            self._at_switch("del", ends[1])
        machine.kill()
        machine.wait()
        machine.stdin.close()

    def processes(self, number):
        """The ids, outside, of the ranks of a machine: the children of its launcher."""
        launcher = inner_pid(self.running[number][0])
        return [int(pid) for pid in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()]

    def wait(self, number, seconds):
        """A machine's exit code, when its command has ended."""
        return self.running[number][0].wait(seconds)

    def said(self, number):
        """What a machine has said so far, in all its lives."""
        return self._file(number).read_text()

    def _file(self, number):
        return self.directory / f"machine{number}.txt"

    def _at_switch(self, *arguments):
        inside = ["nsenter", "--target", str(self.switch.pid), "--net", "ip", "link", *arguments]
        subprocess.run(inside, check=True, env=self.env)
