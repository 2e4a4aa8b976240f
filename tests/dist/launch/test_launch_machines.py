"""Two machines, with a network, processes and names of their own and a cable between them, train one model."""

import json
import os
import sys
from pathlib import Path

import pytest

from support.namespaces import ADDRESSES, can_unshare, two_machines
from support.processes import SOURCE, free_port

SCRIPT = Path(__file__).with_name("machines_main.py")


FILE = """
distributed_type: MULTI_CPU
use_cpu: true
num_machines: 2
num_processes: 2
machine_rank: 1
main_process_ip: {}
main_process_port: {}
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """What each machine's launch ended with and printed, in namespaces or, where they are refused, on two addresses.

    Machine 0 is started by options, machine 1 by Accelerate's file.
    """
    apart = can_unshare()
    endpoint = f"{ADDRESSES[0]}:29500" if apart else f"127.0.0.2:{free_port()}"
    env = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    # torch warns of addresses without a name, which namespaces may have.
    env |= {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    file = tmp_path_factory.mktemp("machines") / "accelerate.yaml"
    file.write_text(FILE.format(*endpoint.split(":")))
    first = ["--nnodes", "2", "--node_rank", "0", "--nproc_per_node", "1", "--rdzv_endpoint", endpoint]
    commands = [
        [sys.executable, "-m", "fullshard", "launch", *options, str(SCRIPT)]
        for options in (first, ["--config_file", str(file)])
    ]
    with two_machines(commands, env, apart=apart) as machines:
        outputs = [machine.communicate(timeout=100) for machine in machines]
        assert [machine.returncode for machine in machines] == [0, 0], outputs
    lines = [next(line for line in out.splitlines() if "RESULT" in line) for out, _ in outputs]
    return {"apart": apart, "lines": lines, "results": [json.loads(line.split("RESULT ")[1]) for line in lines]} | {
        "errors": [err for _, err in outputs]
    }


@pytest.mark.dist
def test_the_losses_are_those_of_the_unsharded_run(runs):
    for result in runs["results"]:
        assert result["error"] < 1e-5
        assert len(set(result["losses"])) == 4


@pytest.mark.dist
def test_each_machine_prints_its_own_ranks_lines_alone(runs):
    for number, (line, result) in enumerate(zip(runs["lines"], runs["results"], strict=True)):
        assert line.startswith("RESULT ")
        assert result["rank"] == number
        assert result["local"] == ["0", "1", str(number)]
        assert runs["errors"][number].strip() == ""


@pytest.mark.dist
def test_what_ranks_tell_each_other_goes_over_the_cable(runs):
    if not runs["apart"]:
        pytest.skip("this user may not make namespaces: the machines are two addresses of one")
    for number, result in enumerate(runs["results"]):
        assert result["host"] == f"node{number}"
        assert not result["reads_memory"]
        assert result["sent_bytes"] > 1_000_000
