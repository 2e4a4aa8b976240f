"""Run a script as several processes on this machine, on the CPU or on its GPUs."""

import atexit
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src"
TESTS = Path(__file__).parents[1]


FULLSHARD = [sys.executable, "-m", "fullshard"]


SENT = [getattr(signal, f"SIG{name}") for name in ("HUP", "INT", "QUIT", "TERM", "USR1", "USR2", "CHLD")]
"""The signals that tests send, and that of a child's end."""


def give_children_default_signals():
    """Let processes that this one starts hear what it ignores itself, as under nohup or in a script's background.

    An ignored signal is ignored by children too; one with a handler has its default in them. This process's handler
    does nothing, so that under nohup the tests outlive their terminal.
    """
    for number in SENT:
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda *_: None)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@functools.cache
def rank_server(_place):
    """A process that forks ranks, until this one ends. See ``rank_server.py``."""
    server = subprocess.Popen(
        [sys.executable, str(TESTS / "support" / "rank_server.py")],
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(server.communicate)
    return server


def first_gpu():
    """The first GPU that this process sees, as CUDA_VISIBLE_DEVICES has it."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]


def environment(**changes):
    """This process's, for a rank that computes with one thread and is quiet."""
    path = os.pathsep.join([str(SOURCE), os.environ.get("PYTHONPATH", "")])
    return os.environ | {"OMP_NUM_THREADS": "1", "KINETO_LOG_LEVEL": "99", "PYTHONPATH": path} | changes


def apart(**changes):
    """This process's environment without another launcher's variables, one thread a rank, on the CPU."""
    values = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return values | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} | changes


def call(*arguments, **options):
    """Run a verb of the program, and return how it ended."""
    texts = {"capture_output": True, "text": True, "env": apart()}
    return subprocess.run([*FULLSHARD, *arguments], check=False, **texts, **options)


def run_ranks(size, script, *args, cwd=None, timeout_s=240, gpus=""):
    """Start ``size`` ranks of ``script``, as torchrun would on one machine; what each printed on stdout and stderr.

    Args:
        size: How many.
        script: Path of the script.
        args: Its arguments.
        cwd: Where it runs; this process's directory if None.
        timeout_s: After how many seconds it is killed.
        gpus: The GPUs that ranks see, as CUDA_VISIBLE_DEVICES has them; None: those that this process sees.
    """
    common = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
    }
    if gpus is not None:
        common["CUDA_VISIBLE_DEVICES"] = gpus
    with tempfile.TemporaryDirectory() as scratch:
        ranks = [
            {
                "env": environment(**common, RANK=str(number), LOCAL_RANK=str(number)),
                "out": f"{scratch}/{number}.out",
                "err": f"{scratch}/{number}.err",
            }
            for number in range(size)
        ]
        request = {"script": str(script), "args": args, "cwd": str(cwd or os.getcwd()), "timeout_s": timeout_s}
        # A fork of a process that has looked for GPUs cannot use them.
        codes = _fork(request, ranks) if gpus == "" else _spawn(request, ranks)
        outputs = [(Path(rank["out"]).read_text(), Path(rank["err"]).read_text()) for rank in ranks]
    for number, (code, (out, err)) in enumerate(zip(codes, outputs, strict=True)):
        how = f"was killed after {timeout_s} s" if code is None else f"ended with {code}"
        assert code == 0, f"rank {number} {how}\n{out}\n{err}"
    return outputs


def _fork(request, ranks):
    """Exit codes of ``ranks`` as forks of the rank servers; None for one that was killed."""
    asked = [(rank_server(place), some) for place, some in enumerate((ranks[:1], ranks[1:])) if some]
    for server, some in asked:
        server.stdin.write(json.dumps(request | {"ranks": some}) + "\n")
        server.stdin.flush()
    return [code for server, _ in asked for code in json.loads(server.stdout.readline())]


def _spawn(request, ranks):
    """The same, of new interpreters."""
    command = [sys.executable, request["script"], *request["args"]]
    with ExitStack() as files:
        started = [
            subprocess.Popen(
                command,
                env=rank["env"],
                cwd=request["cwd"],
                stdin=subprocess.DEVNULL,
                stdout=files.enter_context(open(rank["out"], "wb")),
                stderr=files.enter_context(open(rank["err"], "wb")),
            )
            for rank in ranks
        ]
        deadline = time.monotonic() + request["timeout_s"]
        return [_end(rank, deadline) for rank in started]


def _end(rank, deadline):
    try:
        return rank.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        rank.kill()
        rank.wait()
        return None


def run_processes(size, script, *args, timeout_s=240, gpus=""):
    """Start ``size`` ranks of ``script`` and return what rank 0 printed after ``RESULT``."""
    out, _ = run_ranks(size, script, *args, timeout_s=timeout_s, gpus=gpus)[0]
    line = next(line for line in out.splitlines() if line.startswith("RESULT "))
    return json.loads(line.removeprefix("RESULT "), object_hook=Cases)


def selected(request, key="name", **others):
    """The values of a parameter in the tests of a module that this session runs; those whose other parameters match.

    A module's tests share processes, which then run no case that nobody reads. Takes the request of a fixture.
    """
    each = [
        item.callspec.params
        for item in request.session.items
        if item.path == request.path and hasattr(item, "callspec")
    ]
    return list(dict.fromkeys(one[key] for one in each if key in one and others.items() <= one.items()))


class Cases(dict):
    """Results by case; one that raised on its rank (``rank_script.found``) fails the test that looks at it."""

    def __getitem__(self, name):
        found = super().__getitem__(name)
        assert not (isinstance(found, dict) and "failed" in found), found["failed"]
        return found
