"""One of two machines is taken away: the run saves on both, ends with 75, and the same commands finish it."""

import os
import signal
import sys
from contextlib import contextmanager

import pytest

from support.namespaces import two_machines
from support.processes import SOURCE, free_port
from support.tiny_run import QUICK, read_jsonl, write_run_file

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(600)]

CHANGES = QUICK | {"training__per_device_train_batch_size": 1, "training__num_train_epochs": 4}


@contextmanager
def started(directory):
    """The same command on two machines, which are two addresses of this one."""
    endpoint = f"127.0.0.2:{free_port()}"
    run = ["-m", "fullshard", "train", str(directory / "run.yaml"), "--no-plan"]
    machine = ["--nnodes", "2", "--nproc_per_node", "1", "--rdzv_endpoint", endpoint, "--node_rank"]
    launch = [sys.executable, "-m", "fullshard", "launch", *machine]
    commands = [[*launch, str(number), *run] for number in (0, 1)]
    env = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "RANK", "WORLD_SIZE"))}
    env |= {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with two_machines(commands, env, apart=False) as machines:
        yield machines


@pytest.mark.parametrize("taken", [0, 1])
def test_a_machine_that_is_taken_away_costs_no_step(tmp_path, taken):
    write_run_file(tmp_path, **CHANGES)
    with started(tmp_path) as machines:
        for line in machines[0].stdout:
            if "step 1/" in line:
                break
        machines[taken].send_signal(signal.SIGTERM)
        ended = [machine.communicate(timeout=250) for machine in machines]
        assert [machine.returncode for machine in machines] == [75, 75], ended
    assert "The same command resumes from there." in ended[taken][1]
    records = read_jsonl(tmp_path / "out" / "metrics.jsonl")
    stopped_after = max(record["step"] for record in records if record["kind"] == "step")
    with started(tmp_path) as machines:
        ended = [machine.communicate(timeout=250) for machine in machines]
        assert [machine.returncode for machine in machines] == [0, 0], ended
    steps = [record["step"] for record in read_jsonl(tmp_path / "out" / "metrics.jsonl") if record["kind"] == "step"]
    assert 1 <= stopped_after < steps[-1]
    assert steps == list(range(1, steps[-1] + 1))
