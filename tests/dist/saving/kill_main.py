"""Kill a rank at every file operation of a save, and look at what is left.

One process without threads forks, for every point, the two ranks of a scenario; one of them kills itself before its
k-th file operation, or in the middle of it where it writes. The other then finds its peer gone and ends. Afterwards a
resume must find a whole checkpoint, not older than the last save that returned, with the bits of a recorded step.
"""

import os
import pickle
import shutil
import signal
import socket
import struct
import sys
from functools import partial
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2]))

from fullshard import Checkpoints, fully_shard, save
from fullshard.core.comm import SoloComm
from fullshard.state.storage import atomic_directory, find_checkpoints, publish_model
from fullshard.state.storage.safetensors_file import SafetensorsFile
from support.rank_script import parse, print_result
from support.states import rank_runs, whole

CPU = torch.device("cpu")
WRITES = ("pwrite", "write", "write_text")
OPERATIONS = (
    "mkdir", "rmdir", "rename", "replace", "unlink", "link", "truncate", "ftruncate", "fsync", "pwrite", "write",
)  # fmt: skip


class PairComm(SoloComm):
    """Two forked processes and a socket between them: what saving and loading need of a group."""

    def __init__(self, rank, channel):
        super().__init__(CPU)
        self.rank, self.size, self.channel = rank, 2, channel

    def all_gather_object(self, value):
        data = pickle.dumps(value)
        self.channel.sendall(struct.pack("<q", len(data)) + data)
        other = pickle.loads(self._receive(struct.unpack("<q", self._receive(8))[0]))
        return [value, other] if self.rank == 0 else [other, value]

    def _receive(self, count):
        data = b""
        while len(data) < count:
            part = self.channel.recv(count - len(data))
            if not part:
                raise ConnectionResetError
            data += part
        return data


class Killer:
    """Counts this process's file operations and ends it at one of them."""

    def __init__(self, at, halfway):
        self.at, self.halfway, self.done = at, halfway, []

    def install(self):
        for name in OPERATIONS:
            setattr(os, name, partial(self.operation, getattr(os, name), name))
        os.open = partial(self.opening, os.open)
        Path.write_text = lambda path, text, encoding=None, do=Path.write_text: self.operation(
            partial(do, encoding=encoding), "write_text", path, text
        )

    def opening(self, do, path, flags, *args, **options):
        return (
            self.operation(do, "open", path, flags, *args, **options)
            if flags & os.O_CREAT
            else do(path, flags, *args, **options)
        )

    def operation(self, do, name, *args, **options):
        self.done.append(name)
        if len(self.done) == self.at:
            if self.halfway and name in WRITES:
                do(args[0], args[1][: len(args[1]) // 2], *args[2:], **options)
            os.kill(os.getpid(), signal.SIGKILL)
        return do(*args, **options)


def make(comm):
    """The same sharded model and optimizer on every rank."""
    torch.manual_seed(0)
    model = fully_shard(nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 3)), comm, wrap=None)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def step_to(model, optimizer, step):
    """Bring the state to what it is after ``step`` steps, whatever the world size."""
    for number in range(len(optimizer.state) and int(next(iter(optimizer.state.values()))["step"]), step):
        for param in model.parameters():
            param.grad = torch.full_like(param, float(number + 1))
        optimizer.step()


def plain(comm, directory, said, *, steps, background=False, **options):
    """Saves of ``steps``; with ``keep_last=1`` each deletes the one before it."""
    model, optimizer = make(comm)
    with Checkpoints(directory, ranks=comm, **options) as checkpoints:
        for step in steps:
            step_to(model, optimizer, step)
            checkpoints.save(model, optimizer, step=step, metric=-step, background=background)
            checkpoints.wait()
            said(step)


def same_step(comm, directory, said):
    """The step that is there already, anew."""
    model, optimizer = make(comm)
    with Checkpoints(directory, ranks=comm) as checkpoints:
        checkpoints.load(model, optimizer)
        checkpoints.save(model, optimizer, step=1)
        said(1)


def clearing(comm, directory, said):
    """What killed saves left behind is cleared: a half-written one, and one that was about to be replaced."""
    if comm.rank == 0 and not (directory / "step-00000001.old").exists():
        (directory / "step-00000009.tmp").mkdir()
        (directory / "step-00000009.tmp" / "x").write_bytes(b"x")
        shutil.copytree(directory / "step-00000001", directory / "step-00000001.tmp")
        (directory / "step-00000001").rename(directory / "step-00000001.old")
    comm.all_gather_object(None)
    Killer.current.install()
    Checkpoints(directory, ranks=comm).close()


def scenarios(steps):
    """From name to what both ranks do."""
    return {
        "keep_last": partial(plain, steps=steps, keep_last=1),
        "keep_best_in_background": partial(plain, steps=steps, keep_last=1, keep_best=1, background=True),
        "same_step": same_step,
        "clearing": clearing,
    }


def _say(pipe, words):
    open(pipe, "wb", buffering=0, closefd=False).write(words)  # noqa: SIM115 (os.write may be what kills)


