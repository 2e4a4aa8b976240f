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
    "training__num_train_epochs": 6,
    "training__save_strategy": "steps",
    "training__save_steps": 5,
    "training__eval_strategy": "no",
}
"""With dropout."""

ENDPOINT = f"{ADDRESSES[0]}:29500"


def by_launch(number, restarts):
    """The command that starts machine ``number`` of two by ``fullshard launch``."""
    options = ["--nnodes", "2", "--node_rank", str(number), "--nproc_per_node", "1", "--rdzv_endpoint", ENDPOINT]
    return [sys.executable, "-m", "fullshard", "launch", *options, "--max_restarts", str(restarts)]


def by_torchrun(number, restarts):
    """The same by torchrun."""
    options = ["--nnodes=2", f"--node-rank={number}", "--nproc-per-node=1", f"--rdzv-endpoint={ENDPOINT}"]
    if restarts:
        options = [one for one in options if not one.startswith("--node-rank")]
        options += ["--rdzv-backend=c10d", "--rdzv-id=a", "--rdzv-conf=join_timeout=300"]
    return [sys.executable, "-m", "torch.distributed.run", *options, f"--max-restarts={restarts}"]


class Run:
    """A run on two machines of one rank each."""

    def __init__(self, directory, start=by_launch, restarts=3, **changes):
        """Start it on both by ``start``."""
        directory.mkdir()
        self.directory, self.count = directory, 2
        file = write_run_file(directory, **(SETTINGS | changes))
        self.train = ["-m", "fullshard", "train", str(file), "--no-plan"]
        self.command, self.restarts = start, restarts
        env = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "RANK", "WORLD_"))}
        env |= {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        if start is by_torchrun:
            env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        self.machines = Machines(directory, env)

    def __enter__(self):
        for number in range(self.count):
            self.start(number)
        return self

    def __exit__(self, *_):
        self.machines.__exit__()

    def start(self, number):
        self.machines.start(number, [*self.command(number, self.restarts), *self.train])

    def steps(self):
        with contextlib.suppress(FileNotFoundError):
            return [one for one in read_jsonl(self.directory / "out" / "metrics.jsonl") if one["kind"] == "step"]
        return []

    def until(self, condition, seconds=240):
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.05)  # between looks at a file of another process

    def trains_past(self, step):
        """Return when a step after ``step`` is recorded that was trained after this call."""
        asked = time.time()
        metrics = self.directory / "out" / "metrics.jsonl"
        self.until(lambda: self.steps() and self.steps()[-1]["step"] > step and metrics.stat().st_mtime > asked)

    def said(self):
        """What each machine has said."""
        return [self.machines.said(number) for number in range(self.count)]

    def codes(self):
        """The exit codes, when the run has ended on all machines."""
        return [self.machines.wait(number, 200) for number in range(self.count)]

    def finish(self):
        """What was said, by machine, when the run has ended on all of them without an error."""
        codes = self.codes()
        assert codes == [0] * self.count, self.said()
        return self.said()

    def facts(self):
        """Everything that two equal runs have in common: steps, losses, tokens, and the weights."""
        steps = [[one[key] for key in ("step", "loss", "grad_norm", "tokens")] for one in self.steps()]
        return steps, (self.directory / "out" / "model.safetensors").read_bytes()
