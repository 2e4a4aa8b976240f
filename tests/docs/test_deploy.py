"""Files of deploy/ are what their schedulers read, and each starts commands that this program takes.

The fields below are those that the files use, written down from the definitions of JobSet v0.9.1
(jobset.x-k8s.io_jobsets.yaml), Kubeflow's training operator v1.9.0 (kubeflow.org_pytorchjobs.yaml) and SkyPilot 0.14.1
(sky/utils/schemas.py).
"""

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from fullshard.program.cli.main import parse
from fullshard.program.launch.local import STOPPED_EXIT_CODE
from fullshard.version import __version__

DEPLOY = Path(__file__).parents[2] / "deploy"

CONTAINER = {
    "name": str,
    "image": str,
    "args": [str],
    "resources": {"limits": {"nvidia.com/gpu": int}},
    "volumeMounts": [{"name": str, "mountPath": str}],
}
POD = {
    "spec": {
        "restartPolicy": {"Never"},
        "terminationGracePeriodSeconds": int,
        "containers": [CONTAINER],
        "securityContext": {"runAsNonRoot": bool, "runAsUser": int, "fsGroup": int},
        "volumes": [{"name": str, "persistentVolumeClaim": {"claimName": str}, "emptyDir": {"medium": {"Memory"}}}],
    }
}
RULE = {
    "action": {"FailJob", "FailIndex", "Ignore", "Count"},
    "onExitCodes": {"containerName": str, "operator": {"In", "NotIn"}, "values": [int]},
    "onPodConditions": [{"type": str, "status": str}],
}
JOB = {
    "completions": int,
    "parallelism": int,
    "backoffLimit": int,
    "podFailurePolicy": {"rules": [RULE]},
    "template": POD,
}
ACTIONS = {"FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"}
JOBSET = {
    "apiVersion": {"jobset.x-k8s.io/v1alpha2"},
    "kind": {"JobSet"},
    "metadata": {"name": str},
    "spec": {
        "failurePolicy": {
            "maxRestarts": int,
            "rules": [{"name": str, "action": ACTIONS, "onJobFailureReasons": [str]}],
        },
        "replicatedJobs": [{"name": str, "replicas": int, "template": {"spec": JOB}}],
    },
}
REPLICA = {"replicas": int, "restartPolicy": {"Always", "OnFailure", "Never", "ExitCode"}, "template": POD}
PYTORCHJOB = {
    "apiVersion": {"kubeflow.org/v1"},
    "kind": {"PyTorchJob"},
    "metadata": {"name": str},
    "spec": {
        "runPolicy": {"cleanPodPolicy": {"All", "Running", "None"}, "backoffLimit": int},
        "pytorchReplicaSpecs": {"Master": REPLICA, "Worker": REPLICA},
    },
}
SKYPILOT = {
    "name": str,
    "workdir": str,
    "num_nodes": int,
    "resources": {
        "accelerators": str,
        "use_spot": bool,
        "job_recovery": {"max_restarts_on_errors": int, "recover_on_exit_codes": [int]},
    },
    "volumes": {"/runs": str},
    "setup": str,
    "run": str,
}
KUBERNETES = {"kubernetes/jobset.yaml": JOBSET, "kubernetes/pytorchjob.yaml": PYTORCHJOB}
FILES = KUBERNETES | {"skypilot/one-machine.yaml": SKYPILOT, "skypilot/several-machines.yaml": SKYPILOT}


def check(value, fields, where):
    """Assert that a value has only these fields, each of its type, or is one of these values."""
    if isinstance(fields, dict):
        assert isinstance(value, dict), where
        assert set(value) <= set(fields), where
        for name, part in value.items():
            check(part, fields[name], f"{where}.{name}")
    elif isinstance(fields, list):
        assert isinstance(value, list), where
        for part in value:
            check(part, fields[0], where)
    elif isinstance(fields, set):
        assert value in fields, where
    else:
        assert type(value) is fields, where


def read(name):
    return yaml.safe_load((DEPLOY / name).read_text(encoding="utf-8"))


def machines(arguments, environments):
    """The parsed command of each machine, with the variables that its scheduler sets there."""
    parsed = []
    for variables in environments:
        words = [re.sub(r"\$\((\w+)\)", lambda name: variables[name[1]], word) for word in arguments]  # noqa: B023
        parsed.append(parse(words))
        parse(parsed[-1].arguments)  # the command of each rank
    assert {(one.nnodes.most, one.rdzv_endpoint, one.script) for one in parsed} == {
        (2, parsed[0].rdzv_endpoint, "fullshard")
    }
    assert [one.node_rank for one in parsed] == [0, 1]
    return parsed[0].rdzv_endpoint


@pytest.mark.parametrize("name", FILES)
def test_fields_are_those_of_the_scheduler(name):
    check(read(name), FILES[name], name)


