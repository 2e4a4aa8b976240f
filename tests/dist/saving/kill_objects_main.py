"""Kill a rank at every operation on an object store, and in the middle of each put, and look at what is left.

The scenarios and the processes are those of ``kill_main.py``; the store is files that behave as objects.
"""

import os
import shutil
import signal
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parent))

import kill_main

from fullshard import Checkpoints
from fullshard.core.comm import SoloComm
from fullshard.state.saving import checkpoints
from fullshard.state.storage import as_place, find_checkpoints, writer
from support.object_stores import ObjectFiles
from support.rank_script import parse, print_result
from support.states import rank_runs, whole


class Killer:
    """Counts this process's operations on the store and ends it at one of them."""

    def __init__(self, at, halfway):
        self.at, self.done = at, []

    def install(self):
        ObjectFiles.before = staticmethod(self.operation)

    def operation(self, name):
        self.done.append(name)
        if len(self.done) == self.at:
            os.kill(os.getpid(), signal.SIGKILL)


def clearing(comm, url, said):
    """What killed saves left behind is cleared."""
    if comm.rank == 0:
        place, files = as_place(url) / "step-00000009.0a-1", ObjectFiles()
        for name in ("writing.json", "shard-00000-of-00002.safetensors", "model/config.json"):
            files.pipe_file((place / name).key, b"{}")
    comm.all_gather_object(None)
    kill_main.Killer.current.install()
    Checkpoints(url, ranks=comm).close()


def check(url, expected, steps):
    """A resume finds a complete checkpoint with the bits of its step, and leaves nothing else behind."""
    assert find_checkpoints(as_place(url)), "no complete checkpoint"
    model, optimizer = kill_main.make(SoloComm(kill_main.CPU))
    with Checkpoints(url, ranks=SoloComm(kill_main.CPU)) as found:
        restored = found.load(model, optimizer)
    assert restored.step >= max(steps, default=1), f"{restored.step} though saves of {steps} had returned"
    state = whole([rank_runs(model, optimizer)])
    assert all(torch.equal(value, expected[restored.step][name]) for name, value in state.items())
    names = {name.partition("/")[0] for name in as_place(url).sizes()}
    complete = {path.name for path in find_checkpoints(as_place(url))}
    assert names == complete, f"{names - complete} is left"


def survive(scratch):
    """The points of every scenario; how many there were."""
    comm, expected = SoloComm(kill_main.CPU), {}
    kill_main.Killer, kill_main.clearing = Killer, clearing
    prepare(f"objectfiles://{scratch}/prepared", comm, expected)
    points = 0
    for name, scenario in (kill_main.scenarios((2,)) | {"clearing": clearing}).items():
        for rank in (0, 1):
            at, operations = -1, None
            while operations is None or at <= len(operations):
                directory = scratch / f"{name}-{rank}-{at}"
                shutil.copytree(scratch / "prepared", directory)
                returned, done = kill_main.run(scenario, f"objectfiles://{directory}", rank, at, halfway=False)
                operations = done if operations is None else operations
                try:
                    check(f"objectfiles://{directory}", expected, returned)
                except BaseException as error:
                    raise AssertionError(f"{name}, rank {rank}, at {at} ({operations[at - 1]})") from error
                points += at > 0
                at = max(1, at + 1)
    return points


def prepare(url, comm, expected):
    """Step 1, saved; the state of each step."""
    model, optimizer = kill_main.make(comm)
    with Checkpoints(url, ranks=comm) as saving:
        for step in (1, 2, 3):
            kill_main.step_to(model, optimizer, step)
            expected[step] = whole([rank_runs(model, optimizer)])
            if step == 1:
                saving.save(model, optimizer, step=1)


if __name__ == "__main__":
    writer._LOOK_SECONDS = 0.002, 0.04
    checkpoints.JOIN_SECONDS = 0.2  # a rank whose peer was killed waits this long for a save that cannot end
    cases = {"objects": survive}
    options = parse(cases, __doc__, ranks=1)
    print_result({name: cases[name](options.directory) for name in options.only})