def run(scenario, directory, rank, at, halfway):  # noqa: C901 (two processes in one function)
    """Fork both ranks; returns the steps whose save returned, and the operations that the rank did."""
    pairs, (said_in, said_out) = socket.socketpair(), os.pipe()
    children = []
    for number in range(2):
        child = os.fork()
        if child == 0:
            pairs[1 - number].close()
            killer = Killer.current = Killer(at if number == rank else -1, halfway)
            try:
                if scenario is not clearing:
                    killer.install()
                comm = PairComm(number, pairs[number])
                tell = os.dup(said_out)

                def said(step, number=number, tell=tell):
                    if number == 0:
                        _say(tell, b"S%d\n" % step)

                scenario(comm, directory, said)
                if number == rank:
                    _say(tell, f"N{','.join(killer.done)}\n".encode())
                os._exit(0)
            except ConnectionError:
                os._exit(3)  # the other was killed
            except BaseException as error:
                print(f"{scenario} rank {number} at {at}: {error!r}", file=sys.stderr)
                os._exit(4)
        children.append(child)
    for one in pairs:
        one.close()
    os.close(said_out)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    with open(said_in, "rb") as stream:
        lines = stream.read().decode().split()
    steps = [int(line[1:]) for line in lines if line[0] == "S"]
    operations = [name for line in lines if line[0] == "N" for name in line[1:].split(",") if name]
    if at < 0:
        assert codes == [0, 0], f"{scenario} fails without a kill: {codes}"
    elif 0 not in codes:
        assert codes[rank] == -signal.SIGKILL, f"{scenario}: rank {rank} was to be killed at {at}; codes {codes}"
    return steps, operations


def check(directory, expected, steps):
    """A resume finds a whole checkpoint with the bits of its step, and leaves nothing torn behind."""
    assert find_checkpoints(directory), "no complete checkpoint"
    model, optimizer = make(SoloComm(CPU))
    with Checkpoints(directory, ranks=SoloComm(CPU)) as checkpoints:
        restored = checkpoints.load(model, optimizer)
    assert restored is not None
    assert restored.step >= max(steps, default=1), f"{restored.step} though saves of {steps} had returned"
    state = whole([rank_runs(model, optimizer)])
    assert all(torch.equal(value, expected[restored.step][name]) for name, value in state.items())
    torn = [path.name for path in directory.iterdir() if path.suffix in (".tmp", ".old")]
    assert not torn, torn


def sample(operations):
    """Of all points those that leave another kind of state than the point before, not one of each of many tensors."""
    for at, name, halfway in points_of(operations):
        before, earlier = operations[max(at - 2, 0)], operations[max(at - 3, 0)]
        if before == "fsync":
            continue  # what was written outlives the process, synced or not
        if name == before == "pwrite" and (earlier == "pwrite" or not halfway):
            continue
        yield at, name, halfway


def points_of(operations):
    """Every operation's place and name, and again where it is killed in its middle."""
    for at, name in enumerate(operations, start=1):
        for halfway in (False, True)[: 1 + (name in WRITES)]:
            yield at, name, halfway


def checkpoints_survive(scratch, points_of, steps):
    """The points of every scenario; how many there were."""
    comm, expected, prepared = SoloComm(CPU), {}, scratch / "prepared"
    model, optimizer = make(comm)
    with Checkpoints(prepared, ranks=comm) as checkpoints:
        for step in (1, 2, 3):
            step_to(model, optimizer, step)
            expected[step] = whole([rank_runs(model, optimizer)])
            if step == 1:
                checkpoints.save(model, optimizer, step=1)
    points = 0
    for name, scenario in scenarios(steps).items():
        for rank in (0, 1):
            shutil.copytree(prepared, scratch / "count")
            _, operations = run(scenario, scratch / "count", rank, -1, halfway=False)
            shutil.rmtree(scratch / "count")
            for at, operation, halfway in points_of(operations):
                directory = scratch / "point"
                shutil.copytree(prepared, directory)
                returned, _ = run(scenario, directory, rank, at, halfway)
                try:
                    check(directory, expected, returned)
                except BaseException as error:
                    where = f"{name}, rank {rank}, operation {at} ({operation}), halfway {halfway}"
                    raise AssertionError(where) from error
                shutil.rmtree(directory)
                points += 1
    return points


def full_saves_survive(scratch):
    """A model directory that is replaced and published: at each point readers find the old model or the new one."""
    comm, points = SoloComm(CPU), 0
    model, optimizer = make(comm)
    versions = []
    for step in (1, 2):
        step_to(model, optimizer, step)
        save(model, scratch / f"v{step}")
        versions.append(weights(scratch / f"v{step}"))
    prepared = scratch / "full"
    shutil.copytree(scratch / "v1", prepared / "best")
    shutil.copytree(scratch / "v1", prepared / "out")
    at, done = 1, False
    while not done:
        directory = scratch / "point"
        shutil.copytree(prepared, directory)
        child = os.fork()
        if child == 0:
            Killer(at, halfway=at % 2 == 0).install()
            save(model, directory / "best")
            publish_model(directory / "best", directory / "out")
            os._exit(0)
        done = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        with atomic_directory(directory / "best") as temporary:  # the next save finds and mends what was left
            found = directory / "best"
            assert found.is_dir(), f"operation {at}: the model is gone"
            assert any(same(weights(found), version) for version in versions), f"operation {at}: torn"
            shutil.copytree(found, temporary, dirs_exist_ok=True)
        placed = directory / "out" / "model.safetensors"
        if placed.exists():
            assert any(same(weights(directory / "out"), version) for version in versions), f"operation {at}: torn"
        shutil.rmtree(directory)
        at, points = at + 1, points + 1
    return points


def weights(directory):
    """The tensors of a saved model."""
    file = SafetensorsFile(directory / "model.safetensors")
    found = {}
    for name, stored in file.tensors.items():
        found[name] = torch.empty(stored.shape, dtype=stored.dtype)
        file.read(name, 0, found[name].view(-1))
    return found


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


if __name__ == "__main__":
    cases = {
        "checkpoints": partial(checkpoints_survive, points_of=sample, steps=(2,)),
        "every_point": partial(checkpoints_survive, points_of=points_of, steps=(2, 3)),
        "full": full_saves_survive,
    }
    options = parse(cases, __doc__, ranks=1)
    print_result({name: cases[name](options.directory) for name in options.only})
