"""Ranks that end, fail, stop or are cut off while others wait for them, on gloo processes.

``lost_main.py SIZE DIRECTORY CASE[,CASE...]`` runs one case after the other. Ranks are forked, so that torch is
imported once; in each case they join a group of their own. Rank R writes ``DIRECTORY/CASE.R.json``.
"""

import datetime
import gc
import json
import logging
import os
import select
import signal
import socket
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))

import fullshard
from fullshard import MinNumel, fully_shard
from fullshard.core.comm import GlooComm
from support.processes import free_port

TIMEOUT_S = 40.0  # of the groups: nothing here waits for it
CASE_S = 60.0


class Fault(Exception):
    """The error of a rank's own program."""


class Rank:
    """This process: its comm, what it has to report, and the end it comes to."""

    def __init__(self, rank, size, pipe):
        self.rank, self.size, self.pipe = rank, size, pipe
        self.report = {"log": []}
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=TIMEOUT_S))
        self.comm = GlooComm(dist.group.WORLD)

    @property
    def is_last(self):
        return self.rank == self.size - 1

    def model(self, width=8):
        torch.manual_seed(0)
        linears = (torch.nn.Linear(width, width) for _ in range(3))
        model = fully_shard(torch.nn.Sequential(*linears), self.comm, wrap=MinNumel(1))
        x = torch.ones(2, width)
        for _ in range(2):  # the first pass compares ranks before each collective
            model(x).sum().backward()
        return model, x

    def tell(self, line):
        """Send the parent a line."""
        os.write(self.pipe, f"{self.rank} {line}\n".encode())


def fail_at(place, how):
    """A case in which the last rank ends just before ``place``."""

    def case(rank):
        model, x = rank.model(200 if place == "large_forward" else 8)
        rank.report["known"] = sorted(rank.comm._watch.store_posts.neighbours())

        def last_ends(*_):
            rank.report["ended"] = time.monotonic()
            write(rank, f"{place}_{how}")
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise Fault("no rows left")

        if place == "backward" and rank.is_last:
            model[1].register_full_backward_hook(last_ends)
        if place in ("backward", "clip"):
            model(x).sum().backward()
        if rank.is_last:
            last_ends()
        if place == "clip":
            fullshard.clip_grad_norm_(model, 1.0)
        elif place == "save":
            fullshard.save(model, rank.directory / f"saved_{how}")
        elif place == "barrier":
            rank.comm.barrier()
        else:
            model(x)

    return case


def ends(rank):
    """The last rank's data are over, and so is its program."""
    model, x = rank.model()
    if not rank.is_last:
        model(x)


def barrier_of_torchs(rank):
    """The last rank's data are over: it waits for the others in torch's own barrier."""
    model, x = rank.model()
    if rank.is_last:
        dist.barrier()
    else:
        model(x)


def stopped(rank, who):
    """A rank is stopped and goes on; later ranks part."""
    rank.comm.hides_messages()  # what a group's first collective finds out
    if rank.rank == who:
        rank.tell("stops")
        os.kill(os.getpid(), signal.SIGSTOP)
    total = torch.ones(2)
    rank.comm.all_reduce(total).wait()
    rank.report["sum"] = total[0].item()
    if rank.is_last:
        rank.comm.barrier()
    else:
        rank.comm.all_gather(torch.zeros(4 * rank.size), torch.zeros(4)).wait()


def cut(rank):
    """The connections of rank 0 to the others are cut; all run on."""
    rank.model()
    rank.comm.barrier()
    if rank.rank == 0:
        rank.report["ended"] = time.monotonic()
        cut_connections()
    model, x = rank.model()
    model(x)


def cut_connections():
    """Shut down this process's sockets, but for those to the store."""
    for fd in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(fd))) as one:
                ports = (one.getsockname()[1], one.getpeername()[1])
                if int(os.environ["MASTER_PORT"]) not in ports:
                    one.shutdown(socket.SHUT_RDWR)
        except (OSError, IndexError, TypeError):  # not a connection
            continue


PLACES = ("forward", "large_forward", "backward", "clip", "save", "barrier")
CASES = {f"{place}_{how}": fail_at(place, how) for place in PLACES for how in ("killed", "raised")} | {
    "ends": ends,
    "barrier_of_torchs": barrier_of_torchs,
    "stopped_0": lambda rank: stopped(rank, 0),
    "stopped_1": lambda rank: stopped(rank, 1),
    "cut": cut,
}


class Lines(logging.Handler):
    """Keeps what is logged, and tells the parent."""

    def __init__(self, rank):
        super().__init__()
        self.rank = rank

    def emit(self, record):
        self.rank.report["log"].append(record.getMessage())
        self.rank.tell("logs")


def write(rank, case):
    (rank.directory / f"{case}.{rank.rank}.json").write_text(json.dumps(rank.report))


def run_rank(name, rank):
    """Run a case; what ends it ends the process, as it would end a user's."""
    logging.getLogger("fullshard").addHandler(Lines(rank))
    try:
        CASES[name](rank)
    except Fault:
        raise
    except Exception as error:
        rank.report |= {"learned": time.monotonic(), "text": f"{type(error).__name__}: {error}"}
        write(rank, name)
        while name == "cut" and len(list(rank.directory.glob("cut.*.json"))) < rank.comm.size:
            pass  # both run when both learn it
        if name.endswith("killed"):
            os._exit(1)  # what an uncaught error does takes seconds, and is looked at in the other cases
        raise
    else:
        rank.report["text"] = "no error"
        write(rank, name)


def attend(pids, pipe):
    """Let ranks go on that were stopped, as soon as another one has logged; return when all have ended."""
    ends = {os.pidfd_open(pid): pid for pid in pids}
    poll = select.poll()
    for fd in (pipe, *ends):
        poll.register(fd, select.POLLIN)
    asleep = set()
    while ends:
        ready = [fd for fd, _ in poll.poll(CASE_S * 1000)]
        if not ready:
            for pid in ends.values():
                os.kill(pid, signal.SIGKILL)
        if pipe in ready:
            follow(os.read(pipe, 65536).decode().splitlines(), pids, asleep)
        for fd in set(ready) & set(ends):
            os.waitpid(ends.pop(fd), 0)
            poll.unregister(fd)
            os.close(fd)


def follow(lines, pids, asleep):
    for line in lines:
        number, what = line.split()
        if what == "stops":
            asleep.add(pids[int(number)])
        elif what == "logs":
            for pid in asleep:
                os.kill(pid, signal.SIGCONT)
            asleep.clear()


def main(size, directory, names):
    torch.set_num_threads(1)
    gc.freeze()  # the end of a rank that raised looks for garbage among all that is imported: a second of a core
    for name in names:
        receives, sends = os.pipe()
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(size)}
        pids = []
        for number in range(size):
            pid = os.fork()
            if pid == 0:
                os.environ["RANK"] = str(number)
                rank = Rank(number, size, sends)
                rank.directory = directory
                return run_rank(name, rank)
            pids.append(pid)
        attend(pids, receives)
    return None


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3].split(","))