def test_the_jobset_meets_at_its_first_machine_and_starts_again_what_has_saved():
    jobset = read("kubernetes/jobset.yaml")
    (job,) = jobset["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    assert spec["completions"] == spec["parallelism"] == 2
    (container,) = spec["template"]["spec"]["containers"]
    place = machines(container["args"], [{"JOB_COMPLETION_INDEX": str(number)} for number in (0, 1)])
    # JobSet names a machine JOBSET-JOB-REPLICA-INDEX, in a domain named as the JobSet.
    name = jobset["metadata"]["name"]
    assert place == f"{name}-{job['name']}-0-0.{name}:29500"
    on_exit = spec["podFailurePolicy"]["rules"][0]["onExitCodes"]
    assert on_exit == {"containerName": container["name"], "operator": "In", "values": [STOPPED_EXIT_CODE]}


def test_the_pytorchjob_takes_the_operators_variables_and_restarts_on_every_code():
    replicas = read("kubernetes/pytorchjob.yaml")["spec"]["pytorchReplicaSpecs"]
    assert replicas["Master"]["template"] == replicas["Worker"]["template"]
    assert {replica["restartPolicy"] for replica in replicas.values()} == {"OnFailure"}
    (container,) = replicas["Master"]["template"]["spec"]["containers"]
    assert container["name"] == "pytorch"
    common = {"PET_NNODES": "2", "MASTER_ADDR": "fullshard-master-0", "MASTER_PORT": "23456"}
    place = machines(container["args"], [common | {"PET_NODE_RANK": str(number)} for number in (0, 1)])
    assert place == "fullshard-master-0:23456"


@pytest.mark.parametrize("name", KUBERNETES)
def test_pods_are_those_of_kubernetes(name):
    validate = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate")
    spec = read(name)["spec"]
    if "replicatedJobs" in spec:
        job = spec["replicatedJobs"][0]["template"]
        validate.validate(
            {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "job"}, **job}, "1.32", strict=True
        )
    for replica in spec.get("pytorchReplicaSpecs", {}).values():
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, **replica["template"]}
        validate.validate(pod, "1.32", strict=True)


def test_skypilot_runs_train_on_one_machine_and_launch_on_several(tmp_path):
    (one, several) = (read(f"skypilot/{name}.yaml") for name in ("one-machine", "several-machines"))
    for task in (one, several):
        assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [STOPPED_EXIT_CODE]
    ran = [shell(one["run"], tmp_path, {})]
    assert parse(ran[0]).config == Path("run.yaml")
    common = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NUM_GPUS_PER_NODE": "8", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"}
    ran = [shell(several["run"], tmp_path, common | {"SKYPILOT_NODE_RANK": str(number)}) for number in (0, 1)]
    assert ran[0][:4] == ["launch", "--nnodes", "2", "--node_rank"]
    parsed = [parse(words) for words in ran]
    assert [(one.rdzv_endpoint, one.node_rank) for one in parsed] == [("10.0.0.1:29500", 0), ("10.0.0.1:29500", 1)]


def shell(script, home, variables):
    """The arguments that a script gives to ~/fullshard/bin/fullshard."""
    program = home / "fullshard" / "bin" / "fullshard"
    program.parent.mkdir(parents=True, exist_ok=True)
    program.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    program.chmod(0o755)
    environment = {"HOME": str(home), "PATH": "/usr/bin:/bin"} | variables
    ended = subprocess.run(["bash", "-eu", "-c", script], env=environment, capture_output=True, text=True, check=True)
    return ended.stdout.splitlines()


@pytest.mark.parametrize(("code", "requeued"), [(0, False), (75, True), (1, False)])
def test_the_slurm_job_is_queued_again_if_the_run_has_saved(tmp_path, code, requeued):
    script = DEPLOY / "slurm" / "train.sbatch"
    lines = script.read_text(encoding="utf-8").splitlines()
    options = dict(re.fullmatch(r"#SBATCH --([\w-]+)(?:=(\S+))?", line).groups() for line in lines if "#SBATCH" in line)
    assert options["ntasks-per-node"] == "1"  # as slurm_settings requires
    assert options["signal"].startswith("TERM@")  # without B: to the ranks, not to the batch shell
    for name, text in (
        ("srun", f'printf "%s " "$@" > {tmp_path}/ran; exit {code}'),
        ("scontrol", f"touch {tmp_path}/queued"),
    ):
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7"}
    ended = subprocess.run(["bash", str(script), "run.yaml", "seed=1"], env=environment, check=False)
    assert ended.returncode == code
    assert (tmp_path / "queued").exists() == requeued
    words = shlex.split((tmp_path / "ran").read_text())
    assert words[0] == "fullshard"
    assert parse(parse(words[1:]).arguments).overrides == ["seed=1"]


def test_the_image_runs_the_program_without_a_shell_and_not_as_root():
    text = (DEPLOY / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line.split(maxsplit=1) for line in text.splitlines() if line and not line.startswith("#")]
    known = {"FROM", "ARG", "ENV", "RUN", "WORKDIR", "COPY", "USER", "ENTRYPOINT", "CMD"}
    assert {name for name, _ in lines} <= known
    assert all(re.match(r"python:\d+\.\d+\.\d+-slim", rest) for name, rest in lines if name == "FROM")
    last = dict(lines)
    assert int(last["USER"]) > 0
    assert yaml.safe_load(last["ENTRYPOINT"]) == ["fullshard"]
    assert f"fullshard:{__version__}" in text


@pytest.mark.parametrize(("linter", "file"), [("hadolint", "Dockerfile"), ("shellcheck", "slurm/train.sbatch")])
def test_linters_find_nothing(linter, file):
    program = shutil.which(linter) or pytest.skip(f"needs {linter}: pip install {linter}-py")
    ended = subprocess.run([program, str(DEPLOY / file)], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout
