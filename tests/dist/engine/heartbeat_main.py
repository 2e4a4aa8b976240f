"""Ranks that are stopped, busy or elsewhere while another waits for them: ``heartbeat_main.py DIRECTORY CASE BACKEND``.

Rank 1 does what CASE says, and then joins the all-reduce in which rank 0 waits. BACKEND is ``gloo`` or ``process``:
torch's collectives as under NCCL, here over gloo. Each rank writes ``DIRECTORY/R.json``.
"""

import json
import logging
import os
import select
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))

from fullshard.core.comm import ENDINGS, GlooComm, ProcessComm
from fullshard.core.comm.process import start_heartbeat
from support.processes import free_port


def is_stopped_here():
    select.select([], [], [], 1.5)  # a beat
    os.kill(os.getpid(), signal.SIGSTOP)


def is_busy_here():
    """One long call that holds the interpreter, as a collection of garbage does."""
    began = time.monotonic()
    numbers = list(range(1 << 20))
    while time.monotonic() - began < 9:
        sorted(numbers * 24, key=None)


def is_elsewhere():
    select.select([], [], [], 9)


CASES = {"stopped": is_stopped_here, "napping": is_stopped_here, "busy": is_busy_here, "elsewhere": is_elsewhere}


def run(rank, directory, case, backend, pipe):
    report = {"log": [], "sum": None, "error": None}

    class Log(logging.Handler):
        def emit(self, record):
            report["log"].append([time.monotonic(), record.getMessage()])

    def write():
        (directory / f"{rank}.json").write_text(json.dumps(report))

    def end(error):
        report["error"] = [time.monotonic(), f"{type(error).__name__}: {error}", error.transient]
        write()
        os._exit(0)

    logging.getLogger("fullshard").addHandler(Log())
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    comm = GlooComm(group) if backend == "gloo" else ProcessComm(group, torch.device("cpu"))
    if backend == "process":
        ENDINGS.append(end)
        start_heartbeat(comm)
    comm.announce("a first one")
    for _ in range(60):  # beats, and the other's process id
        comm.all_reduce(torch.ones(2)).wait()
        select.select([], [], [], 0.05)
    report["began"] = time.monotonic()
    comm.announce("gradients of unit 3")
    if rank == 1:
        os.write(pipe, b"x")
        CASES[case]()
    total = torch.ones(2)
    try:
        comm.all_reduce(total).wait()
    except Exception as error:
        end(error)
    report["sum"] = total[0].item()
    write()
    os._exit(0)


def main(directory, case, backend):
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    receives, sends = os.pipe()
    pids = []
    for rank in range(2):
        pid = os.fork()
        if pid == 0:
            os.environ["RANK"] = str(rank)
            run(rank, directory, case, backend, sends)
        pids.append(pid)
    os.read(receives, 1)
    if case == "napping":
        select.select([], [], [], 5)
        os.kill(pids[1], signal.SIGCONT)
    os.waitpid(pids[0], 0)
    if case == "stopped":
        os.kill(pids[1], signal.SIGKILL)
    os.waitpid(pids[1], 0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
