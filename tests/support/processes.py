"""Run a script as several gloo processes on this machine."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src"


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_ranks(size, script, *args, cwd=None, timeout_s=240):
    """Start ``size`` ranks of ``script``, as torchrun would on one machine; what each printed on stdout and stderr."""
    env = os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "OMP_NUM_THREADS": "1",
        "KINETO_LOG_LEVEL": "99",
        "PYTHONPATH": os.pathsep.join([str(SOURCE), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, str(script), *args]
    ranks = [
        subprocess.Popen(
            command,
            env=env | {"RANK": str(r), "LOCAL_RANK": str(r)},
            cwd=cwd,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for r in range(size)
    ]
    outputs = []
    try:
        for rank in ranks:
            outputs.append(rank.communicate(timeout=timeout_s))
    finally:
        for rank in ranks:
            rank.kill()
    for number, (rank, (out, err)) in enumerate(zip(ranks, outputs, strict=True)):
        assert rank.returncode == 0, f"rank {number} ended with {rank.returncode}\n{out}\n{err}"
    return outputs


def run_processes(size, script, *args, timeout_s=240):
    """Start ``size`` ranks of ``script`` and return what rank 0 printed after ``RESULT``."""
    out, _ = run_ranks(size, script, *args, timeout_s=timeout_s)[0]
    line = next(line for line in out.splitlines() if line.startswith("RESULT "))
    return json.loads(line.removeprefix("RESULT "))
