"""Runs of ``fullshard train`` on machines that are namespaces of this one."""

import contextlib
import os
import sys
import time

from support.namespaces import ADDRESSES, Machines
from support.processes import SOURCE
from support.tiny_run import QUICK, read_jsonl, write_run_file

SETTINGS = QUICK | {
    "training__per_device_train_batch_size": 1,
    "training__num_train_epochs": 20,
    "training__save_strategy": "no",
    "training__eval_strategy": "no",
}
"""With dropout, and no checkpoint on disk."""


ELASTIC = ["--nnodes", "1:2", "--rdzv_backend", "c10d"]
"""One machine or two, in place of a fixed number."""


class Run:
    """A run on some machines of one rank each."""

    def __init__(self, directory, count, options=(), **changes):
        """Start it on all of them."""
        directory.mkdir()
        self.directory, self.count = directory, count
        file = write_run_file(directory, **(SETTINGS | changes))
        self.options = ["--max_restarts", "3", *(options or ("--nnodes", str(count)))]
        self.train = ["-m", "fullshard", "train", str(file), "--no-plan"]
        env = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "RANK", "WORLD_"))}
        env |= {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        self.machines = Machines(directory, env)

    def __enter__(self):
        for number in range(self.count):
            self.start(number)
        return self

    def __exit__(self, *_):
        self.machines.__exit__()

    def start(self, number):
        place = ["--nproc_per_node", "1", "--rdzv_endpoint", f"{ADDRESSES[0]}:29500"]
        if "c10d" not in self.options:
            place += ["--node_rank", str(number)]
        launch = [sys.executable, "-m", "fullshard", "launch", *self.options, *place]
        self.machines.start(number, [*launch, *self.train])

    def steps(self):
        with contextlib.suppress(FileNotFoundError):
            return [one for one in read_jsonl(self.directory / "out" / "metrics.jsonl") if one["kind"] == "step"]
        return []

    def until(self, condition, seconds=90):
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, [self.machines.said(number) for number in range(self.count)]
            time.sleep(0.05)  # between looks at a file of another process

    def trains_past(self, step):
        """Return when a step after ``step`` is recorded that was trained after this call."""
        asked = time.time()
        metrics = self.directory / "out" / "metrics.jsonl"
        self.until(lambda: self.steps() and self.steps()[-1]["step"] > step and metrics.stat().st_mtime > asked)

    def finish(self):
        """What was said, by machine, when the run has ended on all of them without an error."""
        said = [self.machines.said(number) for number in range(self.count)]
        codes = [self.machines.wait(number, 150) for number in range(self.count)]
        said = [self.machines.said(number) for number in range(self.count)]
        assert codes == [0] * self.count, said
        return said

    def facts(self):
        """Everything that two equal runs have in common: steps, losses, tokens, and the weights."""
        steps = [[one[key] for key in ("step", "loss", "grad_norm", "tokens")] for one in self.steps()]
        return steps, (self.directory / "out" / "model.safetensors").read_bytes()
