"""Which machines run a script: the command line, the file and Slurm brought together, and what contradicts."""

import pytest

from fullshard.errors import ConfigError
from fullshard.program.launch.script.machines import (
    MachinePlan,
    MachineSettings,
    Nodes,
    first_host,
    parse_endpoint,
    plan_machines,
    slurm_settings,
)

SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_NNODES": "2",
    "SLURM_NTASKS": "2",
    "SLURM_NODEID": "1",
    "SLURM_JOB_NODELIST": "gpu[07-09,12],login1",
}
LINE = MachineSettings("the command line")


def eight(requested):
    return requested or 8


def test_one_machine_meets_itself_on_a_port_of_its_own():
    assert plan_machines([LINE], eight) == MachinePlan(Nodes(1, 1), None, 8, "127.0.0.1", 0, "static", "none")


def test_the_command_line_goes_before_the_file_and_the_file_before_slurm():
    line = MachineSettings("the command line", host="front", port=1)
    file = MachineSettings("f.yaml", host="middle", port=2, processes=6, nnodes=Nodes(2, 2), backend="c10d")
    plan = plan_machines([line, file, slurm_settings(SLURM)], eight)
    assert (plan.host, plan.port, plan.backend, plan.nproc) == ("front", 1, "c10d", 3)
    assert (plan.node_rank, plan.run_id) == (1, "slurm-4711.0")


def test_slurm_alone_is_enough():
    plan = plan_machines([LINE, slurm_settings(SLURM)], eight)
    assert (plan.nnodes, plan.node_rank, plan.host, plan.nproc) == (Nodes(2, 2), 1, "gpu07", 8)
    assert plan.port == plan_machines([LINE, slurm_settings({**SLURM, "SLURM_NODEID": "0"})], eight).port
    assert plan.port != plan_machines([LINE, slurm_settings({**SLURM, "SLURM_JOB_ID": "4712"})], eight).port
    assert 20_000 <= plan.port < 30_000


def test_a_slurm_job_of_one_machine_and_no_job_say_nothing_of_meeting():
    assert slurm_settings({}) is None
    assert slurm_settings({"SLURM_JOB_ID": "1", "SLURM_NNODES": "1", "SLURM_NTASKS": "8"}) is None
    one = slurm_settings({**SLURM, "SLURM_NNODES": "1", "SLURM_NTASKS": "1", "SLURM_NODEID": "0"})
    assert plan_machines([LINE, one], eight).host == "127.0.0.1"


def test_srun_with_a_task_a_gpu_is_refused_with_the_remedy():
    with pytest.raises(ConfigError, match=r"started `fullshard launch` 16 times on 2 machines.*--ntasks-per-node=1"):
        slurm_settings({**SLURM, "SLURM_NTASKS": "16"})


def test_several_machines_without_srun_are_refused_with_the_remedy():
    batch = {name: value for name, value in SLURM.items() if name != "SLURM_STEP_ID"}
    with pytest.raises(ConfigError, match=r"2 machines.*one of them only.*srun --ntasks-per-node=1"):
        slurm_settings(batch)


@pytest.mark.parametrize(
    ("hosts", "first"),
    [("node1", "node1"), ("a,b", "a"), ("gpu[07-09,12],x", "gpu07"), ("r[1-2]n[03,05]", "r1n03"), ("n[5]", "n5")],
)
def test_the_first_host_of_slurms_list(hosts, first):
    assert first_host(hosts) == first


@pytest.mark.parametrize(
    ("sources", "text"),
    [
        ([MachineSettings("the command line", nnodes=Nodes(2, 2), node_rank=0)], r"2 machines need a place to meet"),
        ([MachineSettings("the command line", nnodes=Nodes(2, 2), host="a")], r"--node_rank 0 on the one.*1 to 1"),
        (
            [MachineSettings("f.yaml", nnodes=Nodes(2, 2), host="a", node_rank=2)],
            r"from 0 to 1.*f\.yaml says.*number 2",
        ),
        ([MachineSettings("the command line", node_rank=1)], r"from 0 to 0.*number 1"),
        (
            [MachineSettings("f.yaml", nnodes=Nodes(2, 2), host="a", node_rank=0, processes=5)],
            r"f\.yaml requests 5 ranks.*are 2",
        ),
        ([MachineSettings("f.yaml", backend="etcd")], r"static or c10d; f\.yaml sets etcd"),
        (
            [MachineSettings("the command line", nnodes=Nodes(1, 2), host="a", backend="static")],
            r"1:2.*fixed one.*c10d",
        ),
        ([MachineSettings("the command line", nnodes=Nodes(1, 2), host="a", processes=4)], r"num_processes: 4.*1:2"),
        (
            [MachineSettings("f.yaml", nnodes=Nodes(4, 4)), slurm_settings(SLURM)],
            r"f\.yaml says 4 machines.*started this on 2",
        ),
        (
            [MachineSettings("f.yaml", node_rank=0), slurm_settings(SLURM)],
            r"f\.yaml says.*machine 0, and Slurm that it is 1",
        ),
    ],
)
def test_what_is_missing_or_contradicts_is_told_with_both_values(sources, text):
    with pytest.raises(ConfigError, match=text):
        plan_machines(sources, eight)


def test_an_open_number_of_machines_takes_c10d_and_needs_no_number():
    plan = plan_machines([MachineSettings("the command line", nnodes=Nodes.parse("1:4"), host="a")], eight)
    assert (plan.backend, plan.nnodes, plan.port) == ("c10d", Nodes(1, 4), 29_500)


def test_ranks_that_may_start_again_take_c10d_and_keep_the_number():
    source = MachineSettings("the command line", nnodes=Nodes(2, 2), node_rank=1, host="a")
    assert plan_machines([source], eight).backend == "static"
    plan = plan_machines([source], eight, restarts=True)
    assert (plan.backend, plan.node_rank) == ("c10d", 1)
    assert plan_machines([LINE], eight, restarts=True).backend == "static"
    file = MachineSettings("f.yaml", backend="static")
    with pytest.raises(ConfigError, match=r"f\.yaml sets rdzv_backend static.*--rdzv_backend c10d"):
        plan_machines([source, file], eight, restarts=True)


def test_endpoints():
    assert parse_endpoint("node0:29400") == ("node0", 29_400)
    assert parse_endpoint("10.0.0.1") == ("10.0.0.1", None)
    assert parse_endpoint("[fe80::1]:5") == ("fe80::1", 5)
    for wrong in ("node0:", "node0:port", "node0:70000", "a b:1", ""):
        with pytest.raises(ConfigError, match="HOST:PORT"):
            parse_endpoint(wrong)
