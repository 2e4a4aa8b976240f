"""Machines with a network, processes and memory of their own: ranks die, machines are lost, cables are pulled.

Every run ends with the bits of the undisturbed one, and nothing is on disk to resume from.
"""

import contextlib
import os
import signal
import sys
import time

import pytest

from support.namespaces import ADDRESSES, Machines, can_unshare
from support.processes import SOURCE
from support.tiny_run import MODEL, read_jsonl, write_run_file

pytestmark = [
    pytest.mark.dist,
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not can_unshare(), reason="this user may not make namespaces, or there is no ip or unshare"),
]

CHANGES = {
    "model": {"config": MODEL | {"num_layers": 1, "num_decoder_layers": 1}, "tokenizer": {"vocab_size": 60}},
    "sharding__wrap": ["T5Block"],
    "training__per_device_train_batch_size": 1,
    "training__num_train_epochs": 20,
    "training__save_strategy": "no",
    "training__eval_strategy": "no",
}
"""With dropout, and no checkpoint on disk."""


class Run:
    """A run on some machines of one rank each."""

    def __init__(self, directory, count, options=(), **changes):
        """Start it on all of them."""
        directory.mkdir()
        self.directory, self.count = directory, count
        file = write_run_file(directory, **(CHANGES | changes))
        self.options = ["--max_restarts", "3", *(options or ("--nnodes", str(count)))]
        self.train = ["-m", "fullshard.cli.main", "train", str(file), "--no-plan"]
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
        launch = [sys.executable, "-m", "fullshard.cli.main", "launch", *self.options, *place]
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


@pytest.fixture(scope="module")
def calm(tmp_path_factory):
    """The facts of undisturbed runs, by the number of machines."""
    found = {}

    def of(count):
        if count not in found:
            with Run(tmp_path_factory.mktemp("calm") / "run", count) as run:
                run.finish()
                found[count] = run.facts()
        return found[count]

    return of


FROM_MEMORY = "from the snapshot in memory"


@pytest.mark.parametrize(("count", "victim"), [(2, 1), (2, 0), (3, 2)])
def test_a_rank_that_is_killed_on_one_machine_starts_again_on_all(tmp_path, calm, count, victim):
    with Run(tmp_path / "run", count) as run:
        run.trains_past(6)
        os.kill(run.machines.processes(victim)[0], signal.SIGKILL)
        said = run.finish()
        assert f"rank {victim} was killed by signal 9 (SIGKILL)" in said[victim]
        assert FROM_MEMORY in said[0]
        assert run.facts() == calm(count)


@pytest.mark.parametrize(("count", "victim"), [(2, 1), (2, 0), (3, 1)])
def test_a_machine_that_is_lost_and_started_again_continues_from_its_partners_copy(tmp_path, calm, count, victim):
    with Run(tmp_path / "run", count) as run:
        run.trains_past(6)
        run.machines.lose(victim)
        run.start(victim)
        said = run.finish()
        others = [text for number, text in enumerate(said) if number != victim]
        assert all("restart 1 of 3" in text for text in others)
        assert FROM_MEMORY in said[0]
        assert run.facts() == calm(count)


def test_a_cut_shorter_than_the_limit_ends_nothing(tmp_path, calm):
    with Run(tmp_path / "run", 2) as run:
        run.trains_past(6)
        run.machines.cut(1)
        run.until(lambda: all("does not answer" in run.machines.said(number) for number in (0, 1)))
        run.machines.mend(1)
        said = run.finish()
        assert not any("restart" in text for text in said)
        assert run.facts() == calm(2)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_cut_longer_than_the_limit_ends_the_attempt_on_all_machines_which_meet_again(tmp_path, calm, victim):
    with Run(tmp_path / "run", 2) as run:
        run.trains_past(6)
        run.machines.cut(victim)
        for number in (0, 1):
            cause = f"machine {1 - number} (node{1 - number}) has sent no heartbeat for 2"
            run.until(lambda n=number, cause=cause: cause in run.machines.said(n))
        run.machines.mend(victim)
        said = run.finish()
        assert all("cut off from the network" in text and "restart 1 of 3" in text for text in said)
        assert FROM_MEMORY in said[0]
        assert run.facts() == calm(2)


def test_a_run_goes_on_without_a_machine_and_takes_it_in_again_after_a_save(tmp_path):
    long = {
        "model": {"config": CHANGES["model"]["config"] | {"dropout_rate": 0.0}, "tokenizer": {"vocab_size": 60}},
        "training__num_train_epochs": 100,
        "training__learning_rate": 1e-4,
        "training__save_strategy": "steps",
        "training__save_steps": 20,
    }
    with Run(tmp_path / "calm", 2, **long) as run:
        run.finish()
        right = run.steps()
    with Run(tmp_path / "run", 2, ["--nnodes", "1:2", "--rdzv_backend", "c10d"], **long) as run:
        run.trains_past(25)
        run.machines.lose(1)
        alone = "the run began on 2 ranks: on 1 a step of 4 rows is 4 micro-batches of 1 on each"
        run.until(lambda: alone in run.machines.said(0))
        run.start(1)
        said = run.finish()
        steps = run.steps()
    assert "another machine has arrived; it is taken in after the next checkpoint" in said[0]
    assert "[rank 1]" in said[1].partition("[rank 1]")[1] or "2 ranks" in said[0].rpartition(alone)[2]
    assert [one["step"] for one in steps] == [one["step"] for one in right]
    assert [one["tokens"] for one in steps] == [one["tokens"] for one in right]
    assert max(abs(one["loss"] - other["loss"]) for one, other in zip(steps, right, strict=True)) < 1e-5
